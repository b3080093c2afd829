"""Policies as deltas, from a trainer's publisher to a node's folders: always the weights that the label names."""

from __future__ import annotations

import mmap
import os
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoint.records import metrics
from checkpoint.store import layout
from checkpoint.store.errors import AlreadyExists, Corrupt, NotFound, StoreUnavailable
from checkpoint.store.run_store import Store
from checkpoint.stream import chunks, manifest
from checkpoint.weights import delta, safetensors, scratch, sparse
from policies.model.vocabulary import PolicyVersion, Precedence
from policies.serving.wire import PolicyRef
from policies.weights.dtypes import ServedTypes
from tasks.rollout.policy_folders import STAGED, Overtaken, PolicyFolders
from tasks.storing import publish
from tasks.storing.publish import PolicyPublisher
from tasks.storing.publish_snapshot import Snapshot
from tasks.storing.step_costs import StepCosts
from tasks.storing.tensor_types import UnsupportedType
from tests.budget import HANG_S
from tests.node.test_publish import Model, settle
from tests.tasks.peers.rig import nodes

Tensors = dict[str, torch.Tensor]
FIRST, SECOND, FORKED = (0, 1, 1), (0, 1, 2), (1, 1, 3)


class Watched(Store):
    """A store that counts what is read, and fails at the puts that `fails` names."""

    def __init__(self, url: str) -> None:
        super().__init__(url, retry_s=0.0)
        self.read: list[str] = []
        self.fails: Callable[[str], bool] = lambda _: False

    def get_buffer(self, key: str) -> memoryview:
        self.read.append(key)
        return super().get_buffer(key)

    def put(self, key: str, data: Any) -> None:
        if self.fails(key):
            raise StoreUnavailable("the store is away")
        super().put(key, data)

    def create(self, key: str, data: Any) -> None:
        if self.fails(key):
            raise StoreUnavailable("the store is away")
        super().create(key, data)


