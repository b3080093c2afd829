"""Policies as deltas, from a trainer's publisher to a node's folders: always the weights that the label names."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grpo_orch.checkpoint.records import metrics
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import AlreadyExists, Corrupt, NotFound, StoreUnavailable
from grpo_orch.checkpoint.weights import scratch
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.wire import PolicyRef
from grpo_orch.policies.weights.tensors import ServedTypes
from grpo_orch.tasks.storing import publish
from tests.node.rollout.deltas.world import World, check, kind


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


def test_a_node_that_comes_fetches_the_whole_one_and_what_follows(world: World) -> None:
    publisher = world.publisher()
    world.publish(publisher, 0)
    *_, before, newest = world.steps(publisher, 1, 2, 3)
    for ref in (newest, before):
        node = world.node()
        world.fetch(node, ref)
        assert world.whole_bytes() == 1
    world.fetch(node, world.steps(publisher, 4, 5)[-1])
    assert world.whole_bytes() == 0, "it follows all that it has missed"


def test_where_almost_all_changes_all_travels(world: World) -> None:
    publisher, node = world.publisher(), world.node()
    world.fetch(node, world.publish(publisher, 0))
    world.step(1.0)
    ref = world.publish(publisher, 1)
    assert kind(world, ref) == "whole"
    world.fetch(node, ref)
    kinds = [kind(world, world.steps(publisher, step)[0]) for step in range(2, 12)]
    assert kinds == ["whole"] * publish.UNCOMPARED + ["delta+"] * 2


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
