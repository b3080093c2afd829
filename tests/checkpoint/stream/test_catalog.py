"""The catalog with everything between any two store operations: uploads, collections, pins, crashes, late answers.

Two to six actors run as threads, one store operation at a time (`journal_rig`). Collectors take every unreferenced
object, however young: what is safe here is safe whatever the clocks say.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.backends import BytesLike
from grpo_orch.checkpoint.store.errors import Corrupt, NotFound, StoreUnavailable
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import chunks, manifest, transfer, uploader
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.checkpoint.stream.uploader import Collector
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.tasks.storing.restoring import restore_newest
from tests.budget import examples
from tests.stand_ins.catalog_rig import (
    CHUNK,
    CONTENTS,
    NOW_S,
    DictStore,
    InTurn,
    bytes_of,
    going,
    needed,
    revisions,
)
from tests.stand_ins.journal_rig import Actor, Fate, arrive

FATES = [Fate.DONE] * 12 + [fate for fate in Fate if fate is not Fate.DONE]


@pytest.fixture(autouse=True, scope="module")
def small_and_in_turn() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", CHUNK)
        for module in (chunks, manifest):
            patch.setattr(module, "ThreadPoolExecutor", InTurn)
        patch.setattr(uploader, "IN_FLIGHT_S", 0.0)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contents")
    for content in CONTENTS:
        (folder / content).write_bytes(bytes_of(content))
    return folder


class World:
    """Actors over one store, and what they were told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = DictStore()
        self.acknowledged: list[PolicyVersion] = []
        self.checked_writes = -1

    def uploader(self, store: Store, name: str, steps: Sequence[int], content: str) -> None:
        """Store checkpoint after checkpoint, retrying each, as `checkpoint.stream.uploader` does."""
        catalog = Catalog(store, name)
        for step in steps:
            at = PolicyVersion(0, step)
            files = [("weights", self.folder / content), ("frozen", self.folder / "c")]
            while at not in self.acknowledged:
                try:
                    transfer.upload(store, catalog, files, at, NOW_S, {"content": content})
                except StoreUnavailable:
                    continue
                self.acknowledged.append(at)

    def collector(self, store: Store, name: str, keep_last: int) -> None:
        collector = Collector(store, Catalog(store, name), functools.partial(going, keep_last))
        while True:
            try:
                collector.collect(NOW_S)
            except (StoreUnavailable, NotFound):  # another collector was quicker
                continue

    def pinner(self, store: Store, name: str, number: int) -> None:
        """Pin one of the checkpoints and suspect a chunk of another, again and again."""
        catalog = Catalog(store, name)
        while True:
            try:
                listed = catalog.newest().checkpoints
                if listed:
                    catalog.pin(NOW_S, listed[number % len(listed)].at, pinned=True)
                    one = transfer.read_manifest(store, listed[-1])
                    catalog.suspect(NOW_S, sorted(one.chunks)[0])
            except (StoreUnavailable, NotFound):
                continue

    def check(self) -> None:
        """The invariants of any moment."""
        if self.store.writes == self.checked_writes:
            return
        self.checked_writes = self.store.writes
        history = revisions(self.store)
        listed = history[-1].checkpoints if history else []
        needed(self.store, listed)
        if self.acknowledged:
            assert listed, "all checkpoints are gone"
            assert listed[-1].at >= max(self.acknowledged), "the newest stored checkpoint is gone"
        pinned: set[str] = set()
        for revision in history:
            now = {one.version for one in revision.checkpoints if one.pinned}
            assert pinned <= now, "a pinned checkpoint is gone"
            pinned = now


BODIES = st.one_of(
    st.tuples(st.just("uploader"), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from(CONTENTS)),
    st.tuples(st.just("collector"), st.integers(1, 3)),
    st.tuples(st.just("pinner"), st.integers(0, 2)),
)
TURNS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from([1, 1, 1, 2, 3, 5, 9, 14]), st.sampled_from(FATES)),
    min_size=20,
    max_size=80,
)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(BODIES, min_size=0, max_size=4), TURNS)
def test_listed_checkpoints_are_whole_after_any_interruption(
    folder: Path, more: list[tuple[Any, ...]], turns: list[tuple[int, int, Fate]]
) -> None:
    world = World(folder)
    bodies: list[tuple[Any, ...]] = [("uploader", [1, 2], "ab"), ("collector", 1), *more]

    def begin(place: int) -> Actor:
        kind, *args = bodies[place]
        return Actor(
            f"{kind}{place}", world.store, lambda store: getattr(world, kind)(store, f"{kind}{place}", *args)
        )

    actors = [begin(place) for place in range(len(bodies))]
    try:
        for at, count, fate in turns:
            place = at % len(actors)
            actor = actors[place]
            if actor.late and fate is not Fate.DONE:
                arrive(actor.late.pop(0))
                world.check()
            for left in range(count, 0, -1):
                if actor.over:
                    actors[place] = begin(place)
                    actors[place].late += actor.late  # what the dead one sent may still arrive
                    break
                actor.turn(fate if left == 1 else Fate.DONE)
                world.check()
    finally:
        for actor in actors:
            while not actor.over:
                actor.turn(Fate.DIES_BEFORE)
    for actor in actors:
        for write in actor.late:
            arrive(write)
            world.check()
    Collector(world.store, Catalog(world.store, "last"), functools.partial(going, 2)).collect(NOW_S)
    world.check()
    listed = revisions(world.store)[-1:]
    remaining = {key for key in world.store.objects if not key.startswith(f"{layout.CATALOG}/")}
    assert remaining == needed(world.store, listed[0].checkpoints if listed else []), "something was left behind"


