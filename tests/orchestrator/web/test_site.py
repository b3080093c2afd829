"""The run page over HTTP, on a run in memory: who is let in, what is told, and that all of it is text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer

from grpo_orch.orchestrator import web as web_page
from grpo_orch.orchestrator.control.observe import FRESH_S
from grpo_orch.orchestrator.web.app import HEADERS, PAGES, Site
from grpo_orch.orchestrator.web.run_watch import LATEST_S, Watch
from grpo_orch.policies.model.events import (
    BudgetReached,
    BuyingStopped,
    NodeMoved,
    NodeRequested,
    PitfallFound,
    RunMoved,
    StoreSlowed,
)
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Role, RunPhase
from tests.budget import HANG_S
from tests.generators.views_world import World

Client = TestClient[web.Request, web.Application]
HOSTILE = "<script>alert(1)</script>\x1b[2J\u202egpj.exe\u2066" + "x" * 100_000


def run_of(steps: int = 12) -> World:
    world = World()
    world.starts()
    for step in range(1, steps + 1):
        world.logs(10 + 2 * step, step, reward=step / steps, kl=0.01 * step)
    world.beats(12 + 2 * steps, steps)
    return world


def browse(world: World, story: Callable[[Client], Awaitable[None]]) -> None:
    async def go() -> None:
        site = Site(Watch(world.store))
        async with TestClient(TestServer(site.app())) as client:
            await asyncio.wait_for(story(client), HANG_S)

    asyncio.run(go())


def visit(world: World, *paths: str, status: int = 200) -> list[str]:
    """What stands on these pages."""
    found: list[str] = []

    async def story(client: Client) -> None:
        for path in paths:
            answer = await client.get(path)
            found.append(await answer.text())
            assert answer.status == status, (path, found[-1])

    browse(world, story)
    return found


def ask(world: World, *paths: str) -> list[Any]:
    """The same as programs have it."""
    return [json.loads(text) for text in visit(world, *paths)]


def check_headers(answer: ClientResponse) -> None:
    for name, value in HEADERS.items():
        assert answer.headers[name] == value
    assert "Server" not in answer.headers


def test_every_page_is_drawn_and_has_the_same_as_json() -> None:
    async def story(client: Client) -> None:
        for page in PAGES:
            if page.template is not None and "{" not in page.path:
                drawn = await client.get(page.path)
                assert drawn.status == 200, await drawn.text()
                assert drawn.content_type == "text/html"
                check_headers(drawn)
            told = await client.get(page.path, params={"format": "json"})
            assert isinstance(await told.json(), dict)
            check_headers(told)

    browse(run_of(), story)


def test_page_head_shows_problems_and_wanted_nodes() -> None:
    world = run_of()
    for number in range(2, 6):
        world.asks_for(37, f"rollout-{number}-i1")
        world.moves(38, f"rollout-{number}-i1", NodePhase.REFUSED)
    node = "rollout-6-i1"
    world.happens(
        39,
        NodeRequested(node, Role.ROLLOUT, "rollout-6", 1, Market.ON_DEMAND, "stands in"),
        NodeMoved(node, NodePhase.BOOTING, "it is there"),
        NodeMoved(node, NodePhase.SERVING, "it is in the membership"),
    )
    world.happens(40, BuyingStopped("rollout on spot", HOSTILE), StoreSlowed(9, 3))

    (drawn,) = visit(world, "/checkpoints")
    # Its run.yaml wants one, whatever places there are.
    assert '<dt>rollout nodes</dt><dd>3</dd><dd class="below">of 1, 1 on demand</dd>' in drawn
    assert "not bought: rollout on spot, next test machine in 0 s: &lt;script&gt;" in drawn
    assert "The store is slow: " in drawn
    assert len(drawn) < 20_000


def test_head_of_waiting_run_shows_how_to_continue() -> None:
    world = run_of()
    why = "12.00 of `budget.usd` 12 are spent"
    world.happens(40, BudgetReached(12.0, why), RunMoved(RunPhase.STOPPING, why))
    world.happens(41, RunMoved(RunPhase.PAUSED, why))
    told = f"{why}; continue with: grpo-orch resume --budget-usd NUMBER {world.store.url}"
    assert told in visit(world, "/")[0]


def test_foreign_text_is_escaped() -> None:
    world = run_of()
    world.happens(40, PitfallFound("reward_hacking", 12, HOSTILE))
    (drawn,) = visit(world, "/")
    assert "<script>alert" not in drawn
    assert "&lt;script&gt;alert(1)&lt;/script&gt;‹U+001B›[2J‹U+202E›gpj.exe‹U+2066›" in drawn
    assert "more characters" in drawn
    assert len(drawn) < 50_000
    assert not set("\x1b\u202e\u2066") & set(drawn)


def test_nothing_can_be_changed_and_no_other_name_is_answered() -> None:
    async def story(client: Client) -> None:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert (await client.request(method, "/")).status == 405
        for host in ("evil.example", "127.0.0.1.evil.example:8642", "", "localhost.evil.example"):
            refused = await client.get("/", headers={"Host": host})
            assert refused.status == 421, host
            check_headers(refused)
        for host in ("127.0.0.1:1", "localhost", "[::1]:8642", "LOCALHOST:80"):
            assert (await client.get("/", headers={"Host": host})).status == 200, host
        missing = await client.get("/nothing/is/here")
        assert missing.status == 404
        check_headers(missing)
        assert (await client.get("/static/../app.py")).status == 404
        assert (await client.get("/?format=xml")).status == 400

    browse(run_of(), story)


def test_open_page_learns_of_news(monkeypatch: pytest.MonkeyPatch) -> None:
    world = run_of()
    monkeypatch.setattr(Watch, "pace_s", 0.0)

    async def story(client: Client) -> None:
        async def number() -> int:
            return int((await (await client.get("/live")).json())["number"])

        first = await number()
        assert f'data-observation="{first}"' in await (await client.get("/")).text()
        assert await number() == first
        world.logs(60, 13, reward=0.5)
        assert await number() > first
        told = await (await client.get("/?format=json")).json()
        assert told["run"]["recent"][-1]["step"] == 13

    browse(world, story)


def test_failed_look_is_shown_and_the_next_one_replaces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that one page cannot work with must not leave every page as it was for good."""
    world = run_of()
    monkeypatch.setattr(Watch, "pace_s", 0.0)

    async def story(client: Client) -> None:
        with monkeypatch.context() as broken:
            broken.setattr(Watch, "observation", lambda _: 1 // 0)
            assert "ZeroDivisionError" in await (await client.get("/")).text()
            failed = await (await client.get("/live")).json()
        assert "ZeroDivisionError" not in await (await client.get("/")).text()
        assert await (await client.get("/live")).json() != failed

    browse(world, story)


def test_gateway_next_to_slow_steps_is_not_silent() -> None:
    """A page asks every 2 s, and what the gateway wrote was written after the observation before."""
    assert "EVERY_MS = 2000" in (Path(web_page.__file__).parent / "static" / "live.js").read_text()
    assert LATEST_S + 2 < FRESH_S