class World:
    """A trainer's weights, its publishers and a node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Watched(f"memory://{folder}")
        self.costs = StepCosts()
        self.nodes = 0
        self.made: dict[str, Tensors] = {}  # by label
        self.draw = torch.Generator().manual_seed(7)
        self.weights: Tensors = {
            "model.embed_tokens.weight": torch.randn(400, 32, generator=self.draw),
            "model.norm.weight": torch.randn(32, generator=self.draw),
            "none": torch.zeros(0, 4),
            "packed": torch.zeros(4, 8, dtype=torch.int8),
        }

    def step(self, share: float = 0.01) -> None:
        """Change about that share of the weights."""
        for name, one in self.weights.items():
            if one.is_floating_point():
                hit = torch.rand(one.shape, generator=self.draw) < share
                self.weights[name] = torch.where(hit, one + 1.0, one)

    def publisher(
        self, by: Precedence = FIRST, served: ServedTypes | None = None, machine: str = ""
    ) -> PolicyPublisher:
        """One on a machine of its own, where none is named."""
        scratch = self.folder / (machine or "-".join(map(str, by)))
        return PolicyPublisher(self.store, Model(), scratch, by, served or ServedTypes(), self.costs)

    def publish(self, publisher: PolicyPublisher, step: int, timeline: int = 0) -> PolicyRef:
        ref = publisher.publish(PolicyVersion(timeline, step), self.weights.items(), None)
        settle(publisher)
        self.made[ref.label] = dict(self.weights)
        return ref

    def steps(self, publisher: PolicyPublisher, *steps: int) -> list[PolicyRef]:
        refs = []
        for step in steps:
            self.step()
            refs.append(self.publish(publisher, step))
        return refs

    def node(self) -> PolicyFolders:
        self.nodes += 1
        return PolicyFolders(self.store, self.root)

    @property
    def root(self) -> Path:
        return self.folder / f"node-{self.nodes}"

    def fetch(self, node: PolicyFolders, ref: PolicyRef) -> Path:
        """Have the node fetch it; what it gets must be what was published."""
        folder = node.fetch(ref, lambda: True)
        node.keep_only(folder)
        check(folder, self.made[ref.label])
        assert [one.name for one in folder.parent.iterdir()] == [ref.label]
        return folder

    def whole_bytes(self) -> int:
        """How many bytes of whole weights have been read since the last time."""
        chunks = {
            f"{found.root}/{chunk}"
            for entry in self.store.entries(layout.POLICIES)
            if entry.key.endswith((layout.MANIFEST, layout.SNAPSHOT))
            for prefix, _, name in [entry.key.rpartition("/")]
            for found in [manifest.load(self.store, prefix, name)]
            for file in found.files
            if file.name == layout.MODEL
            for chunk in file.chunks
        }
        read, self.store.read = self.store.read, []
        return sum(1 for key in read if key in chunks)


def check(folder: Path, wanted: Tensors) -> None:
    held = load_file(folder / layout.MODEL)
    assert held.keys() == wanted.keys()
    for name, one in wanted.items():
        assert torch.equal(held[name], one), name
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", layout.MODEL]


def kind(world: World, ref: PolicyRef) -> str:
    """The kind, and whether a delta is there."""
    found = manifest.load(world.store, ref.prefix)
    return found.meta[manifest.KIND] + ("+" if any(one.name == delta.NAME for one in found.files) else "")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_after_the_first_version_only_what_has_changed_travels(world: World) -> None:
    publisher, node = world.publisher(), world.node()
    first = world.publish(publisher, 0)
    world.fetch(node, first)
    assert world.whole_bytes() == 1
    whole = world.costs.take()
    assert whole[metrics.PUBLISHED_BYTES] > whole[metrics.WEIGHTS_BYTES] > 50_000
    for ref in world.steps(publisher, 1, 2, 3):
        assert kind(world, ref) == "delta+"
        world.fetch(node, ref)
    assert world.whole_bytes() == 0
    deltas = world.costs.take()
    assert deltas[metrics.WEIGHTS_BYTES] == 3 * whole[metrics.WEIGHTS_BYTES]
    assert deltas[metrics.PUBLISHED_BYTES] < 0.1 * deltas[metrics.WEIGHTS_BYTES]
    assert metrics.PUBLISH_S not in world.costs.take()


def test_a_version_has_the_same_name_however_it_travels(world: World, tmp_path: Path) -> None:
    publisher = world.publisher()
    world.publish(publisher, 0)
    [by_delta] = world.steps(publisher, 1)
    elsewhere = World(tmp_path / "elsewhere")
    elsewhere.weights = world.weights
    whole = elsewhere.publish(elsewhere.publisher(), 1)
    assert (kind(world, by_delta), kind(elsewhere, whole)) == ("delta+", "whole")
    assert by_delta.label == whole.label


def test_floats_are_rounded_as_engines_do_and_nothing_else_is(world: World) -> None:
    served = ServedTypes(to="BF16", own="BF16")
    world.weights["model.embed_tokens.weight"][0, :3] = torch.tensor([torch.nan, -0.0, 1e-40])
    ref = world.publisher(served=served).publish(PolicyVersion(0, 0), world.weights.items(), None)
    held = load_file(world.node().fetch(ref, lambda: True) / layout.MODEL)
    for name, one in world.weights.items():
        wanted = one.to(torch.bfloat16) if one.dim() > 1 and one.is_floating_point() else one
        assert held[name].dtype == wanted.dtype
        assert bytes(held[name].view(torch.uint8).flatten()) == bytes(wanted.view(torch.uint8).flatten())


def test_a_node_that_was_elsewhere_follows_all_it_has_missed(world: World) -> None:
    publisher, node = world.publisher(), world.node()
    world.fetch(node, world.publish(publisher, 0))
    *_, newest = world.steps(publisher, 1, 2, 3, 4)
    world.whole_bytes()
    world.fetch(node, newest)
    assert world.whole_bytes() == 0


def test_a_node_that_comes_fetches_the_whole_one_and_what_follows(world: World) -> None:
    publisher = world.publisher()
    world.publish(publisher, 0)
    *_, before, newest = world.steps(publisher, 1, 2, 3)
    for ref in (newest, before):
        world.fetch(world.node(), ref)
        assert world.whole_bytes() == 1


def test_what_may_be_wanted_stays_usable_for_every_node(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "CHAIN_MAX", 3)
    publisher, kept = world.publisher(), world.node()
    before = world.publish(publisher, 0)
    world.fetch(kept, before)
    root, kinds = world.root, list[str]()
    for step in range(1, 13):
        [ref] = world.steps(publisher, step)
        kinds.append(kind(world, ref))
        world.whole_bytes()
        check(kept.settle(ref, lambda: True), world.made[ref.label])
        assert [one.name for one in root.iterdir() if not one.name.startswith(".")] == [ref.label]
        assert world.whole_bytes() == 0
        for wanted in (ref, before):
            world.fetch(world.node(), wanted)
            assert world.whole_bytes() == 1
        before = ref
        assert len(world.store.folders(f"{layout.POLICIES}/0000")) <= 6
    assert kinds == ["delta+"] * 12, "none waits for all weights to be sent"
    assert len(snapshots(world)) == 2, "the one that is named, and the one that will be"


def snapshots(world: World) -> list[str]:
    """The places of policies that have one."""
    keys = [one.key for one in world.store.entries(layout.POLICIES) if one.key.endswith(layout.SNAPSHOT)]
    return [key.rpartition("/")[0] for key in keys]


class Gate:
    """Lets a snapshot's chunks into the store by so many at a time."""

    def __init__(self, world: World, prefix: str) -> None:
        self.prefix, self.open = prefix, threading.Semaphore(0)
        world.store.fails = self.holds

    def holds(self, key: str) -> bool:
        if key.startswith(self.prefix) and not key.endswith(layout.SNAPSHOT):
            assert self.open.acquire(timeout=HANG_S)
        return False


