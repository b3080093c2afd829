"""What a node's engine holds and what its file holds, whatever is published, lost, gone back to or started again.

The engine is a stand-in that has the weights that a real one would: it reads files and applies deltas to its own
copy, refuses changes to what it does not hold, and forgets all when it is started again.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from safetensors.torch import load_file, save_file

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.checkpoint.weights import delta
from grpo_orch.policies.serving.canary import Canary
from grpo_orch.policies.serving.wire import PolicyRef
from grpo_orch.tasks.rollout import policy_loader
from grpo_orch.tasks.rollout.policy_folders import PolicyFolders, Staged
from grpo_orch.tasks.rollout.policy_loader import PolicyLoader
from grpo_orch.tasks.rollout.vllm.server import Server, ServerFailed
from tests.node.rollout.deltas.world import World, check

CANARY = Canary([1, 2], [0.0], "float32", 2)


class Engine:
    """Stands in for vLLM. `why` is what a trial comes to; `broken`, it fails once it has touched its weights."""

    adapters, member = False, "rollout-0-i1"

    def __init__(self, folder: Path, boot: int) -> None:
        self.boot_id, self.policy, self.does = f"boot-{boot}", "", list[str]()
        self.why, self.broken, self.stopped = "", False, False
        self.file = folder / f"{self.boot_id}.safetensors"

    async def load(self, version: str, folder: Path, _canary: Canary | None = None) -> None:
        self.does.append("whole")
        shutil.copy(folder / layout.MODEL, self.file)
        self.policy = version

    async def overwrite(self, version: str, base: str, staged: Staged, _canary: Canary | None) -> None:
        self.does.append("changes")
        if base != self.policy:
            raise ServerFailed(f"the delta is based on {base}, but the engine holds {self.policy}")
        if self.broken:
            raise ServerFailed("half of it is done")
        with ThreadPoolExecutor(1) as pool:
            for path, before in zip(staged.deltas, staged.digests, strict=False):
                delta.apply([path], self.file, before, pool)
        self.policy = version

    async def try_deltas(
        self, version: str, base: str, staged: Staged, canary: Canary | None, folder: Path
    ) -> str:
        await self.overwrite(version, base, staged, canary)
        await self.load(version, folder)
        self.does[-2:] = ["trial"]
        return self.why

    async def prove(self, version: str, folder: Path, _first: int, _step: int) -> bool:
        if version == self.policy:
            check_same(folder / layout.MODEL, self.file)
        return version == self.policy

    async def stop(self) -> None:
        self.stopped = True

    @property
    def weights(self) -> dict[str, Any]:
        return cast("dict[str, Any]", load_file(self.file))


def check_same(ours: Path, theirs: Path) -> None:
    a, b = load_file(ours), load_file(theirs)
    if a.keys() != b.keys() or any(not a[name].equal(b[name]) for name in a):
        raise ServerFailed("the engine is not what the file holds")


class Node:
    """A loader and one engine after the other."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(policy_loader, "canary_in", lambda _: CANARY)
        self.world, self.boots = world, 0
        self.folders: PolicyFolders = world.node()
        self.loader = PolicyLoader(self.folders)
        self.restart()

    def restart(self) -> None:
        self.boots += 1
        self.engine = Engine(self.world.folder, self.boots)

    async def follow(self, ref: PolicyRef, *, settles: bool = True) -> str:
        """Load it; by what."""
        [by] = await self.give(ref, self.engine, settles=settles)
        assert not (settles and self.engine.stopped)
        for held in self.world.root.glob("[!.]*"):
            if settles:
                check(held, self.world.made[held.name])
        return by

    async def give(self, ref: PolicyRef, *engines: Engine, settles: bool = True) -> list[str]:
        """Give it to engines of one machine at once; by what each came to it."""
        servers = [cast("Server", one) for one in engines]
        ready = await self.loader.fetch(servers, ref, engines[0].policy or None, lambda: True)
        await asyncio.gather(*(self.loader.load(one, ready, CANARY) for one in servers))
        await self.loader.loaded(ready, servers)
        wanted = self.world.made[ref.label]
        for engine in engines:
            assert engine.policy == ref.label
            assert all(one.equal(wanted[name]) for name, one in engine.weights.items())
        if settles:
            await self.loader.settled()
        return [one.does[-1] for one in engines]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(World(tmp_path), monkeypatch)


