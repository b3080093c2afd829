"""Who may remove which published policy, with a publisher that was replaced and does not know it."""

from __future__ import annotations

import functools
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.weights import scratch
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.wire import PolicyRef
from grpo_orch.tasks.storing.publish import PolicyPublisher
from grpo_orch.tasks.storing.tensors import LazyTensor
from tests.node.rollout.deltas.world import World, settle
from tests.stand_ins.catalog_rig import fetch

FIRST, SECOND, FORKED = (0, 1, 1), (0, 2, 1), (1, 2, 2)
TENSOR_BYTES = 2**22


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def served(world: World, ref: PolicyRef) -> torch.Tensor:
    """What a node gets that is told to hold the policy."""
    folder = world.folder / "node" / ref.label
    assert fetch(world.store, ref.prefix, folder).digest_as(ref.digest) == ref.digest
    return load_file(folder / "model.safetensors")["w"]


def publish(publisher: PolicyPublisher, timeline: int, *steps: int, weights: float = 0.0) -> PolicyRef:
    """Publish these steps one after another, and let what is removed after the last be gone."""
    for step in steps:
        ref = publisher.publish(PolicyVersion(timeline, step), [("w", torch.full((4,), step + weights))], None)
    settle(publisher)
    return ref


def test_replaced_publisher_changes_nothing_of_the_newer(world: World) -> None:
    zombie = world.publisher(FIRST)
    publish(zombie, 0, 58, 59)
    newer = world.publisher(SECOND)
    before, wanted = publish(newer, 0, 41), publish(newer, 0, 42)
    late = publish(zombie, 0, 60)
    assert served(world, wanted).tolist() == [42.0] * 4
    assert served(world, before).tolist() == [41.0] * 4, "a node may be at it"
    # Nor when it comes by the same steps with other weights, as where sums have no fixed order.
    zombie_of_same = world.publisher((0, 1, 9))
    publish(zombie_of_same, 0, 42, weights=0.5)
    assert served(world, wanted).tolist() == [42.0] * 4
    assert wanted.prefix != late.prefix
    publish(newer, 0, 43)
    assert world.left() == ["0000/00000042-i2-a1", "0000/00000043-i2-a1"], "what the other one left goes with it"


def test_older_timelines_policies_are_removed(world: World) -> None:
    publish(world.publisher(SECOND), 0, 98, 99)
    publish(world.publisher(FORKED), 1, 50)
    assert world.left() == ["0000/00000099-i2-a1", "0001/00000050-i2-a2"]
    publish(world.publisher(FORKED), 1, 51)
    assert world.left() == ["0001/00000050-i2-a2", "0001/00000051-i2-a2"]


def test_remains_go_and_foreign_files_stay(world: World) -> None:
    world.store.put("policies/README", b"a foreign file")
    world.store.put("policies/notes/mine/text", b"another")
    world.store.put(f"{layout.policy(PolicyVersion(0, 7), FIRST)}/chunk", b"cut off before its manifest")
    publish(world.publisher(SECOND), 0, 5, 6)
    assert world.left() == ["", "0000/00000005-i2-a1", "0000/00000006-i2-a1", "notes/mine"]


def test_no_second_model_is_in_memory_while_publishing(world: World) -> None:
    """Each tensor is read when it is its turn, and let go of."""
    alive, most = set[int](), list[int]()
    elements = TENSOR_BYTES // 4

    def read(at: int) -> torch.Tensor:
        memory = np.full(elements, at, np.float32)
        alive.add(at)
        most.append(len(alive))
        weakref.finalize(memory, alive.discard, at)
        return torch.from_numpy(memory)

    count = 2 * scratch.AHEAD_BYTES // TENSOR_BYTES
    tensors = {
        f"{at:03}": LazyTensor(torch.float32, (elements,), functools.partial(read, at)) for at in range(count)
    }
    publisher = world.publisher(FIRST)
    for step in range(2):
        publisher.publish(PolicyVersion(0, step), tensors.items(), None)
    assert len(most) == 2 * count
    assert max(most) <= scratch.AHEAD_BYTES // TENSOR_BYTES + 2, "the one that is read, and the one before"
    settle(publisher)