def test_a_snapshot_of_weights_that_change_meanwhile_makes_what_names_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are published while it is sent, and each of its chunks is as it was when it was read."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", mmap.ALLOCATIONGRANULARITY)
    monkeypatch.setattr(publish, "CHAIN_MAX", 4)
    publisher: Any = world.publisher()
    world.publish(publisher, 0)
    begun = world.steps(publisher, 1, 2, 3, 4)[-1]
    gate = Gate(world, layout.policy(PolicyVersion(0, 5), FIRST) + "/")
    gate.open.release(3)  # its own
    world.step()
    of = publisher.publish(PolicyVersion(0, 5), world.weights.items(), None)
    snapshot = publisher._taking[0]
    assert kind(world, of) == "delta+"
    for step in (6, 7, 8):
        gate.open.release(3)
        world.step()
        ref = publisher.publish(PolicyVersion(0, step), world.weights.items(), None)
        world.made[ref.label] = dict(world.weights)
        publisher._removing.result()
        assert not snapshot.stored.done()
        world.fetch(world.node(), ref)
    gate.open.release(100)
    wait([snapshot.stored], timeout=HANG_S)
    world.whole_bytes()
    node = world.node()
    newest = world.steps(publisher, 9)[0]
    assert manifest.load(world.store, newest.prefix).meta[manifest.SNAPSHOT] == of.prefix
    asked = iter([True] * 14 + [False])
    with pytest.raises(Overtaken):
        node.fetch(newest, lambda: next(asked, False))
    assert list(world.root.glob("[!.]*")) == [], "the snapshot by itself is no policy"
    assert world.whole_bytes() == 13
    world.fetch(node, newest)
    assert world.whole_bytes() == 0, "and what came of it stays for the next try"
    later = world.steps(publisher, 10)[0]
    world.fetch(world.node(), later)
    assert begun.prefix not in world.store.folders(f"{layout.POLICIES}/0000")


def test_a_snapshot_that_fails_is_taken_again_of_a_later_policy(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "CHAIN_MAX", 2)
    publisher = world.publisher()
    world.publish(publisher, 0)
    world.steps(publisher, 1, 2)
    away = layout.policy(PolicyVersion(0, 3), FIRST)
    world.store.fails = lambda key: key.startswith(away) and manifest_there(world, away)
    refs = world.steps(publisher, 3, 4, 5)
    assert snapshots(world) == [refs[1].prefix]
    world.fetch(world.node(), refs[2])


def manifest_there(world: World, prefix: str) -> bool:
    return world.store.get_or_none(f"{prefix}/{layout.MANIFEST}") is not None


