"""A simulated rollout machine: its real agent next to stand-ins for vLLM's servers, their GPUs and the gateway."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import manifest
from grpo_orch.policies.model.spec import Dataset, RolloutSpec, RunSpec, TrainerSpec
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.joining import Stage
from grpo_orch.policies.serving.wire import Announce, AnnounceReply, EngineStats, PolicyRef
from grpo_orch.tasks.machine.node_env import NodeEnv
from grpo_orch.tasks.rollout.agent import Agent
from grpo_orch.tasks.rollout.rollout_engine import RolloutEngine, Timing
from grpo_orch.tasks.rollout.vllm import server as vllm_server
from grpo_orch.tasks.rollout.vllm.server import EngineLimits, Server
from tests.budget import HANG_S

NODE = "rollout-0-i1"


def spec_of(workdir: Path, flags: dict[str, Any] | None = None, env: dict[str, str] | None = None) -> RunSpec:
    return RunSpec(
        name="t",
        storage="memory://t",
        trainer=TrainerSpec(model="model", dataset=Dataset(path="json"), reward_funcs=()),
        grpo={},
        workdir=str(workdir),
        rollout=RolloutSpec(vllm=flags or {}, env=env or {}),
    )


def weights_of(size_bytes: int) -> bytes:
    """A file of one small tensor with so much behind it."""
    header = b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    return len(header).to_bytes(8, "little") + header + os.urandom(size_bytes)


def make_base(folder: Path) -> None:
    """A base model below the folder, of the same tensors as what is published."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "model.safetensors").write_bytes(weights_of(4))
    (folder / "model" / "config.json").write_text("{}")


def publish(store: Store, folder: Path, step: int, *, files: int = 1, size_bytes: int = 10) -> PolicyRef:
    version, weights = PolicyVersion(0, step), folder / "weights"
    weights.mkdir(exist_ok=True)
    for number in range(files):
        (weights / f"{number}.safetensors").write_bytes(weights_of(size_bytes))
    place = layout.policy(version, (0, 1, 1))
    return PolicyRef(str(version), place, manifest.publish(store, place, weights, version, 0.0).digest)


class Boot:
    """Stands in for a server of vLLM's."""

    def __init__(self, machine: Machine, member: str, gpus: str, *, bare: bool) -> None:
        self.bare, self.member, self.gpus = bare, member, gpus
        self.machine, self.ends = machine, asyncio.Event()
        self.boot_id, self.address = f"boot-{len(machine.boots)}", "127.0.0.1:1"
        self.limits, self.adapters = EngineLimits(4), False
        self.start_s = self.trial_s = 0.0
        self.loads = self.looks = 0  # of policies; at its numbers, since it holds one

    async def load(self, version: str, *_: Any) -> None:
        self.machine.loads.append(version)
        self.loads += 1
        await self.machine.on_load(self)

    async def fetch_stats(self) -> EngineStats | None:
        self.looks += self.loads > 0
        return self.machine.on_look(self)

    async def ended(self) -> int:
        await self.ends.wait()
        return -15

    async def stop(self) -> None:
        self.ends.set()


async def nothing(_: Boot) -> None:
    """What a boot does that fails nowhere."""


class Machine:
    """One rollout machine, whose gateway wants `wanted`. Tests say what a boot does by `on_start` and the like."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.workdir = folder, folder / "work"
        self.store = Store(f"file://{folder}/store")
        self.boots: list[Boot] = []
        self.loads: list[str] = []
        self.said: list[Announce] = []
        self.stages: list[Stage] = []
        self.members: dict[str, Announce] = {}
        self.left: list[str] = []
        self.on_start: Callable[[Boot], Awaitable[None]] = nothing
        self.on_load: Callable[[Boot], Awaitable[None]] = nothing
        self.on_look: Callable[[Boot], EngineStats | None] = lambda _: None
        self.comes_up = asyncio.Event()
        self.comes_up.set()
        self.heard = asyncio.Event()
        self._work: asyncio.Future[None] | None = None
        self.spec = replace(spec_of(self.workdir), storage=self.store.url)
        self.timing = Timing(retry_s=0.01, restart_wait_s=0.0)
        monkeypatch.setattr(vllm_server, "start", self._start)

    async def __aenter__(self) -> Machine:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._work is not None:
            assert not self._work.done(), self._work.exception()
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    @property
    def engine(self) -> RolloutEngine:
        """The first."""
        return self.agent.engines[0]

    def publish(self, step: int, **options: int) -> PolicyRef:
        return publish(self.store, self.folder, step, **options)

    def start(self, wanted: PolicyRef, shares: Sequence[str] = ("",), *, bare: bool = True) -> None:
        """Start the agent: an engine for each share of GPUs, which start without weights if they may."""
        make_base(self.workdir)
        self.wanted = wanted
        env = NodeEnv(self.store.url, NODE, "token", 1, 0, str(self.workdir), "127.0.0.1")
        gateway, http = cast("Any", Gateway(self)), cast("Any", None)
        self.agent = Agent(env, self.spec, self.store, http, shares, gateway, self.timing)
        for engine in self.agent.engines:
            engine.may_be_bare = bare
        self._work = asyncio.ensure_future(self.agent.run())

    async def failure(self) -> BaseException | None:
        """The end of the agent, which fails."""
        assert self._work is not None
        await asyncio.wait({self._work}, timeout=HANG_S)
        work, self._work = self._work, None
        return work.exception()

    def boots_of(self, member: str) -> list[Boot]:
        return [boot for boot in self.boots if boot.member == member]

    async def until(self, ready: Callable[[Announce], bool]) -> Announce:
        """The next announcement that is so."""
        looked = len(self.said)
        while True:
            self.heard.clear()
            await self.eventually(self.heard.is_set)
            for announcement in self.said[looked:]:  # of several engines
                if ready(announcement):
                    return announcement
            looked = len(self.said)

    async def holds(self, policy: PolicyRef) -> Announce:
        return await self.until(lambda announcement: announcement.policy == policy.label)

    async def eventually(self, ready: Callable[[], object]) -> None:
        async with asyncio.timeout(HANG_S):
            while not ready():
                assert self._work is not None
                assert not self._work.done(), self._work.exception()
                await asyncio.sleep(0.005)

    async def _start(self, _spec: Any, env: NodeEnv, _http: Any, *, bare: bool, gpus: str) -> Server:
        self.boots.append(boot := Boot(self, env.node, gpus, bare=bare))
        await self.comes_up.wait()
        await self.on_start(boot)
        return cast("Server", boot)


class Gateway:
    """Stands in for the gateway, towards the machine's engines."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    async def announce(self, member: str, said: Announce, _changed: asyncio.Event) -> AnnounceReply:
        self.machine.said.append(said)
        self.machine.members[member] = said
        self.machine.heard.set()
        await asyncio.sleep(0.01)
        return AnnounceReply(drain=True) if said.draining else AnnounceReply(self.machine.wanted)

    async def report_stage(self, stage: Stage) -> PolicyRef:
        self.machine.stages.append(stage)
        return self.machine.wanted

    async def drain(self, _member: str) -> None:
        pass

    async def leave(self, member: str, _boot_id: str) -> None:
        self.machine.left.append(member)
        self.machine.members.pop(member, None)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)
