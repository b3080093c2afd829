"""Test, before any machine is bought, that the store supports what a run needs."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from grpo_orch.checkpoint.store.backends import CREATE_ONLY, one_line
from grpo_orch.checkpoint.store.errors import AlreadyExists, StoreError, StoreUnavailable, StoreUnusable
from grpo_orch.checkpoint.store.run_store import Store

FOLDER = "probe"
# A store that checks before it writes lets at least two of eight writers succeed in nearly every round.
WRITERS = 8
ROUNDS = 8
RACE_S = 5.0  # no further round begins after this, except the second
CONSEQUENCE = "two controllers could both control the run"


def probe(store: Store) -> None:
    """Write, read, list, replace and delete small objects, some concurrently. Leaves no object behind.

    Raises:
        StoreUnusable: the store lacks something that a run needs, such as create-only writes.
        StoreError: another error of the store, such as StoreDenied.
    """
    folder = f"{FOLDER}/{secrets.token_hex(8)}"
    key = f"{folder}/object"
    contested = [f"{folder}-race/{number}" for number in range(ROUNDS)]
    try:
        _try_all(store, folder, key)
        _race(store, contested)
        store.delete(contested)
    except StoreUnavailable:
        raise  # a deletion would fail as well, after further retries
    except BaseException:
        with contextlib.suppress(StoreError):
            store.delete([key, *contested])
        raise


def _race(store: Store, keys: list[str]) -> None:
    """Let writers create one object concurrently, repeatedly: one may succeed, and its object must stay."""
    shown, until_s = f"store {one_line(store.url)!r}", time.monotonic() + RACE_S
    with ThreadPoolExecutor(WRITERS, thread_name_prefix="probe") as pool:
        for number, key in enumerate(keys):
            if number >= 2 and time.monotonic() > until_s:
                return
            barrier = threading.Barrier(WRITERS)
            calls = [pool.submit(_create, store, key, b"writer %d" % writer, barrier) for writer in range(WRITERS)]
            created = [content for call in calls if (content := call.result()) is not None]
            if len(created) > 1:
                races = f"{len(created)} of {WRITERS} concurrent create-only writes of one object succeeded"
                raise StoreUnusable(f"{shown}: {races}: {CONSEQUENCE}", CREATE_ONLY)
            # If none succeeded, the winner's response was lost and its retry found its own object.
            if created and store.get(key) != created[0]:
                raise StoreUnusable(f"{shown}: a refused write changed an object", CREATE_ONLY)


def _create(store: Store, key: str, content: bytes, barrier: threading.Barrier) -> bytes | None:
    """Create the object at the same time as others; return the content on success."""
    barrier.wait()
    try:
        store.create(key, content)
    except AlreadyExists:
        return None
    return content


def _try_all(store: Store, folder: str, key: str) -> None:
    shown = f"store {one_line(store.url)!r}"
    # The first write may find its own object after a lost response; the content is checked below.
    with contextlib.suppress(AlreadyExists):
        store.create(key, b"first")
    with contextlib.suppress(AlreadyExists):
        store.create(key, b"second")
        raise StoreUnusable(f"{shown} ignores create-only writes: {CONSEQUENCE}", CREATE_ONLY)
    if store.get(key) != b"first":
        raise StoreUnusable(
            f"{shown} does not return what was written, or a refused write changed it", CREATE_ONLY
        )
    if [entry.key for entry in store.entries(folder)] != [key]:
        hint = "use a store with consistent listings"
        raise StoreUnusable(f"{shown} does not list an object that was just written", hint)
    store.put(key, b"third")
    if store.get(key) != b"third":
        raise StoreUnusable(
            f"{shown} returns the old object after a new one was written", "use one without a cache"
        )
    store.delete([key])
    if store.get_or_none(key) is not None:
        raise StoreUnusable(f"{shown} does not delete objects", "allow deletion: a run replaces its checkpoints")
