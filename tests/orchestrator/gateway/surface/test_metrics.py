"""The gateway's numbers for Prometheus: right after a hand-over, and free on the hot path."""

from __future__ import annotations

import asyncio
from typing import Any

from grpo_orch.policies.serving.wire import CHAT
from tests.rigs.gateway_world import World
from tests.stand_ins.fake_vllm import completion, prompt_of

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "seed": 6, "max_tokens": 40}
PROMPT = prompt_of(BODY)


async def test_members_are_counted_by_state_and_policy(world: World) -> None:
    await world.node("a"), await world.node("b")
    await world.node("old", policy="0-3")
    leaving = await world.node("leaving")
    world.members.places.link(leaving.row)
    leaving.row.running = 1  # so it stays
    world.members.drain("leaving")
    found = await world.numbers()
    assert found["members{0-0,serving}"] == 2
    assert found["members{0-3,behind}"] == 1
    assert found["members{0-0,draining}"] == 1
    assert found["requests_running{}"] == 1
    assert found["membership_changes_total{}"] >= 5


async def test_handover_is_counted_with_saved_and_replayed_tokens(world: World) -> None:
    tokens, _, _ = completion(BODY, PROMPT)
    a = await world.node("a", stalls=9)
    asking = asyncio.ensure_future(world.http.post(CHAT, json=BODY))
    await world.until(lambda: a.stalled)
    await world.node("b")
    a.kill()
    await asking
    found = await world.numbers()
    assert found["handovers_total{lost}"] >= 1
    assert found["tokens_saved_total{}"] == 9
    assert found["tokens_replayed_total{}"] == len(PROMPT) + 9
    assert found["tokens_delivered_total{}"] == len(tokens)
    assert found["tokens_discarded_total{}"] == 0
    assert found["requests_total{finished}"] == 1
    assert found["requests_running{}"] == found["requests_waiting{}"] == found["waiting_bytes{}"] == 0
    for name in ("first_token", "token", "request"):
        assert found[f"{name}_seconds_count{{}}"] == 1
    assert found["first_token_seconds_sum{}"] <= found["request_seconds_sum{}"]
    assert found["http_answers_total{/v1/chat/completions,200}"] == 1


async def test_waiting_and_refused_requests_are_counted(world: World) -> None:
    await world.node("other", policy="0-3")
    asking = asyncio.ensure_future(world.http.post(CHAT, json=BODY))
    await world.until(lambda: world.members.places.waiting.count == 1)
    found = await world.numbers()
    assert (found["requests_waiting{}"], found["waiting_bytes{}"]) == (1, len(PROMPT) * 8)
    asking.cancel()
    await world.until(lambda: world.members.places.waiting.count == 0)
    assert (await world.http.post(CHAT, json={})).status_code == 400
    assert (await world.http.get("/nowhere")).status_code == 404
    assert (await world.http.get("/metrics", headers={"Authorization": "Bearer no"})).status_code == 401
    found = await world.numbers()
    assert found["http_answers_total{/v1/chat/completions,400}"] == 1
    assert found["http_answers_total{unknown,404}"] == 1
    assert found["http_answers_total{unknown,401}"] == 1
    assert found["waiting_bytes{}"] == 0
