"""What is in the store already of a trainer that was started again: by digest, so that nothing is taken for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

from checkpoint.store import layout
from checkpoint.store.errors import Corrupt, NotFound
from checkpoint.store.run_store import Store
from checkpoint.stream import manifest
from checkpoint.stream.manifest import Manifest
from checkpoint.weights import delta
from policies.model.vocabulary import PolicyVersion, Precedence
from policies.serving.wire import PolicyRef


@dataclass(frozen=True, slots=True)
class Published:
    """A policy with the deltas since a whole one, and the place of that one if it is a snapshot."""

    ref: PolicyRef
    chain: int = 0
    chain_bytes: int = 0
    snapshot: str = ""


def newest_first(store: Store, only: PolicyVersion | None = None) -> list[str]:
    """The places of stored policies, or of those of one version."""
    found: dict[str, tuple[Precedence, int]] = {}
    for timeline in store.folders(layout.POLICIES):
        for prefix in store.folders(timeline):
            with contextlib.suppress(ValueError):  # a foreign file
                if only in (None, layout.version_of(f"{prefix}/")):
                    found[prefix] = age(prefix)
    return sorted(found, key=lambda prefix: found[prefix], reverse=True)


def age(prefix: str) -> tuple[Precedence, int]:
    """By which published policies are in the order of their making. Raises ValueError for a foreign name."""
    return layout.author_of(prefix), layout.version_of(f"{prefix}/").step


def find(store: Store, digest: str, prefixes: Iterable[str]) -> Published | None:
    """The first of these policies with weights of that digest, if it and all that it needs have their manifests.

    Raises StoreError where the store itself fails.
    """
    for prefix in prefixes:
        with contextlib.suppress(NotFound, Corrupt):
            one = manifest.load(store, prefix)
            if one.meta.get(manifest.WEIGHTS) == digest:
                return _with_chain(store, one)
    return None


def _with_chain(store: Store, policy: Manifest) -> Published:
    """Raises NotFound, Corrupt, StoreError."""
    at, chain, chain_bytes = policy, 0, 0
    if snapshot := policy.meta.get(manifest.SNAPSHOT, ""):
        manifest.load(store, snapshot, layout.SNAPSHOT)
    while at.meta.get(manifest.KIND) == manifest.DELTA and at.root != snapshot:
        chain, chain_bytes = chain + 1, chain_bytes + sum(f.size_bytes for f in at.files if f.name == delta.NAME)
        at = manifest.load(store, at.meta[manifest.BASE_PREFIX])
    ref = PolicyRef(policy.version, policy.root, policy.meta[manifest.WEIGHTS])
    return Published(ref, chain, chain_bytes, snapshot)