def test_each_tensor_kind_is_tested_once_per_boot(node: Node) -> None:
    world, publisher = node.world, node.world.publisher()

    async def story() -> None:
        assert await node.follow(world.publish(publisher, 0)) == "whole"
        norm = world.weights["model.norm.weight"]
        for step, by in enumerate(["trial", "changes", "changes"], 1):
            world.step()
            world.weights["model.norm.weight"] = norm  # which does not change at first
            assert await node.follow(world.publish(publisher, step)) == by
            assert len(list(world.root.glob("[!.]*"))) == 1
            assert len(list((world.root / ".staged").glob("*/delta.bin"))) <= 1
        world.weights["model.norm.weight"] = norm + 1
        for step, by in ((4, "trial"), (5, "changes")):
            assert await node.follow(world.publish(publisher, step)) == by
            world.step(0.3)
        node.restart()
        assert await node.follow(world.steps(publisher, 6)[0]) == "whole"
        assert await node.follow(world.steps(publisher, 7)[0]) == "trial"

    asyncio.run(story())


def test_deltas_that_differ_cause_full_reload_reported_once(node: Node) -> None:
    world, publisher = node.world, node.world.publisher()

    async def story() -> None:
        await node.follow(world.publish(publisher, 0))
        node.engine.why = "the loader cannot be followed"
        by = [await node.follow(ref) for ref in world.steps(publisher, 1, 2, 3)[:1]]
        by += [await node.follow(ref) for ref in world.steps(publisher, 4, 5)]
        node.restart()
        by.append(await node.follow(world.steps(publisher, 6)[0]))
        assert by == ["trial", "whole", "whole", "whole"]

    asyncio.run(story())


def test_a_trial_that_ends_the_engine_is_not_made_again(node: Node) -> None:
    world, publisher = node.world, node.world.publisher()

    async def story() -> None:
        await node.follow(world.publish(publisher, 0))
        node.engine.broken = True
        [ref] = world.steps(publisher, 1)
        with pytest.raises(ServerFailed):
            await node.follow(ref)
        node.restart()
        assert await node.follow(ref) == "whole"
        assert await node.follow(world.steps(publisher, 2)[0]) == "whole"

    asyncio.run(story())


