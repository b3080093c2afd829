"""Whether a store keeps what a run is built on, tried for real and before any machine is bought."""

from __future__ import annotations

import contextlib
import secrets

from checkpoint.backends.answers import one_line
from checkpoint.errors import AlreadyExists, StoreError, StoreUnavailable, StoreUnusable
from checkpoint.store import Store

FOLDER = "probe"
CREATE_ONLY = "use a store that knows If-None-Match: AWS S3, Google Cloud Storage, Azure, Ceph, or a folder"


def probe(store: Store) -> None:
    """Write, read, list, replace and delete one small object; it leaves nothing behind.

    Raises:
        StoreUnusable: the store does not do what a run needs, create-only writes above all.
        StoreError: whatever else the store says, such as StoreDenied.
    """
    folder = f"{FOLDER}/{secrets.token_hex(8)}"
    key = f"{folder}/object"
    try:
        _try_all(store, folder, key)
    except StoreUnavailable:
        raise  # it would not take the deletion either, and patience has been had
    except BaseException:
        with contextlib.suppress(StoreError):
            store.delete([key])
        raise


def _try_all(store: Store, folder: str, key: str) -> None:
    shown = f"store {one_line(store.url)!r}"
    # The first may meet itself, when its answer is lost; what counts is what the object holds.
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