def test_a_lost_snapshot_costs_only_those_who_need_it_and_them_one_step(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "CHAIN_MAX", 1)
    publisher: Any = world.publisher()
    world.publish(publisher, 0)
    begun, of, _, newest = world.steps(publisher, 1, 2, 3, 4)
    assert manifest.load(world.store, newest.prefix).meta[manifest.SNAPSHOT] == of.prefix
    world.store.delete([f"{of.prefix}/{layout.SNAPSHOT}"])
    staged = world.node().stage(newest, begun.digest, lambda: True)
    assert staged is not None
    assert staged.digests[0] == begun.digest
    assert staged.digests[-1] == newest.digest
    with pytest.raises(NotFound, match="snapshot"):
        world.node().fetch(newest, lambda: True)
    world.steps(publisher, 5)  # at whose end it is seen
    [ref] = world.steps(publisher, 6)
    assert kind(world, ref) == "whole"
    world.fetch(world.node(), ref)


def test_no_snapshot_is_named_once_no_delta_follows_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "CHAIN_MAX", 1)
    monkeypatch.setattr(publish, "UNCOMPARED", 0)
    publisher: Any = world.publisher()
    world.publish(publisher, 0)
    world.steps(publisher, 1)
    gate = Gate(world, layout.policy(PolicyVersion(0, 2), FIRST) + "/")
    gate.open.release(3)  # its own
    world.step()
    publisher.publish(PolicyVersion(0, 2), world.weights.items(), None)
    snapshot = publisher._taking[0]
    world.step(1.0)
    assert kind(world, world.publish(publisher, 3)) == "whole"
    gate.open.release(100)
    wait([snapshot.stored], timeout=HANG_S)
    [ref] = world.steps(publisher, 4)
    assert manifest.load(world.store, ref.prefix).meta[manifest.SNAPSHOT] == ""
    world.fetch(world.node(), ref)


def test_where_the_store_is_too_slow_for_a_snapshot_a_step_waits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "CHAIN_MAX", 2)
    publisher: Any = world.publisher()
    world.publish(publisher, 0)
    gate = Gate(world, layout.policy(PolicyVersion(0, 3), FIRST) + "/")
    gate.open.release(3)
    kinds = []
    for step in range(1, 6):
        world.step()
        ref = publisher.publish(PolicyVersion(0, step), world.weights.items(), None)
        world.made[ref.label] = dict(world.weights)
        kinds.append(kind(world, ref))
    gate.open.release(100)
    assert kinds == ["delta+"] * 4 + ["whole+"]
    settle(publisher)
    world.fetch(world.node(), ref)


def test_deltas_that_grow_to_half_of_the_whole_end_with_a_whole_one(world: World) -> None:
    publisher = world.publisher()
    world.publish(publisher, 0)
    kinds = []
    for step in range(1, 8):
        world.step(0.1)
        kinds.append(kind(world, world.publish(publisher, step)))
    assert set(kinds) == {"delta+"}
    assert len(snapshots(world)) == 1


def test_where_almost_all_changes_all_travels(world: World) -> None:
    publisher, node = world.publisher(), world.node()
    world.fetch(node, world.publish(publisher, 0))
    world.step(1.0)
    ref = world.publish(publisher, 1)
    assert kind(world, ref) == "whole"
    world.fetch(node, ref)
    kinds = [kind(world, world.steps(publisher, step)[0]) for step in range(2, 12)]
    assert kinds == ["whole"] * publish.UNCOMPARED + ["delta+"] * 2


@pytest.mark.parametrize("put", range(3), ids=["config", "delta", "manifest"])
def test_after_a_publication_that_failed_the_next_is_whole(world: World, put: int) -> None:
    publisher, node = world.publisher(), world.node()
    world.fetch(node, world.publish(publisher, 0))
    puts = iter(range(100))
    world.store.fails = lambda _: next(puts) == put
    world.step()
    with pytest.raises(StoreUnavailable):
        world.publish(publisher, 1)
    with pytest.raises(NotFound):
        manifest.load(world.store, layout.policy(PolicyVersion(0, 1), FIRST))
    [ref] = world.steps(publisher, 2)
    assert kind(world, ref) == "whole"
    world.fetch(node, ref)
    [ref] = world.steps(publisher, 3)
    assert kind(world, ref) == "delta+"
    world.fetch(node, ref)


