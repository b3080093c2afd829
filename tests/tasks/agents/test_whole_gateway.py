"""Agents against the gateway itself, with stand-ins for nodes: what is trained on is the same after any fault."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import GatewayAddress
from grpo_orch.checkpoint.records.rollouts import Session
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.serving.wire import PolicyRef
from grpo_orch.policies.tick.snapshot import Trainer
from grpo_orch.tasks.agents.processes import AgentHost
from grpo_orch.tasks.agents.runner import AgentRunner, Limits
from grpo_orch.tasks.agents.session_client import SessionClient
from grpo_orch.tasks.storing.heartbeat import Heartbeat
from tests.rigs.gateway_world import TOKEN, World
from tests.stand_ins.fake_vllm import END
from tests.tasks.agents.rig import BY, HERE, RETRY_S, batch_of

ROWS = [{"prompt": f"p{n}"} for n in range(6)]


def runner_of(store: Store, agent: str, turns: int = 32) -> AgentRunner:
    beat = Heartbeat(store, Trainer("trainer-0", 1, 0, 0, 0, "starting", 0.0))
    host = AgentHost(f"rig_agents.{agent}", HERE)
    return AgentRunner(
        SessionClient(store, TOKEN, BY, RETRY_S), host, Limits(600.0, turns, 10_000), beat, lambda: None
    )


def announce(store: Store, world: World) -> None:
    documents.gateway((0, 1, 1)).write(store, GatewayAddress(world.url, "stand-in"))


async def complete(runner: AgentRunner, rows: list[dict[str, Any]] = ROWS) -> list[Session]:
    batch = batch_of(rows, policy=PolicyRef("0-0", "policies/0-0"), sampling={"stop_token_ids": [END]})
    await asyncio.to_thread(runner.start)
    got = await asyncio.to_thread(runner.complete, batch)
    found: list[Any] = list(got.completions)
    return found


def content(sessions: list[Session]) -> list[Any]:
    """All but where it was made."""
    return [
        (one.reward, one.failed, [(b.token_ids, b.mask, b.logprobs, b.messages) for b in one.branches])
        for one in sessions
    ]


async def calm(folder: Path, agent: str = "answers") -> list[Session]:
    store, runner = Store(f"file://{folder}/store"), None
    async with World() as world:
        await world.node("a")
        announce(store, world)
        runner = runner_of(store, agent)
        try:
            return await complete(runner)
        finally:
            await asyncio.to_thread(runner.close)


async def test_gateway_and_node_that_go_away_change_nothing(tmp_path: Path) -> None:
    expected = await calm(tmp_path / "calm")
    store = Store(f"file://{tmp_path}/store")
    runner = runner_of(store, "answers")
    try:
        async with World(folder=tmp_path) as world:
            node = await world.node("a")
            announce(store, world)
            running = asyncio.ensure_future(complete(runner))
            await world.until(lambda: len(node.asked) >= 3)
            world.silence()
            (tmp_path / "saved").write_bytes((tmp_path / "turns").read_bytes())
        (tmp_path / "saved").replace(tmp_path / "turns")  # as if it was killed
        await asyncio.sleep(0.2)
        async with World(folder=tmp_path) as world:
            node = await world.node("b")
            announce(store, world)
            await world.until(lambda: len(node.asked) >= 3)
            node.lose()
            await asyncio.sleep(0.1)
            await world.node("c")
            found = await running
    finally:
        await asyncio.to_thread(runner.close)
    assert content(found) == content(expected)


async def test_restarted_trainer_gets_recorded_turns(tmp_path: Path) -> None:
    expected = await calm(tmp_path / "calm")
    store = Store(f"file://{tmp_path}/store")
    async with World() as world:
        node = await world.node("a")
        announce(store, world)
        for _ in range(2):
            runner = runner_of(store, "answers")
            found = await complete(runner)
            await asyncio.to_thread(runner.close)
            assert content(found) == content(expected)
        assert len(node.asked) == 2 * len(ROWS), "a turn was made twice"


async def test_model_of_another_name_costs_the_session_alone(tmp_path: Path) -> None:
    [found, *_] = await calm(tmp_path, "misnames")
    assert found.failed.startswith("HTTPError: HTTP Error 404")
    assert found.branches == []
