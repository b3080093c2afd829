"""What is in the store of published policies: what a trainer that was started again takes up, and which may go.

Policies are known by digest, so that nothing is taken for another.
"""

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


# Which published policies may go: the present one and the one before stay usable, or more where completions are
# sampled from older ones.


@dataclass(frozen=True, slots=True)
class _Bases:
    """Places of policies: what a delta is to, and the last beside which all weights are, where it names one."""

    base: str = ""
    snapshot: str = ""


class PolicyRemover:
    """Removes a publisher's own and older publishers' policies: one that was replaced and does not know it takes
    nothing from the newer one, which removes what it leaves."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._bases: dict[str, _Bases] = {}  # what each needs to be of use; manifests never change

    def remove(self, present: str, since_step: int | None = None) -> bool:
        """Remove all but the present one and the one before, of this and of older timelines, with what they are
        deltas to; and what a killed trainer left of an unfinished one. Return whether what must stay is there.

        Those of the present one's timeline since `since_step` stay, too.

        Raises StoreError; Corrupt, before it removes anything, where what must stay cannot be told."""
        keys = [entry.key for entry in self._store.entries(layout.POLICIES)]
        whole = {key.removesuffix(f"/{layout.MANIFEST}") for key in keys if key.endswith(f"/{layout.MANIFEST}")}
        older: dict[str, tuple[Precedence, int]] = {}
        for prefix in {"/".join(key.split("/")[:3]) for key in keys}:
            with contextlib.suppress(ValueError):  # a foreign file
                older[prefix] = age(prefix)
        in_order = sorted((p for p in older if older[p] < age(present)), key=lambda p: older[p])
        there = [prefix for prefix in in_order if prefix in whole]
        usable = {present, *there[-1:]}
        if since_step is not None:
            since = PolicyVersion(layout.version_of(f"{present}/").timeline, since_step)
            of = {prefix: layout.version_of(f"{prefix}/") for prefix in there}
            usable |= {prefix for prefix in there if of[prefix].timeline == since.timeline and of[prefix] >= since}
        needed = {one for prefix in usable for one in self._with_its_bases(prefix)}
        snapshots = {one for prefix in usable if (one := self._bases_of(prefix).snapshot)}
        for gone in in_order:
            if gone not in needed:
                manifest.remove(self._store, gone)
        self._bases = {prefix: base for prefix, base in self._bases.items() if prefix in needed}
        return needed <= whole and {f"{one}/{layout.SNAPSHOT}" for one in snapshots} <= set(keys)

    def _with_its_bases(self, prefix: str) -> list[str]:
        """It and what it is a delta to, back to where all weights are."""
        found, snapshot = list[str](), self._bases_of(prefix).snapshot
        while prefix and prefix not in found:
            found.append(prefix)
            prefix = self._bases_of(prefix).base if prefix != snapshot else ""
        return found

    def _bases_of(self, prefix: str) -> _Bases:
        """None of a whole policy, and of one that is not there. Raises Corrupt: the next read of it may be right,
        and nodes may need what it names."""
        if prefix not in self._bases:
            meta = dict[str, str]()
            with contextlib.suppress(NotFound):
                meta = manifest.load(self._store, prefix).meta
            is_delta = meta.get(manifest.KIND) == manifest.DELTA
            base, snapshot = meta.get(manifest.BASE_PREFIX, ""), meta.get(manifest.SNAPSHOT, "")
            self._bases[prefix] = _Bases(base, snapshot) if is_delta else _Bases()
        return self._bases[prefix]