def test_a_lost_answer_is_no_failure_and_another_manifest_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(store: Store, key: str, data: Any) -> None:
        created(store, key, data)
        created(store, key, data)

    created = Store.create
    monkeypatch.setattr(Store, "create", create)
    publisher = world.publisher()
    world.fetch(world.node(), world.publish(publisher, 0))
    world.step()
    with pytest.raises(AlreadyExists):
        world.publish(publisher, 0)


def test_a_delta_that_the_disk_does_not_take_costs_that_delta_and_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, node = world.publisher(), world.node()
    world.fetch(node, world.publish(publisher, 0))
    with monkeypatch.context() as patch:
        patch.setattr(delta.DeltaWriter, "put", fails)
        [ref] = world.steps(publisher, 1)
    assert kind(world, ref) == "whole"
    [ref] = world.steps(publisher, 2)
    assert kind(world, ref) == "delta+"
    world.fetch(node, ref)


def test_a_version_whose_answer_was_lost_is_published_again_by_the_same_trainer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is there: with its delta, and with what it follows."""
    publisher, node = world.publisher(), world.node()
    world.fetch(node, world.publish(publisher, 0))
    world.step()
    created = Store.create

    def lost(store: Store, key: str, data: Any) -> None:
        created(store, key, data)
        raise StoreUnavailable("the answer is lost")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "create", lost)
        with pytest.raises(StoreUnavailable):
            world.publish(publisher, 1)
    ref = world.publish(publisher, 1)
    assert kind(world, ref) == "delta+"
    world.fetch(node, ref)
    [ref] = world.steps(publisher, 2)
    assert kind(world, ref) == "delta+"
    world.fetch(node, ref)


def test_a_write_to_the_scratch_file_that_fails_is_never_built_upon(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, node = world.publisher(), world.node()
    world.fetch(node, world.publish(publisher, 0))
    with monkeypatch.context() as patch:
        patch.setattr(safetensors, "write", fails)
        with pytest.raises(OSError, match="No space"):
            world.steps(publisher, 1)
    [ref] = world.steps(publisher, 2)
    assert kind(world, ref) == "whole"
    world.fetch(node, ref)


def fails(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_trainer_that_is_started_again_begins_whole_and_moves_nothing_that_is_held(world: World) -> None:
    node, publisher = world.node(), world.publisher()
    world.publish(publisher, 0)
    [ref] = world.steps(publisher, 1)
    world.fetch(node, ref)
    world.whole_bytes()
    again = world.publisher(SECOND)
    ref = world.publish(again, 2)  # the same weights, as of a step that changes none
    assert kind(world, ref) == "whole"
    world.fetch(node, ref)
    assert world.whole_bytes() == 0
    [ref] = world.steps(again, 3)
    world.fetch(node, ref)


def test_a_trainer_that_is_started_again_on_its_machine_builds_on_what_it_left(world: World) -> None:
    publisher, node = world.publisher(machine="m"), world.node()
    world.publish(publisher, 0)
    *_, ref = world.steps(publisher, 1, 2)
    world.fetch(node, ref)
    world.whole_bytes()
    again = world.publisher(SECOND, machine="m")
    for step in (2, 3):  # the first is made again, and comes out otherwise
        [ref] = world.steps(again, step)
        assert kind(world, ref) == "delta+"
        world.fetch(node, ref)
    assert world.whole_bytes() == 0
    world.fetch(world.node(), ref)


def test_weights_that_were_left_half_written_are_no_base(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, node = world.publisher(machine="m"), world.node()
    world.fetch(node, world.publish(publisher, 0))
    with monkeypatch.context() as patch:
        write = safetensors.write
        patch.setattr(safetensors, "write", lambda f, at, piece: fails(write(f, at, piece[: len(piece) // 2])))
        with pytest.raises(OSError, match="No space"):
            world.steps(publisher, 1)
    [ref] = world.steps(world.publisher(SECOND, machine="m"), 2)
    assert kind(world, ref) == "whole"
    world.fetch(node, ref)


@pytest.mark.parametrize("machine", ["m", "another"])
def test_a_version_that_is_stored_is_not_sent_again(world: World, machine: str) -> None:
    publisher, node = world.publisher(machine="m"), world.node()
    world.publish(publisher, 0)
    *_, ref = world.steps(publisher, 1, 2)
    world.fetch(node, ref)
    world.costs.take()
    world.whole_bytes()
    again = world.publisher(SECOND, machine=machine)
    world.store.fails = lambda _: True
    assert world.publish(again, 2) == ref
    assert world.costs.take()[metrics.PUBLISHED_BYTES] == 0
    world.store.fails = lambda _: False
    [ref] = world.steps(again, 3)
    assert kind(world, ref) == "delta+"
    world.fetch(node, ref)
    assert world.whole_bytes() == 0
    world.fetch(world.node(), ref)


def test_what_others_take_away_is_seen_and_ends_with_a_whole_policy(world: World) -> None:
    publisher: Any = world.publisher()
    begun = world.publish(publisher, 0)
    world.steps(publisher, 1, 2)
    manifest.remove(world.store, begun.prefix)
    world.steps(publisher, 3)  # at whose end it is seen
    [ref] = world.steps(publisher, 4)
    assert kind(world, ref) == "whole"
    world.fetch(world.node(), ref)


def test_a_snapshot_of_a_file_that_another_begins_anew_ends_no_trainer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", mmap.ALLOCATIONGRANULARITY)
    publisher: Any = world.publisher()
    ref = world.publish(publisher, 0)
    idle = threading.Event()

    def begun(timeout: float) -> bool:
        os.truncate(publisher._weights, 0)
        return timeout > 0

    monkeypatch.setattr(idle, "wait", begun)
    with pytest.raises(Corrupt):
        Snapshot(world.store, ref, publisher._weights, idle).stored.result(HANG_S)


def test_a_type_that_cannot_be_stored_is_named(world: World) -> None:
    world.weights["odd"] = torch.zeros(4, dtype=torch.complex128)
    with pytest.raises(
        UnsupportedType, match=r"^trainer.model: odd is of torch.complex128; expected one of float64"
    ):
        world.publish(world.publisher(), 0)


def test_two_trainers_of_one_version_and_a_rollback_are_told_apart_by_digest(world: World) -> None:
    zombie, newer, node = world.publisher(), world.publisher(SECOND), world.node()
    world.publish(zombie, 0)
    begun = dict(world.weights)
    [theirs] = world.steps(zombie, 1)
    world.fetch(node, theirs)
    world.weights = dict(begun)
    world.publish(newer, 0)
    for step in (1, 2):
        [ours] = world.steps(newer, step)
        world.fetch(node, ours)
    assert theirs.label != ours.label
    late = world.steps(zombie, 2)[0]
    with pytest.raises(NotFound):  # it is built upon what the newer one has removed
        node.fetch(late, lambda: True)
    [ours] = world.steps(newer, 3)
    world.fetch(node, ours)
    world.weights = dict(begun)
    forked = world.publisher(FORKED)
    world.fetch(node, world.publish(forked, 0, timeline=1))


def test_what_cannot_be_read_for_once_costs_no_base_and_no_trainer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = world.publisher()
    world.publish(publisher, 0)
    world.steps(publisher, 1)

    def unreadable(*_: Any) -> manifest.Manifest:
        raise Corrupt("not as it was written")

    world.step()
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "load", unreadable)
        publisher.publish(PolicyVersion(0, 2), world.weights.items(), None)
        with pytest.raises(Corrupt):
            settle(publisher)
    *_, newest = world.steps(publisher, 3, 4)
    world.fetch(world.node(), newest)


@pytest.mark.parametrize("damage", ["flipped", "missing", "no manifest"])
def test_a_damaged_chain_is_never_applied_and_a_repaired_one_is(world: World, damage: str) -> None:
    publisher, node = world.publisher(), world.node()
    world.fetch(node, world.publish(publisher, 0))
    held = list(world.root.iterdir())
    middle, newest = world.steps(publisher, 1, 2)
    found = manifest.load(world.store, middle.prefix)
    [chunk] = next(file.chunks for file in found.files if file.name == delta.NAME)
    key = f"{middle.prefix}/{layout.MANIFEST if damage == 'no manifest' else chunk}"
    good = world.store.get(key)
    if damage == "flipped":
        world.store.put(key, good[:-1] + bytes([good[-1] ^ 1]))
    else:
        world.store.delete([key])
    for _ in range(2):
        with pytest.raises((Corrupt, NotFound)):
            node.fetch(newest, lambda: True)
        assert list(world.root.glob("[!.]*")) == held, "what it holds is what it held"
        check(held[0], world.made[held[0].name])
    world.store.put(key, good)
    world.fetch(node, newest)


@pytest.mark.parametrize("by", ["stage", "settle"])
def test_a_staged_delta_that_the_disk_has_damaged_is_fetched_again(world: World, by: str) -> None:
    publisher, node = world.publisher(), world.node()
    base = world.publish(publisher, 0)
    world.fetch(node, base)
    [ref] = world.steps(publisher, 1)
    staged = node.stage(ref, base.digest, always)
    assert staged is not None
    [path] = staged.deltas
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    world.whole_bytes()
    if by == "stage":
        assert node.stage(ref, base.digest, always) == staged
        assert path.read_bytes() == good
    else:
        check(node.settle(ref, always), world.made[ref.label])
    assert world.whole_bytes() == 0, "what is held is not given up for it"


def test_what_is_staged_while_the_file_follows_needs_no_store_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Policies go from the store as steps go on, however far behind the file is."""
    publisher, node = world.publisher(), world.node()
    base = world.publish(publisher, 0)
    world.fetch(node, base)
    first, second = world.steps(publisher, 1, 2)
    assert node.stage(first, base.digest, always) is not None
    glob, staged = Path.glob, list[object]()

    def listed(folder: Path, pattern: str) -> list[Path]:
        found = list(glob(folder, pattern))
        if folder.name == STAGED:
            staged.append(node.stage(second, first.digest, always))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", listed)
        node.settle(first, always)
    assert len(staged) == 1
    assert staged[0] is not None
    for ref in (first, second):
        manifest.remove(world.store, ref.prefix)
    check(node.settle(second, always), world.made[second.label])


