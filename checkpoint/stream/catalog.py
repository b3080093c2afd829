"""The catalog of a run's checkpoints: numbered, create-only revisions of a small document.

A checkpoint exists while the newest revision lists it. Each revision is derived from the previous one, and derived
again if another writer takes its number, so uploads, pins and removals by any number of processes happen in one
order. Objects that a revision condemns are deleted afterwards and never referred to again: an upload that reuses
one of them notices at its commit, independent of clocks. Revisions are never deleted, so that a late writer finds
its number taken. A revision torn by a power failure keeps its number but is ignored, since its writer has not
returned: the next revision is derived from the one before it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import structlog

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import check_schema, from_json, to_json
from grpo_orch.checkpoint.store.errors import AlreadyExists, NotFound, Torn
from grpo_orch.checkpoint.store.run_store import Store, retry_torn
from grpo_orch.policies.model.vocabulary import PolicyVersion

log = structlog.get_logger()

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A listed checkpoint. `manifest` is the key of its manifest, `digest` that object's BLAKE3 in hex."""

    version: str  # PolicyVersion as text
    manifest: str
    digest: str
    created_at_s: float  # seconds since the epoch
    size_bytes: int
    pinned: bool = False

    @property
    def at(self) -> PolicyVersion:
        return PolicyVersion.parse(self.version)


@dataclass(frozen=True, slots=True)
class Revision:
    """A revision of the catalog. Written by the trainer's uploader, and by commands such as `checkpoints pin`.

    `condemned` are objects that may be deleted at any moment and must not be referred to; `suspect` are damaged
    chunks, whose content must be stored again.
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
        """Return the checkpoint of that version. Raises NotFound."""
        for checkpoint in self.checkpoints:
            if checkpoint.at == version:
                return checkpoint
        existing = ", ".join(checkpoint.version for checkpoint in self.checkpoints) or "none yet"
        raise NotFound(f"no checkpoint {version}", f"there are: {existing}")


class Condemned(Exception):
    """Objects that an upload reuses were condemned since it began; they must be stored again."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(f"{len(names)} reused objects were condemned meanwhile")
        self.names = names


class Catalog:
    """Reads and changes the catalog of one run.

    Args:
        store: the run's store.
        writer: the name of the writer: a node, or `host/pid`.
    """

    def __init__(self, store: Store, writer: str) -> None:
        self._store = store
        self._writer = writer
        self._known = Revision()

    def newest(self) -> Revision:
        """Return the newest revision. Raises Corrupt, StoreError."""
        after = layout.catalog_revision(self._known.number) if self._known.number else None
        listed = [entry.key for entry in self._store.entries(layout.CATALOG, after=after)]
        keys = [key for key in listed if layout.number_of(key) is not None]
        for key in reversed(keys):
            try:
                found = _read(self._store, key)
            except Torn as error:
                log.warning("torn_revision_skipped", key=key, error=str(error))
                continue
            self._known = found
            break
        if keys:
            # A torn revision is ignored, but keeps its number.
            self._known = replace(self._known, number=layout.number_of(keys[-1]) or 0)
        return self._known

    def change(self, now_s: float, edit: Callable[[Revision], Revision]) -> Revision:
        """Write `edit(newest)` as the next revision and return it. Repeats after each lost race.

        Returns the newest revision if `edit` changes nothing. Raises what `edit` raises, Corrupt, StoreError.
        """
        while True:
            newest = self.newest()
            new = edit(newest)
            if new == newest:
                return newest
            new = replace(
                new,
                number=newest.number + 1,
                writer=self._writer,
                nonce=secrets.token_hex(8),
                time_s=now_s,
                checkpoints=sorted(new.checkpoints, key=lambda checkpoint: checkpoint.at),
            )
            key = layout.catalog_revision(new.number)
            try:
                self._store.create(key, to_json(new))
            except AlreadyExists:
                # Ours, if a response was lost and the retry found the object of the first attempt.
                if not self._is_ours(key, new):
                    continue
            self._known = new
            return new

    def commit(self, now_s: float, new: Checkpoint, objects: frozenset[str], since: int) -> Revision:
        """List a checkpoint, replacing one of the same version, whose pin stays.

        Args:
            objects: the keys of its objects, including its manifest.
            since: the number of the revision from which the upload chose reusable objects.

        Raises Condemned, Corrupt, StoreError.
        """

        def add(revision: Revision) -> Revision:
            lost = objects & self.condemned_since(since, revision)
            if lost:
                raise Condemned(frozenset(lost))
            others = [checkpoint for checkpoint in revision.checkpoints if checkpoint.at != new.at]
            pinned = any(checkpoint.pinned for checkpoint in revision.checkpoints if checkpoint.at == new.at)
            return replace(revision, checkpoints=[*others, replace(new, pinned=pinned)])

        return self.change(now_s, add)

    def pin(self, now_s: float, version: PolicyVersion, *, pinned: bool) -> Revision:
        """Exclude a checkpoint from retention, or include it again. Raises NotFound, Corrupt, StoreError."""

        def set_pin(revision: Revision) -> Revision:
            found = revision.find(version)
            others = [checkpoint for checkpoint in revision.checkpoints if checkpoint != found]
            changed = sorted([*others, replace(found, pinned=pinned)], key=lambda checkpoint: checkpoint.at)
            return replace(revision, checkpoints=changed)

        return self.change(now_s, set_pin)

    def suspect(self, now_s: float, chunk: str) -> Revision:
        """Note a damaged chunk. Raises Corrupt, StoreError."""
        return self.change(
            now_s,
            lambda revision: replace(revision, suspect=sorted({*revision.suspect, chunk})),
        )

    def condemned_since(self, number: int, newest: Revision) -> set[str]:
        """Return the keys condemned by `newest` or by any revision after `number`, also if deleted by now.

        Raises Corrupt, StoreError.
        """
        names = set(newest.condemned)
        for between in range(number + 1, newest.number):
            with contextlib.suppress(Torn):  # a torn revision has no effect
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


@retry_torn
def _read(store: Store, key: str) -> Revision:
    revision = from_json(store.get(key), Revision, key, _check)
    check_schema(revision.schema, SCHEMA, key)
    return revision
