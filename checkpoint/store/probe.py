"""Tests on the real store, before any machine is bought, that it does what a run needs."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from checkpoint.store.backends.answers import CREATE_ONLY, one_line
from checkpoint.store.errors import AlreadyExists, StoreError, StoreUnavailable, StoreUnusable
from checkpoint.store.run_store import Store

FOLDER = "probe"
# A store that looks first and then writes lets two of eight writers win in nearly every round.
WRITERS = 8
ROUNDS = 8
RACE_S = 5.0  # no round begins after that, except the first two


def probe(store: Store) -> None:
    """Write, read, list, replace and delete small objects, some concurrently; leaves nothing behind.

    Raises:
        StoreUnusable: the store does not do what a run needs, create-only writes above all.
        StoreError: whatever else the store says, such as StoreDenied.
    """
    folder = f"{FOLDER}/{secrets.token_hex(8)}"
    key = f"{folder}/object"
    contested = [f"{folder}-race/{number}" for number in range(ROUNDS)]
    try:
        _try_all(store, folder, key)
        _race(store, contested)
        store.delete(contested)
    except StoreUnavailable:
        raise  # it would not take the deletion either, and was retried long enough
    except BaseException:
        with contextlib.suppress(StoreError):
            store.delete([key, *contested])
        raise


def _race(store: Store, keys: list[str]) -> None:
    """Have writers create one object at the same moment, repeatedly: one may win, and its object stays."""
    shown, until_s = f"store {one_line(store.url)!r}", time.monotonic() + RACE_S
    with ThreadPoolExecutor(WRITERS, thread_name_prefix="probe") as pool:
        for number, key in enumerate(keys):
            if number >= 2 and time.monotonic() > until_s:
                return
            line = threading.Barrier(WRITERS)
            tries = [pool.submit(_creates, store, key, b"writer %d" % writer, line) for writer in range(WRITERS)]
            won = [content for one in tries if (content := one.result()) is not None]
            if len(won) > 1:
                raise StoreUnusable(
                    f"{shown}: of writers that create one object at the same moment {len(won)} win: "
                    "two controllers could both believe that they steer the run",
                    CREATE_ONLY,
                )
            # If none won, the winner's answer was lost and its retry met its own object.
            if won and store.get(key) != won[0]:
                raise StoreUnusable(f"{shown}: a refused write changed an object", CREATE_ONLY)


def _creates(store: Store, key: str, content: bytes, line: threading.Barrier) -> bytes | None:
    """Create the object at the same moment as others; return the content if this one won."""
    line.wait()
    try:
        store.create(key, content)
    except AlreadyExists:
        return None
    return content


def _try_all(store: Store, folder: str, key: str) -> None:
    shown = f"store {one_line(store.url)!r}"
    # The first may meet its own object after a lost answer: what counts is the content.
    with contextlib.suppress(AlreadyExists):
        store.create(key, b"first")
    with contextlib.suppress(AlreadyExists):
        store.create(key, b"second")
        raise StoreUnusable(
            f"{shown} ignores create-only writes: two controllers could both believe that they steer the run",
            CREATE_ONLY,
        )
    if store.get(key) != b"first":
        raise StoreUnusable(
            f"{shown}: an object is not what was written, or a refused write changed it", CREATE_ONLY
        )
    if [entry.key for entry in store.entries(folder)] != [key]:
        raise StoreUnusable(f"{shown} does not list an object that was just written", "use one that does at once")
    store.put(key, b"third")
    if store.get(key) != b"third":
        raise StoreUnusable(
            f"{shown} returns an old object after a new one was written", "use one without a cache"
        )
    store.delete([key])
    if store.get_or_none(key) is not None:
        raise StoreUnusable(f"{shown} does not delete", "allow deletion: a run replaces its checkpoints")
