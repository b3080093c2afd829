"""Whole policies that are stored beside the deltas, for nodes that come later."""

from __future__ import annotations

import mmap
import os
import threading
from concurrent.futures import wait
from typing import Any

import pytest

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import Corrupt, NotFound
from grpo_orch.checkpoint.stream import chunks, manifest
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.tasks.rollout.policy_folders import Superseded
from grpo_orch.tasks.storing import publish
from grpo_orch.tasks.storing.publish import Snapshot
from tests.budget import HANG_S
from tests.node.rollout.deltas.world import FIRST, World, check, kind, manifest_there, settle, snapshots


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
    snapshot = publisher._snapshot[0]
    assert kind(world, of) == "delta+"
    for step in (6, 7, 8):
        gate.open.release(3)
        world.step()
        ref = publisher.publish(PolicyVersion(0, step), world.weights.items(), None)
        world.made[ref.label] = dict(world.weights)
        publisher._removal.result()
        assert not snapshot.stored.done()
        world.fetch(world.node(), ref)
    gate.open.release(100)
    wait([snapshot.stored], timeout=HANG_S)
    world.whole_bytes()
    node = world.node()
    newest = world.steps(publisher, 9)[0]
    assert manifest.load(world.store, newest.prefix).meta[manifest.SNAPSHOT] == of.prefix
    asked = iter([True] * 14 + [False])
    with pytest.raises(Superseded):
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
    snapshot = publisher._snapshot[0]
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
