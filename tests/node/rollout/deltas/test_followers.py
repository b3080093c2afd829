"""A node that follows by deltas, some of them damaged, lost or slow, holds what the label names, or nothing."""

from __future__ import annotations

import mmap
import os
import signal
from pathlib import Path

import pytest

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import Corrupt, NotFound
from grpo_orch.checkpoint.stream import chunks, manifest
from grpo_orch.checkpoint.weights import delta, safetensors
from grpo_orch.tasks.rollout.policy_folders import STAGED, PolicyFolders, Superseded
from grpo_orch.tasks.storing import publish
from tests.node.rollout.deltas.world import World, always, check


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
    monkeypatch.setattr(delta, "decode_piece", lambda *_: None)
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
    with pytest.raises(Superseded):
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
        except Superseded:
            overtaken += 1
    assert 0 < overtaken < len(keys)