def test_engine_runs_ahead_of_file_that_follows_in_one_pass(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    world, publisher = node.world, node.world.publisher()
    passes, apply = list[int](), delta.apply

    def counted(deltas: Any, weights: Path, base: str, pool: Any) -> str:
        if weights.is_relative_to(world.root):
            passes.append(len(deltas))
        return apply(deltas, weights, base, pool)

    async def story() -> None:
        await node.follow(world.publish(publisher, 0))
        await node.follow(world.steps(publisher, 1)[0])
        monkeypatch.setattr(delta, "apply", counted)
        with node.folders.file_lock:  # the disk takes its time
            refs = world.steps(publisher, 2, 3, 4)
            assert [await node.follow(ref, settles=False) for ref in refs] == ["changes"] * 3
            prefixes = [ref.prefix for ref in refs[:2]]
            world.store.delete([f"{prefix}/{layout.MANIFEST}" for prefix in prefixes])  # the publisher's retention
        await node.loader.settled()
        [held] = world.root.glob("[!.]*")
        assert held.name == refs[-1].label
        check(held, world.made[held.name])
        assert sum(passes) == 3
        assert len(passes) <= 2
        assert world.whole_bytes() == 1, "the first and no other"

    asyncio.run(story())


@pytest.mark.parametrize(
    ("then", "by"),
    [
        ("several at once", "changes"),
        ("the same weights under another version", "changes"),
        ("a rollback", "whole"),
        ("a trainer started again", "whole"),
        ("a lost delta", "nothing"),
        ("an anchor", "changes"),
        ("vLLM started again", "whole"),
    ],
)
def test_next_policy_is_loaded_whole_or_by_deltas(node: Node, then: str, by: str) -> None:
    world, publisher = node.world, node.world.publisher()

    async def story() -> None:
        first = world.publish(publisher, 0)
        begun = dict(world.weights)
        for ref in (first, *(world.steps(publisher, 1))):
            await node.follow(ref)
        match then:
            case "several at once":
                ref = world.steps(publisher, 2, 3, 4)[-1]
            case "the same weights under another version":
                ref = world.publish(publisher, 2)
            case "a rollback":
                world.weights = begun
                ref = world.publish(world.publisher((1, 1, 3)), 0, timeline=1)
            case "a trainer started again":
                ref = world.steps(world.publisher((0, 1, 2)), 2)[0]
            case "a lost delta":
                lost, ref = world.steps(publisher, 2, 3)
                keys = [one.key for one in world.store.entries(lost.prefix)]
                world.store.delete(keys)
            case "an anchor":
                publisher.chain_max = 0
                ref = world.steps(publisher, 2)[0]
            case _:
                ref = world.steps(publisher, 2)[0]
        if then == "vLLM started again":
            node.restart()
        if by == "nothing":
            held = node.engine.policy
            with pytest.raises(StoreError):
                await node.follow(ref)
            assert node.engine.policy == held
            return
        assert await node.follow(ref) == by
        assert await node.follow(world.steps(world.publisher((9, 9, 9)), 9)[0]) in ("whole", "trial")

    asyncio.run(story())


@pytest.mark.parametrize("seed", range(4))
def test_engine_holds_the_labelled_weights_after_any_faults(node: Node, seed: int) -> None:
    """Steps, restarts of either side, rollbacks, lost objects and policies that a node misses, in any order."""
    world, draw, attempt = node.world, random.Random(seed), 1
    world.chain_max = 3
    publisher, did = world.publisher((0, 1, 1)), list[str]()

    async def story() -> None:
        nonlocal publisher, attempt
        for step in range(40):
            match draw.choice(["step"] * 8 + ["trainer", "vLLM", "back", "lost", "missed"]):
                case "trainer":
                    attempt += 1
                    publisher = world.publisher((0, 1, attempt))
                case "vLLM":
                    node.restart()
                case "back":
                    world.weights = dict(draw.choice([*world.made.values(), world.weights]))
                case "lost":
                    keys = [one.key for one in world.store.entries(layout.POLICIES)]
                    world.store.delete([draw.choice(keys)] if keys else [])
                case "missed":
                    world.step()
                    world.publish(publisher, 1000 + step)
            world.step(draw.choice([0.0, 0.01, 0.02]))
            ref = world.publish(publisher, step)
            held = node.engine.policy
            try:
                did.append(await node.follow(ref, settles=draw.random() < 0.6))
            except StoreError:
                assert node.engine.policy == held

    asyncio.run(story())
    assert did.count("changes") > 5


def test_engines_share_fetches_and_have_their_own_tests(node: Node) -> None:
    world, publisher = node.world, node.world.publisher()
    a, b = node.engine, Engine(world.folder, 100)
    a.member, b.member = "rollout-0-i1.0", "rollout-0-i1.1"

    async def story() -> None:
        nonlocal b
        assert await node.give(world.publish(publisher, 0), a, b) == ["whole"] * 2
        for step, by in enumerate(["trial", "changes"], 1):
            assert await node.give(world.steps(publisher, step)[0], a, b) == [by] * 2
        b = Engine(world.folder, 101)  # started again
        b.member = "rollout-0-i1.1"
        [ref] = world.steps(publisher, 3)
        assert await node.give(ref, a) == ["changes"]
        assert await node.give(ref, b) == ["whole"]
        assert await node.give(world.steps(publisher, 4)[0], a, b) == ["changes", "trial"]
        assert world.whole_bytes() == 1, "the first and no other"
        b = Engine(world.folder, 102)
        b.member, b.why = "rollout-0-i1.1", "the loader cannot be followed"
        assert await node.give(world.steps(publisher, 5)[0], b) == ["whole"]
        assert await node.give(world.steps(publisher, 6)[0], b) == ["trial"]
        assert (node.loader.takes_deltas(cast("Server", a)), node.loader.takes_deltas(cast("Server", b))) == (
            True,
            False,
        )

    asyncio.run(story())


def test_engine_that_differs_from_its_file_is_restarted(node: Node) -> None:
    """And no other of its machine."""
    world, publisher = node.world, node.world.publisher()
    a, b = node.engine, Engine(world.folder, 100)
    b.member = "rollout-0-i1.1"

    async def story() -> None:
        for step in range(3):
            await node.give(world.steps(publisher, step)[0], a, b)
        with node.folders.file_lock:
            [ref] = world.steps(publisher, 3)
            ready = await node.loader.fetch([cast("Server", a)], ref, a.policy, lambda: True)
            for one in (a, b):
                await node.loader.load(cast("Server", one), ready, CANARY)
            await node.loader.loaded(ready, [cast("Server", a), cast("Server", b)])
            weights = a.weights
            weights["model.norm.weight"][3] += 1  # a bit of its memory
            save_file(weights, a.file)
        await node.loader.settled()
        assert (a.stopped, b.stopped) == (True, False)

    asyncio.run(story())
