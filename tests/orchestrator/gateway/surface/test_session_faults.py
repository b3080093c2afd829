"""Sessions under random losses of nodes, gateways, machines and trainers: their rows are those of a quiet run."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.serving.wire import CHAT, HEADER_OPENING, HEADER_REQUEST, SESSIONS
from tests.budget import HANG_S
from tests.orchestrator.gateway.surface.test_hostile_sessions import check_empty
from tests.orchestrator.gateway.surface.test_sessions import TOOL, Agent, check_branch, contents
from tests.rigs.gateway_world import Node, World
from tests.stand_ins.fake_vllm import FOREVER

NAMES = ("s0", "s1", "s2")
TURNS = 10
FAULTS = 14
EVENT_S = 0.015  # so that faults come while turns are made


class Scripted(Agent):
    """An agent whose conversation is a function of its name. Its requests survive the gateway, by their names."""

    def __init__(self, story: Story, name: str, life: int) -> None:
        super().__init__(story.world, name, opening=f"life-{life:03d}")
        self.story, self.random, self.life = story, Random(name), life
        self.asked = 0

    async def run(self) -> None:
        await self.persist("PUT", f"{SESSIONS}/{self.name}", json=self.opening)
        for number in range(TURNS):
            self.more = {"tools": [TOOL]} if self.random.random() < 0.8 else {}
            fork = list(self.messages)
            await self.turn()
            match self.random.randrange(6):
                case 0:  # asks the same again, for another answer
                    self.messages = fork
                    await self.turn()
                case 1:  # a side conversation
                    await self.ask([{"role": "user", "content": f"aside {number}"}])
                case 2:  # a rewritten history
                    self.messages[0] = {"role": "user", "content": f"in short {number}"}

    async def ask(self, messages: list[dict[str, Any]] | None = None, **more: Any) -> Any:
        self.asked += 1
        headers = {HEADER_REQUEST: f"{self.life}-{self.asked}", HEADER_OPENING: f"life-{self.life:03d}"}
        body = {"messages": messages or self.messages, **self.more, **more}
        answer = await self.persist("POST", f"{SESSIONS}/{self.name}{CHAT}", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    async def persist(self, method: str, path: str, **more: Any) -> httpx.Response:
        while True:
            world = self.story.world
            asking = asyncio.ensure_future(world.http.request(method, path, **more))
            self.story.asking.add(asking)
            try:
                await asyncio.wait([asking])
                if not asking.cancelled() and asking.exception() is None:
                    return asking.result()
            finally:
                asking.cancel()
                self.story.asking.discard(asking)
            await asyncio.sleep(0.005)


class Story:
    """A run with a trainer, a gateway and nodes."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, Random(seed)
        self.store = Store((folder / "store").as_uri())
        self.asking: set[asyncio.Future[httpx.Response]] = set()
        self.agents: list[asyncio.Task[None]] = []
        self.nodes: list[Node] = []
        self.lives = self.named = 0
        self._stack = contextlib.AsyncExitStack()

    async def begin(self) -> None:
        """A gateway begins."""
        self._stack = contextlib.AsyncExitStack()
        self.world = await self._stack.enter_async_context(World(folder=self.folder, store=self.store))
        self.world.gateway.sessions.part_s = 0.01  # turns are shorter than real ones, too
        self._writing = asyncio.ensure_future(self.world.gateway.sessions.run())
        self.nodes = []
        await self.add_node()
        await self.add_node()

    async def add_node(self) -> None:
        self.named += 1
        self.nodes.append(await self.world.node(f"n{self.named}", event_s=EVENT_S))

    async def kill(self, *, keep: int | None) -> None:
        """The gateway is killed; so many bytes of its file stay, or all but some of the last record."""
        path, world = self.folder / "turns", self.world
        await world.http.aclose()  # what it answers while it is being closed is in no record
        saved = path.read_bytes()
        self._writing.cancel()
        world.session_log.close()
        for asking in list(self.asking):
            asking.cancel()
        for task in list(world.gateway.sessions.turn_tasks):
            task.cancel()
        await self._stack.aclose()
        if keep == 0:
            path.unlink()
        else:
            path.write_bytes(saved[:keep] if keep is not None else saved + self.random.randbytes(3))
        await self.begin()

    def train(self) -> None:
        """A trainer begins: its agents are new."""
        for agent in self.agents:
            agent.cancel()
        self.lives += 1
        self.agents = [asyncio.ensure_future(Scripted(self, name, self.lives).run()) for name in NAMES]

    async def fault(self) -> None:
        match self.random.randrange(7):
            case 0:
                await self.kill(keep=None)
            case 1:
                size = (self.folder / "turns").stat().st_size
                await self.kill(keep=self.random.randrange(1, max(2, size)))  # it may be empty still
                self.train()
            case 2:
                await self.kill(keep=0)
                self.train()
            case 3:
                self.train()
            case 4:
                node = self.nodes.pop(self.random.randrange(len(self.nodes)))
                node.lose()
                await self.add_node()
            case 5:
                node = self.random.choice(self.nodes)
                node.change(stalls=self.random.randrange(8))
                await asyncio.sleep(0.02)
                node.change(stalls=FOREVER)
            case 6:
                for asking in self.random.sample(sorted(self.asking, key=id), len(self.asking) // 2):
                    asking.cancel()
        if self.random.random() < 0.5:
            await self.world.session_log.flush()

    async def end(self) -> list[Any]:
        """What is trained on, once all agents are done; nothing else is left."""
        await asyncio.gather(*self.agents)
        rows = []
        for name in NAMES:
            trace = await Agent(self.world, name).trace()
            for branch in trace.branches:
                check_branch(branch)
            rows.append(contents(trace))
            assert (await self.world.http.delete(f"{SESSIONS}/{name}")).status_code == 204
        await self.world.until(lambda: not self.world.gateway.sessions.turn_tasks)
        await asyncio.sleep(0)
        check_empty(self.world)
        await self.world.session_log.flush()
        assert self.store.entries(layout.SESSIONS) == []
        self._writing.cancel()
        await self._stack.aclose()
        return rows


@pytest.mark.parametrize("seed", range(6))
async def test_sessions_are_the_same_after_any_losses(tmp_path: Path, seed: int) -> None:
    async with asyncio.timeout(HANG_S):
        quiet = Story(tmp_path / "quiet", seed)
        quiet.folder.mkdir()
        await quiet.begin()
        quiet.train()
        expected = await quiet.end()
        story = Story(tmp_path / "story", seed)
        story.folder.mkdir()
        await story.begin()
        story.train()
        for _ in range(FAULTS):
            await asyncio.sleep(story.random.random() * 0.15)
            await story.fault()
        assert await story.end() == expected
