"""A rollout node's full disk, and policies that vLLM does not load: the agent lives, says so, and stops trying."""

from __future__ import annotations

import asyncio
import errno
import io
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.store import layout
from checkpoint.store.errors import Corrupt
from checkpoint.store.run_store import Store
from checkpoint.stream import manifest
from policies.model.spec import Dataset, RunSpec, TrainerSpec
from policies.model.vocabulary import PolicyVersion
from policies.serving.fitness import TRIES, Fitness
from policies.serving.joining import Stage
from policies.serving.wire import Announce, AnnounceReply, EngineWord, PolicyRef
from tasks.machine.node_env import NodeEnv
from tasks.rollout import node_agent
from tasks.rollout.agent import lasting
from tasks.rollout.policy_folders import DiskFailed, Overtaken, PolicyFolders
from tasks.rollout.rollout_engine import RolloutEngine
from tasks.rollout.vllm import server as vllm_server
from tasks.rollout.vllm.server import EngineLimits, PolicyRefused, Server, ServerFailed
from tests.budget import HANG_S

MIB = 1 << 20


def test_a_policy_is_tried_three_times_and_the_next_one_once() -> None:
    fitness, tried = Fitness(), list[str]()
    for wanted in ("a", "a", "a", "a", "a", "b", "b", "b", "c"):
        if fitness.tries(wanted):
            tried.append(wanted)
            fitness = fitness.after_failure(wanted, f"{wanted} is bad", passes=False)
        assert bool(fitness.unfit) == (tried.count("a") == TRIES)
        assert fitness.after_time() == fitness
    assert tried == ["a", "a", "a", "b", "c"]
    assert fitness.unfit == "c is bad"


def test_what_may_pass_is_tried_again_after_a_while() -> None:
    fitness = Fitness()
    for _ in range(TRIES):
        assert fitness.tries("a")
        fitness = fitness.after_failure("a", "disk full", passes=True)
    assert not fitness.tries("a")
    later = fitness.after_time()
    assert later.tries("a")
    assert later.unfit == "disk full"
    assert not later.after_failure("a", "disk full", passes=True).tries("a")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40))
def test_no_policy_is_tried_without_end(steps: list[tuple[str, bool]]) -> None:
    fitness, in_a_row, before = Fitness(), 0, ""
    for wanted, passes in steps:
        in_a_row = in_a_row if wanted == before else 0
        before = wanted
        if fitness.tries(wanted):
            in_a_row += 1
            fitness = fitness.after_failure(wanted, "why", passes=passes)
        assert in_a_row <= TRIES


class SmallDisk:
    """A folder on which so many bytes fit: beyond them the kernel writes what fits, then nothing."""

    def __init__(self, root: Path, size_bytes: int) -> None:
        self.root, self.size_bytes, self.pwrite = root, size_bytes, os.pwrite

    def write(self, file: int, data: bytes | memoryview, offset: int) -> int:
        used = sum(path.stat().st_blocks * 512 for path in self.root.rglob("*") if path.is_file())
        fits = max(0, min(len(data), self.size_bytes - used))
        if not fits:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.pwrite(file, data[:fits], offset)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallDisk:
    small = SmallDisk(tmp_path / "node", 5 * MIB)
    small.root.mkdir()
    monkeypatch.setattr(os, "pwrite", small.write)
    return small


def weights_of(size_bytes: int) -> bytes:
    """A file of one small tensor with so much behind it."""
    header = b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    return len(header).to_bytes(8, "little") + header + os.urandom(size_bytes)


def publish(folder: Path, step: int, files: int = 1, size_bytes: int = 3 * MIB) -> tuple[Store, PolicyRef]:
    store, version = Store(f"file://{folder}/store"), PolicyVersion(0, step)
    weights = folder / "weights"
    weights.mkdir(exist_ok=True)
    for number in range(files):
        (weights / f"{number}.safetensors").write_bytes(weights_of(size_bytes))
    digest = manifest.publish(store, layout.policy(version, (0, 1, 1)), weights, version, 0.0).digest
    return store, PolicyRef(str(version), layout.policy(version, (0, 1, 1)), digest)