def test_a_damaged_delta_beside_a_whole_policy_costs_the_whole_and_no_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "CHAIN_MAX", 0)
    publisher, node = world.publisher(), world.node()
    world.fetch(node, world.publish(publisher, 0))
    [ref] = world.steps(publisher, 1)
    found = manifest.load(world.store, ref.prefix)
    [chunk] = next(file.chunks for file in found.files if file.name == delta.NAME)
    world.store.delete([f"{ref.prefix}/{chunk}"])
    world.fetch(node, ref)


@pytest.mark.parametrize("anchored", [True, False])
def test_weights_that_do_not_come_out_as_named_are_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch, *, anchored: bool
) -> None:
    """Whatever goes wrong between a delta that is intact and the file that it changes."""
    monkeypatch.setattr(publish, "CHAIN_MAX", 0 if anchored else 8)
    publisher, node = world.publisher(), world.node()
    world.fetch(node, world.publish(publisher, 0))
    [ref] = world.steps(publisher, 1)
    monkeypatch.setattr(sparse, "decode", lambda *_: None)
    if anchored:
        world.fetch(node, ref)
        return
    with pytest.raises(Corrupt, match="holds weights"):
        node.fetch(ref, lambda: True)
    assert list(world.root.glob("[!.]*")) == []


def test_a_node_killed_in_the_middle_of_an_overwrite_holds_nothing(world: World) -> None:
    publisher = world.publisher()
    begun = world.publish(publisher, 0)
    *_, newest = world.steps(publisher, 1, 2)
    world.fetch(world.node(), begun)
    if (child := os.fork()) == 0:
        killed_at_first_write()  # of all deltas in one pass, into the largest tensor
        PolicyFolders(world.store, world.root).fetch(newest, lambda: True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert list(world.root.glob("[!.]*")) == []
    world.fetch(PolicyFolders(world.store, world.root), newest)


def killed_at_first_write() -> None:
    """This process dies at its first write into the weights, which is half done."""
    write = safetensors.write

    def dying(file: int, at: int, piece: safetensors.Bytes) -> None:
        write(file, at, piece[: len(piece) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    safetensors.write = dying


def test_a_node_that_is_to_hold_another_policy_by_now_keeps_what_it_has(world: World) -> None:
    publisher, node = world.publisher(), world.node()
    world.publish(publisher, 0)
    held = world.fetch(node, world.steps(publisher, 1)[0])
    middle, newest = world.steps(publisher, 2, 3)
    asked = iter([True, False])
    with pytest.raises(Overtaken):
        node.fetch(newest, lambda: next(asked))
    assert list(world.root.glob("[!.]*")) == [held]
    world.whole_bytes()
    world.fetch(node, middle)
    assert world.whole_bytes() == 0


def test_a_whole_policy_that_takes_longer_than_a_step_arrives_all_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that overtake a node are deltas to the same whole policy: what came of that is not fetched again."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", mmap.ALLOCATIONGRANULARITY)
    monkeypatch.setattr(chunks, "TRANSFERS", 1)
    publisher, node, overtaken = world.publisher(), world.node(), 0
    whole = manifest.load(world.store, world.publish(publisher, 0).prefix)
    keys = {f"{whole.root}/{chunk}" for file in whole.files if file.name == layout.MODEL for chunk in file.chunks}
    assert len(keys) > 6

    def in_time() -> bool:
        """A step takes as long as three chunks."""
        return sum(key in keys for key in world.store.read) < 3

    while overtaken < len(keys):
        [ref] = world.steps(publisher, 1 + overtaken)
        world.store.read.clear()
        try:
            check(node.fetch(ref, in_time), world.made[ref.label])
            break
        except Overtaken:
            overtaken += 1
    assert 1 < overtaken < len(keys)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_a_node_gets_what_the_label_names_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Steps, restarts, failed puts, lost objects, nodes that come, skip versions or run again, in any order."""
    monkeypatch.setattr(publish, "CHAIN_MAX", 4)
    world, draw = World(tmp_path), random.Random(seed)
    attempt, publisher, nodes = 1, world.publisher((0, 1, 1)), [world.node()]
    roots, refs, got = {0: world.root}, list[PolicyRef](), 0
    for step in range(60):
        match draw.choice(["step"] * 6 + ["restart", "failed put", "new node", "lost"]):
            case "restart":
                attempt += 1
                publisher = world.publisher((0, 1, attempt), machine=draw.choice(["", "m"]))
            case "failed put":
                first = draw.randrange(4)
                puts = iter(range(1000))
                world.store.fails = lambda _, at=first, n=puts: next(n) == at  # type: ignore[misc]
            case "new node":
                nodes.append(world.node())
                roots[len(nodes) - 1] = world.root
            case "lost":
                keys = [one.key for one in world.store.entries(layout.POLICIES)]
                world.store.delete([draw.choice(keys)] if keys else [])
        world.step(draw.choice([0.0, 0.01, 0.02, 1.0]))
        try:
            refs.append(world.publish(publisher, step))
        except (StoreUnavailable, AlreadyExists):
            continue
        for ref in draw.sample(refs[-2:], k=min(2, len(refs))):
            number = draw.randrange(len(nodes))
            try:
                folder = nodes[number].fetch(ref, lambda: True)
            except (Corrupt, NotFound):
                continue
            got += 1
            check(folder, world.made[ref.label])
            if draw.random() < 0.7:
                nodes[number].keep_only(folder)
            for one in roots[number].glob("[!.]*"):
                check(one, world.made[one.name])
    assert got > 30
    assert scratch.PAYS_BELOW == 0.5


def always() -> bool:
    return True


def test_of_nodes_that_fetch_at_once_only_one_reads_a_chunk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4096)
    publisher = world.publisher()
    with nodes(4, "127.0.0.1") as peers:
        folders = [PolicyFolders(world.store, world.folder / f"peer-{at}", one) for at, one in enumerate(peers)]
        for step in range(3):
            ref = world.publish(publisher, step)
            world.store.read.clear()
            with ThreadPoolExecutor(len(folders)) as pool:
                got = list(pool.map(partial(PolicyFolders.fetch, wanted=ref, still=always), folders))
            for one, folder in zip(folders, got, strict=True):
                check(folder, world.made[ref.label])
                one.keep_only(folder)
                assert [path.name for path in folder.parent.iterdir()] == [ref.label]
            wanted = [
                f"{found.root}/{chunk}"
                for found in [manifest.load(world.store, ref.prefix)]
                for file in found.files
                if file.name == (delta.NAME if step else layout.MODEL)
                for chunk in file.chunks
            ]
            read = [key for key in world.store.read if key in wanted]
            assert len(read) < 2 * len(wanted) + 1, kind(world, ref)
            world.step()
