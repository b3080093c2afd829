"""Which checkpoints a run has: numbered, create-only revisions of one small document.

A checkpoint exists from the revision that lists it to the revision that does not. Each revision is made from the
one before and wins its number or is made again, so uploads, pins and removals by any number of processes happen in
one order. Names that a revision condemns are deleted after it, and never referred to again: an upload that relied
on one of them finds out when it commits, whatever the clocks say. Revisions are never deleted, for a late writer
must meet the number that it believes free. One that a power cut has torn keeps its number but is ignored, for
nobody was told of it: the next is made from the one before.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import structlog

from checkpoint.store import layout
from checkpoint.store.codec import check_schema, from_json, to_json
from checkpoint.store.errors import AlreadyExists, NotFound, Torn
from checkpoint.store.run_store import Store
from policies.model.vocabulary import PolicyVersion

log = structlog.get_logger()

SCHEMA = 1
READS = 3  # of a torn revision: the wire may be at fault, not the store


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One listed checkpoint. `manifest` is its object's name, `digest` BLAKE3 of that object in hex."""

    version: str  # PolicyVersion as text
    manifest: str
    digest: str
    created_at_s: float
    size_bytes: int
    pinned: bool = False

    @property
    def at(self) -> PolicyVersion:
        return PolicyVersion.parse(self.version)


@dataclass(frozen=True, slots=True)
class Revision:
    """The catalog as of one number.

    `condemned`: objects that may be gone at any moment and must not be referred to. `suspect`: chunks that were
    found damaged: their content must be stored again.
    """

    schema: int = SCHEMA
    number: int = 0
    writer: str = ""
    nonce: str = ""
    time_s: float = 0.0
    checkpoints: list[Checkpoint] = field(default_factory=list)  # in version order
    condemned: list[str] = field(default_factory=list)
    suspect: list[str] = field(default_factory=list)

    def find(self, version: PolicyVersion) -> Checkpoint:
        """Raises NotFound."""
        for one in self.checkpoints:
            if one.at == version:
                return one
        there = ", ".join(one.version for one in self.checkpoints) or "none yet"
        raise NotFound(f"no checkpoint {version}", f"there are: {there}")


class Condemned(Exception):
    """Names that an upload relies on were condemned since it began: they must be stored again."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(f"{len(names)} stored objects were collected meanwhile")
        self.names = names


class Catalog:
    """Reads and changes the catalog of one run.

    Args:
        store: the run's store.
        writer: who writes, for people to read: a node, or `host/pid`.
    """

    def __init__(self, store: Store, writer: str) -> None:
        self._store = store
        self._writer = writer
        self._known = Revision()

    def newest(self) -> Revision:
        """The present revision. Raises Corrupt, StoreError."""
        after = layout.catalog_revision(self._known.number) if self._known.number else None
        listed = [entry.key for entry in self._store.entries(layout.CATALOG, after=after)]
        keys = [key for key in listed if layout.number_of(key) is not None]
        for key in reversed(keys):
            try:
                found = _read(self._store, key)
            except Torn as error:
                log.warning("torn_revision_left_out", key=key, error=str(error))
                continue
            self._known = found
            break
        if keys:
            # A torn one is ignored, but keeps its number.
            self._known = replace(self._known, number=layout.number_of(keys[-1]) or 0)
        return self._known

    def change(self, now_s: float, wanted: Callable[[Revision], Revision]) -> Revision:
        """Make the next revision with `wanted(present)`, again after each lost race.

        Returns the present revision where `wanted` changes nothing. Raises what `wanted` raises, Corrupt,
        StoreError.
        """
        while True:
            present = self.newest()
            new = wanted(present)
            if new == present:
                return present
            new = replace(
                new,
                number=present.number + 1,
                writer=self._writer,
                nonce=secrets.token_hex(8),
                time_s=now_s,
                checkpoints=sorted(new.checkpoints, key=lambda one: one.at),
            )
            key = layout.catalog_revision(new.number)
            try:
                self._store.create(key, to_json(new))
            except AlreadyExists:
                # Ours, if an answer was lost and the retry met the object that the first try had made.
                if not self._is_ours(key, new):
                    continue
            self._known = new
            return new

    def commit(self, now_s: float, new: Checkpoint, objects: frozenset[str], since: int) -> Revision:
        """List a checkpoint, replacing one of the same version (a pin stays).

        Args:
            objects: the keys of all that it is made of, its manifest among them.
            since: the number of the revision from which the upload chose what it could rely on.

        Raises Condemned, Corrupt, StoreError.
        """

        def listed(present: Revision) -> Revision:
            lost = objects & self.condemned_since(since, present)
            if lost:
                raise Condemned(frozenset(lost))
            others = [one for one in present.checkpoints if one.at != new.at]
            pinned = any(one.pinned for one in present.checkpoints if one.at == new.at)
            return replace(present, checkpoints=[*others, replace(new, pinned=pinned)])

        return self.change(now_s, listed)

    def pin(self, now_s: float, version: PolicyVersion, *, pinned: bool) -> Revision:
        """Keep a checkpoint whatever the retention says, or no longer. Raises NotFound, Corrupt, StoreError."""

        def changed(present: Revision) -> Revision:
            found = present.find(version)
            others = [one for one in present.checkpoints if one != found]
            kept = sorted([*others, replace(found, pinned=pinned)], key=lambda one: one.at)
            return replace(present, checkpoints=kept)

        return self.change(now_s, changed)

    def suspect(self, now_s: float, chunk: str) -> Revision:
        """Note a damaged chunk. Raises Corrupt, StoreError."""
        return self.change(
            now_s,
            lambda present: replace(present, suspect=sorted({*present.suspect, chunk})),
        )

    def condemned_since(self, number: int, present: Revision) -> set[str]:
        """Return the keys condemned by `present` or by any revision after `number`; they may be forgotten by now.

        Raises Corrupt, StoreError.
        """
        names = set(present.condemned)
        for between in range(number + 1, present.number):
            with contextlib.suppress(Torn):  # what nobody was told of has condemned nothing
                names.update(_read(self._store, layout.catalog_revision(between)).condemned)
        return names

    def _is_ours(self, key: str, new: Revision) -> bool:
        try:
            return _read(self._store, key).nonce == new.nonce
        except Torn:
            return False


def _check(revision: Revision, _: str) -> None:
    for checkpoint in revision.checkpoints:
        PolicyVersion.parse(checkpoint.version)


def _read(store: Store, key: str) -> Revision:
    for left in reversed(range(READS)):
        try:
            revision = from_json(store.get(key), Revision, key, _check)
            break
        except Torn:
            if not left:
                raise
    check_schema(revision.schema, SCHEMA, key)
    return revision