def test_a_full_disk_is_freed_of_what_is_not_needed(disk: SmallDisk, tmp_path: Path) -> None:
    store, first = publish(tmp_path, 0)
    _, second = publish(tmp_path, 1)
    folders = PolicyFolders(store, disk.root / "policies")
    folders.fetch(first, lambda: True)
    with pytest.raises(DiskFailed, match=r"No space left on device; \d+ MiB are free once all older"):
        folders.fetch(second, lambda: True)
    assert not list(disk.root.rglob("*.safetensors"))
    folder = folders.fetch(second, lambda: True)
    assert (folder / "0.safetensors").read_bytes() == (tmp_path / "weights" / "0.safetensors").read_bytes()


def test_a_download_that_nobody_wants_any_more_ends(tmp_path: Path) -> None:
    store, wanted = publish(tmp_path, 0, files=60, size_bytes=10)
    pieces = iter(range(60))
    with pytest.raises(Overtaken):
        PolicyFolders(store, tmp_path / "policies").fetch(wanted, lambda: next(pieces) < 5)
    (part,) = (tmp_path / "policies").iterdir()  # for the next try; no policy
    assert part.name.startswith(".")


@pytest.mark.parametrize(("digits", "taken"), [(0, True), (12, False), (32, True)])
def test_policy_is_fetched_by_its_whole_digest_or_none(tmp_path: Path, digits: int, *, taken: bool) -> None:
    store, wanted = publish(tmp_path, 0, size_bytes=10)
    folders = PolicyFolders(store, tmp_path / "policies")
    named = replace(wanted, digest=wanted.digest[:digits])
    if taken:
        assert folders.fetch(named, lambda: True).name == named.label
    else:
        with pytest.raises(Corrupt, match="holds policy"):
            folders.fetch(named, lambda: True)
    if digits:
        another = replace(named, digest="0" * digits)
        with pytest.raises(Corrupt, match="holds policy"):
            folders.fetch(another, lambda: True)


class VLLM:
    """Stands in for the server: `does` says what a load comes to."""

    def __init__(self, world: World, member: str, gpus: str, *, bare: bool) -> None:
        self.bare, self.member, self.gpus = bare, member, gpus
        self.world, self.ends = world, asyncio.Event()
        self.boot_id, self.address = f"boot-{len(world.boots)}", "127.0.0.1:1"
        self.limits, self.adapters = EngineLimits(4), False
        self.start_s = self.trial_s = 0.0
        self.looks = 0  # at its numbers, since it holds a policy

    async def load(self, version: str, *_: Any) -> None:
        self.world.loads.append(version)
        self.world.loaded_by.append(self.boot_id)
        self.world.does(version)
        await self.world.delays(self)

    async def ask_engine(self) -> EngineWord | None:
        return None

    async def ended(self) -> int:
        await self.ends.wait()
        return -15

    async def stop(self) -> None:
        self.ends.set()


class World:
    """An agent beside a stand-in for vLLM and for the gateway, which wants `wanted`."""

    def __init__(self, store: Store, workdir: Path, wanted: PolicyRef, shares: Sequence[str] = ("",)) -> None:
        base = workdir / "base"
        base.mkdir(parents=True, exist_ok=True)
        (base / "model.safetensors").write_bytes(weights_of(4))
        (base / "config.json").write_text("{}")
        self.wanted = wanted
        self.boots: list[VLLM] = []
        self.loads: list[str] = []
        self.loaded_by: list[str] = []  # boots
        self.said: list[Announce] = []
        self.stages: list[Stage] = []
        self.does: Callable[[str], None] = lambda _: None
        self.members: dict[str, Announce] = {}
        self.left: list[str] = []
        self.heard, self.comes_up = asyncio.Event(), asyncio.Event()
        self.comes_up.set()
        spec = RunSpec(
            name="t",
            storage=store.url,
            trainer=TrainerSpec(model="base", dataset=Dataset(path="json"), reward_funcs=()),
            grpo={},
            workdir=str(workdir),
        )
        env = NodeEnv(store.url, "rollout-0-i1", "token", 1, 0, str(workdir), "127.0.0.1")
        self.agent = node_agent.Agent(env, spec, store, cast("Any", None), shares=shares)
        for engine in self.agent._engines:
            engine._gateway = cast("Any", Gateway(self, engine.name))

    @property
    def engine(self) -> RolloutEngine:
        """The first."""
        return self.agent._engines[0]

    async def start(self, _spec: Any, env: NodeEnv, _http: Any, *, bare: bool, gpus: str) -> Server:
        self.boots.append(boot := VLLM(self, env.node, gpus, bare=bare))
        await self.comes_up.wait()
        return cast("Server", boot)

    async def delays(self, boot: VLLM) -> None:
        """What a load waits for."""

    async def until(self, ready: Callable[[Announce], bool]) -> Announce:
        """The next announcement that is so."""
        looked = len(self.said)
        async with asyncio.timeout(HANG_S):
            while True:
                self.heard.clear()
                await self.heard.wait()
                for one in self.said[looked:]:  # of several engines
                    if ready(one):
                        return one
                looked = len(self.said)


