"""A publisher whose store or disk fails, or that is started again, builds on nothing that may not be there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_orch.checkpoint.records import metrics
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import AlreadyExists, Corrupt, NotFound, StoreUnavailable
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import manifest
from grpo_orch.checkpoint.weights import delta, safetensors
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.tasks.storing.tensors import UnsupportedType
from tests.node.rollout.deltas.world import FIRST, FORKED, SECOND, World, fails, kind, settle


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


@pytest.mark.parametrize("again", [False, True], ids=["by the same trainer", "by one that is started again"])
def test_weights_that_were_left_half_written_are_no_base(
    world: World, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    publisher, node = world.publisher(machine="m"), world.node()
    world.fetch(node, world.publish(publisher, 0))
    with monkeypatch.context() as patch:
        write = safetensors.write
        patch.setattr(safetensors, "write", lambda f, at, piece: fails(write(f, at, piece[: len(piece) // 2])))
        with pytest.raises(OSError, match="No space"):
            world.steps(publisher, 1)
    [ref] = world.steps(world.publisher(SECOND, machine="m") if again else publisher, 2)
    assert kind(world, ref) == "whole"
    world.fetch(node, ref)


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


def test_a_type_that_cannot_be_stored_is_named(world: World) -> None:
    world.weights["odd"] = torch.zeros(4, dtype=torch.complex128)
    with pytest.raises(
        UnsupportedType, match=r"^trainer.model: odd has type torch.complex128; expected one of float64"
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
