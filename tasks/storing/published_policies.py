"""Find published policies in the store, so that a restarted trainer reuses them, and remove old ones.

Policies are identified by digest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import Corrupt, NotFound
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import manifest
from grpo_orch.checkpoint.stream.manifest import Manifest
from grpo_orch.checkpoint.weights import delta
from grpo_orch.policies.model.vocabulary import PolicyVersion, Precedence
from grpo_orch.policies.serving.wire import PolicyRef


@dataclass(frozen=True, slots=True)
class Published:
    """A stored policy.

    `chain` counts the deltas since the last whole policy or snapshot; `snapshot` is the latter's prefix.
    """

    ref: PolicyRef
    chain: int = 0
    chain_bytes: int = 0
    snapshot: str = ""


def newest_first(store: Store, only: PolicyVersion | None = None) -> list[str]:
    """Return the prefixes of stored policies, newest first, or only those of one version."""
    ages: dict[str, tuple[Precedence, int]] = {}
    for timeline in store.folders(layout.POLICIES):
        for prefix in store.folders(timeline):
            with contextlib.suppress(ValueError):  # a foreign file
                if only in (None, layout.version_of(f"{prefix}/")):
                    ages[prefix] = age(prefix)
    return sorted(ages, key=lambda prefix: ages[prefix], reverse=True)


def age(prefix: str) -> tuple[Precedence, int]:
    """Return a key that sorts policies by creation. Raises ValueError for a foreign name."""
    return layout.author_of(prefix), layout.version_of(f"{prefix}/").step


def find(store: Store, digest: str, prefixes: Iterable[str]) -> Published | None:
    """Return the first policy with weights of that digest, if its manifest and all manifests it needs exist.

    Raises StoreError if the store itself fails.
    """
    for prefix in prefixes:
        with contextlib.suppress(NotFound, Corrupt):
            policy = manifest.load(store, prefix)
            if policy.meta.get(manifest.WEIGHTS) == digest:
                return _with_chain(store, policy)
    return None


def _with_chain(store: Store, policy: Manifest) -> Published:
    """Load a policy's chain of deltas. Raises NotFound, Corrupt, StoreError."""
    at, chain, chain_bytes = policy, 0, 0
    if snapshot := policy.meta.get(manifest.SNAPSHOT, ""):
        manifest.load(store, snapshot, layout.SNAPSHOT)
    while at.meta.get(manifest.KIND) == manifest.DELTA and at.root != snapshot:
        chain, chain_bytes = chain + 1, chain_bytes + sum(f.size_bytes for f in at.files if f.name == delta.NAME)
        at = manifest.load(store, at.meta[manifest.BASE_PREFIX])
    ref = PolicyRef(policy.version, policy.root, policy.meta[manifest.WEIGHTS])
    return Published(ref, chain, chain_bytes, snapshot)


# Removal keeps the current and the previous policy usable, and more if completions are sampled from older ones.


@dataclass(frozen=True, slots=True)
class _Bases:
    """Prefixes of a delta's base, and of the last snapshot if it has one."""

    base: str = ""
    snapshot: str = ""


class PolicyRemover:
    """Removes policies of this and older publishers, never those of a newer publisher.

    So a replaced publisher that still runs cannot harm its successor, which removes what it leaves.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._bases: dict[str, _Bases] = {}  # by policy; manifests never change

    def remove(self, current: str, since_step: int | None = None) -> bool:
        """Remove old policies, and unfinished ones of killed trainers. Return whether the kept ones are complete.

        Kept are the current policy, the previous one of this or an older timeline, those of the current timeline
        since `since_step`, and the policies that their deltas need.

        Raises StoreError; Corrupt, before removing anything, if a damaged manifest hides what must be kept.
        """
        keys = [entry.key for entry in self._store.entries(layout.POLICIES)]
        whole = {key.removesuffix(f"/{layout.MANIFEST}") for key in keys if key.endswith(f"/{layout.MANIFEST}")}
        older: dict[str, tuple[Precedence, int]] = {}
        for prefix in {"/".join(key.split("/")[:3]) for key in keys}:
            with contextlib.suppress(ValueError):  # a foreign file
                older[prefix] = age(prefix)
        in_order = sorted((p for p in older if older[p] < age(current)), key=lambda p: older[p])
        complete = [prefix for prefix in in_order if prefix in whole]
        usable = {current, *complete[-1:]}
        if since_step is not None:
            since = PolicyVersion(layout.version_of(f"{current}/").timeline, since_step)
            versions = {prefix: layout.version_of(f"{prefix}/") for prefix in complete}
            usable |= {prefix for prefix, at in versions.items() if at.timeline == since.timeline and at >= since}
        needed = {base for prefix in usable for base in self._with_bases(prefix)}
        snapshots = {self._bases_of(prefix).snapshot for prefix in usable} - {""}
        for prefix in in_order:
            if prefix not in needed:
                manifest.remove(self._store, prefix)
        self._bases = {prefix: bases for prefix, bases in self._bases.items() if prefix in needed}
        return needed <= whole and {f"{prefix}/{layout.SNAPSHOT}" for prefix in snapshots} <= set(keys)

    def _with_bases(self, prefix: str) -> list[str]:
        """Return the policy and its chain of bases, back to one with all weights."""
        chain, snapshot = list[str](), self._bases_of(prefix).snapshot
        while prefix and prefix not in chain:
            chain.append(prefix)
            prefix = self._bases_of(prefix).base if prefix != snapshot else ""
        return chain

    def _bases_of(self, prefix: str) -> _Bases:
        """Return the bases of a delta; empty for a whole or a missing policy.

        Raises Corrupt: a later read may succeed, and nodes may need the bases it names.
        """
        if prefix not in self._bases:
            meta = dict[str, str]()
            with contextlib.suppress(NotFound):
                meta = manifest.load(self._store, prefix).meta
            is_delta = meta.get(manifest.KIND) == manifest.DELTA
            base, snapshot = meta.get(manifest.BASE_PREFIX, ""), meta.get(manifest.SNAPSHOT, "")
            self._bases[prefix] = _Bases(base, snapshot) if is_delta else _Bases()
        return self._bases[prefix]