class Gateway:
    """Stands in for the gateway, towards one engine."""

    def __init__(self, world: World, member: str) -> None:
        self.world, self.member = world, member

    async def announce(self, said: Announce, _changed: asyncio.Event) -> AnnounceReply:
        self.world.said.append(said)
        self.world.members[self.member] = said
        self.world.heard.set()
        await asyncio.sleep(0.01)
        return AnnounceReply(drain=True) if said.draining else AnnounceReply(self.world.wanted)

    async def ask_wanted(self, stage: Stage) -> PolicyRef:
        self.world.stages.append(stage)
        return self.world.wanted

    async def drain(self) -> None:
        pass

    async def leave(self, _boot_id: str) -> None:
        self.world.left.append(self.member)
        self.world.members.pop(self.member, None)
        self.world.heard.set()


def run_agent(world: Callable[[], World], story: Callable[[World], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def both() -> None:
        one = world()
        monkeypatch.setattr(vllm_server, "start", one.start)
        monkeypatch.setattr(node_agent, "RETRY_S", 0.01)
        at_work = asyncio.ensure_future(one.agent.run())
        telling = asyncio.ensure_future(story(one))
        await asyncio.wait({at_work, telling}, return_when=asyncio.FIRST_COMPLETED)
        assert not at_work.done(), at_work.exception()
        at_work.cancel()
        await asyncio.gather(at_work, return_exceptions=True)
        await telling

    asyncio.run(both())


@pytest.mark.parametrize(
    ("error", "boots"),
    [
        (ServerFailed("PUT /grpo/policy: \x1b[31m 500 no such tensor"), 4),
        (PolicyRefused("500 no such tensor", touched=True), 4),
        (PolicyRefused("500 no such tensor", touched=False), 1),
    ],
    ids=["failed", "touched", "untouched"],
)
def test_a_policy_that_does_not_load_makes_the_node_unfit_until_another_does(
    error: Exception, boots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, bad = publish(tmp_path, 0, size_bytes=10)
    _, good = publish(tmp_path, 1, size_bytes=10)

    def does(version: str) -> None:
        if version == bad.label:
            raise error

    async def story(world: World) -> None:
        world.engine._bare = False
        world.does = does
        said = await world.until(lambda one: bool(one.unfit) and len(world.boots) == boots)
        assert said.unfit.startswith(f"policy {bad.label}: ")
        assert "500 no such tensor" in said.unfit
        assert said.unfit.isprintable()
        for _ in range(20):
            await world.until(lambda one: bool(one.unfit))
        assert (len(world.boots), world.loads) == (boots, [bad.label] * TRIES)
        world.wanted = good
        assert (await world.until(lambda one: one.policy == good.label)).unfit == ""
        assert len(world.boots) == boots

    run_agent(lambda: World(store, tmp_path / "work", bad), story, monkeypatch)


def test_an_agent_outlives_a_full_disk_and_says_so(
    disk: SmallDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, small = publish(tmp_path, 0)
    _, large = publish(tmp_path, 1, size_bytes=8 * MIB)

    async def story(world: World) -> None:
        await world.until(lambda one: one.policy == small.label)
        world.wanted = large
        said = await world.until(lambda one: bool(one.unfit))
        assert "No space left on device" in said.unfit
        assert said.policy == small.label  # which it holds in memory
        world.wanted = small
        await world.until(lambda one: not one.unfit)
        world.wanted = large
        await world.until(lambda one: bool(one.unfit))
        disk.size_bytes = 20 * MIB  # somebody made room

        def loaded(one: Announce) -> bool:
            world.engine._failed_at_s = -math.inf  # time has passed
            world.agent._work.set()
            return one.policy == large.label

        assert (await world.until(loaded)).unfit == ""
        assert len(world.boots) == 1

    run_agent(lambda: World(store, disk.root, small), story, monkeypatch)


def test_a_log_on_a_full_disk_loses_lines_and_nothing_else() -> None:
    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(errno.ENOSPC, "full")

        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "full")

    log = lasting(Full())
    log.write("a line\n")
    log.flush()