def upload(store: Store, folder: Path, content: str, step: int) -> None:
    files = [("weights", folder / content)]
    transfer.upload(store, Catalog(store, "u"), files, PolicyVersion(0, step), NOW_S, {"content": content})


def collect_all(store: Store) -> None:
    Collector(store, Catalog(store, "c"), functools.partial(going, 1)).collect(NOW_S)


def test_stored_parts_of_a_killed_upload_are_not_resent(folder: Path) -> None:
    class Dying(DictStore):
        """The process is killed once all its chunks are stored."""

        def put(self, key: str, data: BytesLike) -> None:
            if key.startswith(f"{layout.CHECKPOINTS}/"):
                raise KeyboardInterrupt
            super().put(key, data)

    store, dying = DictStore(), Dying()
    dying.objects = store.objects
    with pytest.raises(KeyboardInterrupt):
        upload(dying, folder, "ab", 1)
    assert len(store.objects) == 2
    before = store.writes
    upload(store, folder, "ab", 1)
    assert store.writes - before == 2, "the manifest and the revision"


@pytest.mark.parametrize(
    "key",
    [
        "catalog/README",
        "catalog/zzz.json",
        "catalog/0000000000zz.json",
        "blobs/README",
        "blobs/" + "0" * 64,
        "blobs/" + "0" * 64 + ".1.bak",
        "blobs/old/" + "0" * 64 + ".1",
        "checkpoints/0000/notes",
        "checkpoints/0000/5/notes.txt",
        "checkpoints/0000/00000005-abcd.json.bak",
    ],
)
def test_foreign_objects_are_passed_over_and_left_alone(folder: Path, key: str) -> None:
    store = DictStore()
    store.objects[key] = b"somebody's"
    upload(store, folder, "ab", 1)
    upload(store, folder, "c", 2)
    collect_all(store)
    assert [one.version for one in Catalog(store, "t").newest().checkpoints] == ["0-2"]
    assert store.objects[key] == b"somebody's"


def test_damaged_checkpoint_blocks_collection_until_retired(folder: Path) -> None:
    store = DictStore()
    upload(store, folder, "ab", 1)
    damaged = revisions(store)[-1].checkpoints[0].manifest
    store.objects[damaged] = b"{}"
    with pytest.raises(Corrupt, match="its digest differs from the catalog's"):
        collect_all(store)
    upload(store, folder, "c", 2)
    collect_all(store)
    left = {key for key in store.objects if not key.startswith(f"{layout.CATALOG}/")}
    assert left == needed(store, revisions(store)[-1].checkpoints)


def test_a_damaged_checkpoint_is_passed_over_and_its_chunk_noted(folder: Path, tmp_path: Path) -> None:
    store = DictStore()
    upload(store, folder, "ab", 1)
    upload(store, folder, "c", 2)
    damaged = next(iter(transfer.read_manifest(store, revisions(store)[-1].checkpoints[-1]).chunks))
    store.objects[f"{layout.BLOBS}/{damaged}"] = b"damaged"
    restored = restore_newest(store, (0,), tmp_path / "restored", None)
    assert restored is not None
    assert (restored.at.step, (restored.folder / "weights").read_bytes()) == (1, bytes_of("ab"))
    assert revisions(store)[-1].suspect == [damaged]
    assert restore_newest(store, (1,), tmp_path / "restored", None) is None, "of another timeline"


def test_restorer_finds_newer_checkpoints_when_its_own_retire(folder: Path, tmp_path: Path) -> None:
    class Slow(DictStore):
        done = False

        def get(self, key: str) -> bytes:
            if key.startswith(f"{layout.CHECKPOINTS}/") and not self.done:
                self.done = True
                upload(store, folder, "c", 2)
                collect_all(store)
            return super().get(key)

    store, slow = DictStore(), Slow()
    slow.objects = store.objects
    upload(store, folder, "ab", 1)
    restored = restore_newest(slow, (0,), tmp_path / "restored", None)
    assert restored is not None
    assert (restored.at.step, (restored.folder / "weights").read_bytes()) == (2, bytes_of("c"))
