"""Sessions from the trainer's order to what was recorded, through gateways that come and go."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

import grpo_orch.tasks.agents.runner
import grpo_orch.tasks.agents.session_client
from grpo_orch.checkpoint.records.rollouts import Session
from grpo_orch.policies.serving.wire import TURNS_AT_ONCE_MAX, OpenSession
from grpo_orch.tasks.agents.processes import AgentHost
from grpo_orch.tasks.agents.runner import AgentRunner
from grpo_orch.tasks.agents.session_client import Forwarder, SessionClient
from grpo_orch.tasks.completions.gateway_client import Generated, GenerationFailed
from tests.tasks.agents.rig import (
    BY,
    POLICY,
    RETRY_S,
    TOKEN,
    HttpGateway,
    batch_of,
    request_of,
    runner_of,
    serving,
)

CHAT = "/v1/chat/completions"


@pytest.fixture
def runners() -> Iterator[list[AgentRunner]]:
    made: list[AgentRunner] = []
    yield made
    for runner in made:
        runner.close()


def started(runners: list[AgentRunner], gateway: HttpGateway, agent: str, **limits: Any) -> AgentRunner:
    runners.append(runner_of(gateway, agent, **limits))
    return runners[-1]


async def complete(runner: AgentRunner, rows: list[dict[str, Any]], **batch: Any) -> list[Session]:
    await asyncio.to_thread(runner.start)
    got: Generated = await asyncio.to_thread(runner.complete, batch_of(rows, **batch))
    found: list[Any] = list(got.completions)
    return found


async def test_sessions_return_in_order_with_their_records(runners: list[AgentRunner], tmp_path: Path) -> None:
    async with serving(tmp_path) as gateway:
        found = await complete(started(runners, gateway, "answers"), [{"prompt": f"p{n}"} for n in range(12)])
    assert [session.index for session in found] == list(range(12))
    for session in found:
        [branch] = session.branches
        assert session.reward == 0.8
        assert not session.failed
        assert len(branch.turns) == 2
        assert sum(branch.mask) == session.tokens == 16
        assert branch.messages[0]["content"] == f"p{session.index}"
    assert {seed for _, seed in gateway.sessions.opened} == {100 + n for n in range(12)}
    assert TOKEN.encode() not in b"".join(gateway.bodies)


async def test_gateway_that_dies_is_a_pause_to_agents(runners: list[AgentRunner], tmp_path: Path) -> None:
    """It breaks off an answer that it has recorded, answers 502 to 504, and comes back at another address."""
    async with serving(tmp_path / "calm") as gateway:
        calm = await complete(started(runners, gateway, "answers"), [{"prompt": f"p{n}"} for n in range(4)])
    async with serving(tmp_path / "faulty") as gateway:
        left = [502, 503, 504, "cut", "away", "cut", 503]
        back: list[asyncio.Future[None]] = []

        async def fails(request: web.Request) -> web.StreamResponse | None:
            if not left or not request.path.endswith(CHAT):
                return None
            fault = left.pop()
            if isinstance(fault, int):
                return web.Response(status=fault)
            body, name = await request.read(), request_of(request)
            gateway.sessions.answer(request.method, request.path, body, name)  # recorded, and lost
            if fault == "away":
                back.append(asyncio.ensure_future(reopened()))
                await asyncio.sleep(10)
            response = web.StreamResponse(headers={"Content-Length": "100"})
            await response.prepare(request)
            await response.write(b"{")
            assert request.transport is not None
            request.transport.abort()
            return response

        async def reopened() -> None:
            await gateway.close()
            await asyncio.sleep(0.2)
            await gateway.open()

        gateway.before = fails
        found = await complete(started(runners, gateway, "answers"), [{"prompt": f"p{n}"} for n in range(4)])
        assert not left
        await asyncio.gather(*back)
    assert found == calm


async def test_forgotten_session_is_run_again(runners: list[AgentRunner], tmp_path: Path) -> None:
    async with serving(tmp_path) as gateway:
        left = ["POST", "GET"]

        def forgets(request: web.Request) -> None:
            if left and request.method == left[0]:
                left.pop(0)
                gateway.sessions.recorded.clear()

        gateway.before = forgets
        [found] = await complete(started(runners, gateway, "answers"), [{"prompt": "p"}])
        assert not left
    assert len(found.branches[0].turns) == 2
    assert found.reward == 0.8
    assert len(gateway.sessions.opened) == 3


async def test_session_that_another_call_opens_is_run_again(runners: list[AgentRunner], tmp_path: Path) -> None:
    """A dropped call that was begun ahead still runs, with the session names of the call that replaces it."""
    async with serving(tmp_path) as gateway:
        runner = started(runners, gateway, "answers")
        other = SessionClient(gateway.store, TOKEN, BY, RETRY_S)

        async def opens(request: web.Request) -> web.Response | None:
            if not request.path.endswith(CHAT):
                return None
            gateway.before = lambda _: None
            answer = gateway.sessions.answer("POST", request.path, await request.read(), request_of(request))
            session = request.path.split("/")[2]
            await other.open(session, OpenSession(POLICY, 100))
            return web.Response(body=answer[2], headers={"Content-Type": answer[1]})

        gateway.before = opens
        [found] = await complete(runner, [{"prompt": "p"}])
        await other.close()
    assert (len(found.branches[0].turns), found.reward, found.failed) == (2, 0.8, "")
    assert len(gateway.sessions.opened) == 3


async def test_clock_that_is_set_back_orders_openings_no_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as gateway:
        client = SessionClient(gateway.store, TOKEN, BY, RETRY_S)
        before = await client.open("s", OpenSession(POLICY, 100))
        now_ns = time.time_ns()
        monkeypatch.setattr(time, "time_ns", lambda: now_ns - 10**12)
        after = await client.open("s", OpenSession(POLICY, 100))
        await client.close()
    assert before < after


async def test_time_of_the_model_does_not_count(runners: list[AgentRunner], tmp_path: Path) -> None:
    async with serving(tmp_path) as gateway:

        async def slow(request: web.Request) -> None:
            await asyncio.sleep(2.5 if request.path.endswith(CHAT) else 0.0)

        gateway.before = slow
        [found] = await complete(started(runners, gateway, "answers", time_s=2.0), [{"prompt": "p"}])
        assert not found.failed
        began_s = time.monotonic()
        row = {"prompt": "p", "folder": str(tmp_path)}
        [hung] = await complete(started(runners, gateway, "hangs", time_s=1.0), [row])
    assert hung.failed == "it took longer than 1 s of its own (trainer.agent.time_s)"
    assert hung.reward is None
    assert time.monotonic() - began_s > 1.0


async def test_incomplete_request_counts_as_the_agents_time(runners: list[AgentRunner], tmp_path: Path) -> None:
    async with serving(tmp_path) as gateway:
        [found] = await complete(started(runners, gateway, "withholds_body", time_s=2.0), [{"prompt": "p"}])
    assert found.failed == "it took longer than 2 s of its own (trainer.agent.time_s)"
    assert found.is_cut


@pytest.mark.parametrize("more", [{}, {"model": "gpt-17"}])
async def test_agent_that_requests_forever_uses_up_its_time(
    runners: list[AgentRunner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, str]
) -> None:
    monkeypatch.setattr(grpo_orch.tasks.agents.session_client, "WITHOUT_TURN_MAX", 20)
    async with serving(tmp_path) as gateway:

        async def slow(_: web.Request) -> None:  # so that one of them is always open
            await asyncio.sleep(0.2)

        gateway.before = slow
        runner = started(runners, gateway, "asks_for_ever", time_s=2.0, turns=3)
        [found] = await complete(runner, [{"prompt": "p", "more": more}])
    assert found.failed.startswith("it took longer than 2 s of its own")
    assert len(gateway.asked) < 60


async def test_session_is_cut_at_its_own_limits_alone(runners: list[AgentRunner], tmp_path: Path) -> None:
    async with serving(tmp_path) as gateway:
        for agent, limits, is_cut in (
            ("one_token", {}, False),
            ("one_token", {"turns": 2}, False),
            ("one_token", {"turns": 1}, True),
            ("one_token", {"tokens": 1}, True),
            ("answers", {"tokens": 17}, False),
            ("answers", {"tokens": 16}, True),
        ):
            [found] = await complete(started(runners, gateway, agent, **limits), [{"prompt": f"{agent}{limits}"}])
            assert found.is_cut == is_cut, (agent, limits)


class SlowHost(AgentHost):
    def fork(self) -> socket.socket:
        time.sleep(3.0)
        return super().fork()


async def test_time_begins_with_the_agents_process(runners: list[AgentRunner], tmp_path: Path) -> None:
    async with serving(tmp_path) as gateway:
        runner = started(runners, gateway, "answers", time_s=2.0, make_host=SlowHost)
        [found] = await complete(runner, [{"prompt": "p"}])
    assert not found.failed


async def test_runner_is_closed_while_agents_wait(runners: list[AgentRunner], tmp_path: Path) -> None:
    async with serving(tmp_path) as gateway:
        asked = asyncio.Event()

        async def never(request: web.Request) -> None:
            if request.path.endswith(CHAT):
                asked.set()
                await asyncio.sleep(600)

        gateway.before = never
        runner = started(runners, gateway, "answers")
        going = asyncio.create_task(complete(runner, [{"prompt": "p"}]))
        await asked.wait()
        await asyncio.wait_for(asyncio.to_thread(runner.close), 30.0)
        with pytest.raises(asyncio.CancelledError):
            await going


async def test_thread_that_has_ended_is_named_and_closed(runners: list[AgentRunner], tmp_path: Path) -> None:
    async with serving(tmp_path) as gateway:
        runner = started(runners, gateway, "answers")
        await asyncio.to_thread(runner.start)
        runner.loop.call_soon_threadsafe(runner.loop.stop)
        with pytest.raises(GenerationFailed, match="thread"):
            await complete(runner, [{"prompt": "p"}])
        await asyncio.to_thread(runner.close)


@pytest.mark.parametrize(("limits", "says"), [({"turns": 1}, "turns_max"), ({"tokens": 8}, "tokens_max")])
async def test_agent_beyond_a_limit_gets_an_error(
    runners: list[AgentRunner], tmp_path: Path, limits: dict[str, int], says: str
) -> None:
    async with serving(tmp_path) as gateway:
        [found] = await complete(started(runners, gateway, "answers", **limits), [{"prompt": "p"}])
    assert found.failed.startswith("HTTPError: HTTP Error 400")
    assert found.failed.endswith(f"(beyond its limit: {says})")
    assert found.tokens == 8


async def test_silent_gateway_ends_the_call_at_its_deadline(runners: list[AgentRunner], tmp_path: Path) -> None:
    async with serving(tmp_path) as gateway:

        async def never(request: web.Request) -> None:
            await asyncio.sleep(600 if request.path.endswith(CHAT) else 0)

        gateway.before = never
        with pytest.raises(GenerationFailed, match="deadline_s"):
            await complete(started(runners, gateway, "answers"), [{"prompt": "p"}], deadline_s=1.0)


async def test_interrupted_call_ends_its_agents(runners: list[AgentRunner], tmp_path: Path) -> None:
    class Told(Exception):
        pass

    def told() -> None:
        if (tmp_path / "pids").exists():
            raise Told

    async with serving(tmp_path) as gateway:
        runner = started(runners, gateway, "hangs", check_stop=told)
        with pytest.raises(Told):
            await complete(runner, [{"prompt": "p", "folder": str(tmp_path)}])
        from tests.tasks.agents.test_processes import gone

        assert await gone(tmp_path)


# The forwarder alone.


async def test_key_of_another_session_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, forwarding(served) as (forwarder, http):
        async with forwarder.session("one", "o") as one, forwarder.session("two", "o") as two:
            for key, status in ((one.key, 401), (TOKEN, 401), ("", 401), (two.key, 404)):
                headers = {"Authorization": f"Bearer {key}"}
                async with http.post(f"{two.base_url}/chat/completions", json={}, headers=headers) as answer:
                    assert answer.status == status
        headers = {"Authorization": f"Bearer {two.key}"}
        async with http.post(f"{two.base_url}/chat/completions", json={}, headers=headers) as answer:
            assert answer.status == 401
    assert [path for _, path in served.asked] == ["/sessions/two/v1/chat/completions"]


async def test_session_that_ends_leaves_another_of_its_name(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, forwarding(served) as (forwarder, http):
        first, second = forwarder.session("one", "o"), forwarder.session("one", "o")
        await first.__aenter__()
        async with second as opened:
            await first.__aexit__(None, None, None)
            headers = {"Authorization": f"Bearer {opened.key}"}
            async with http.post(f"{opened.base_url}/chat/completions", json={}, headers=headers) as answer:
                assert answer.status == 404  # the gateway's


@pytest.mark.parametrize(
    "path",
    [
        "v1/completions",
        "../../v1/rollouts",
        "v1/../../../v1/rollouts",
        "v1%2f..%2f..%2f..%2fmembers%2fx",
        "../two",
        "",
    ],
)
async def test_agent_reaches_no_other_path_of_the_gateway(tmp_path: Path, path: str) -> None:
    async with (
        serving(tmp_path) as served,
        forwarding(served) as (forwarder, _),
        forwarder.session("one", "o") as one,
    ):
        host, port = one.base_url.removeprefix("http://").partition("/")[0].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /sessions/one/{path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {one.key}\r\n"
        writer.write(f"{head}Content-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode())
        status = (await reader.read()).split()[1]
        writer.close()
        assert status in (b"404", b"405")
        assert served.asked == []


async def test_key_in_invalid_text_is_refused(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as served,
        forwarding(served) as (forwarder, _),
        forwarder.session("one", "o") as one,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(one.base_url.split(":")[2].split("/")[0]))
        writer.write(b"GET /sessions/one/v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n")
        writer.write(b"Connection: close\r\n\r\n")
        assert (await reader.read()).split()[1] == b"401"
        writer.close()


async def test_flood_of_requests_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, forwarding(served) as (forwarder, http):
        going = asyncio.Event()

        async def held(_: web.Request) -> web.Response:
            await going.wait()
            return web.json_response({})

        served.before = held
        async with forwarder.session("one", "o") as one:
            headers = {"Authorization": f"Bearer {one.key}"}

            async def post(body: bytes = b"{}") -> int:
                url = f"{one.base_url}/chat/completions"
                async with http.post(url, data=body, headers=headers) as answer:
                    return answer.status

            many = [asyncio.create_task(post()) for _ in range(TURNS_AT_ONCE_MAX + 5)]
            refused = await asyncio.gather(*[await next_done(many) for _ in range(5)])
            assert refused == [429] * 5
            going.set()
            rest = [await task for task in many]
            assert rest.count(200) == TURNS_AT_ONCE_MAX
            assert await post(b"x" * (grpo_orch.tasks.agents.session_client.BODY_BYTES_MAX + 1)) == 413


async def test_late_answer_keeps_its_client(tmp_path: Path) -> None:
    """A client that gives up after a second without a byte gets an answer that takes longer."""
    async with serving(tmp_path) as served, forwarding(served, patient_s=0.2) as (forwarder, http):
        status = 200

        async def late(_: web.Request) -> web.Response:
            await asyncio.sleep(2.0)
            if b"stream" in served.bodies[-1]:
                return web.Response(body=b"data: {}\n\n", headers={"Content-Type": "text/event-stream"})
            return web.json_response({"late": True}, status=status)

        served.before = late
        async with forwarder.session("one", "o") as one:
            timeout = aiohttp.ClientTimeout(sock_read=1.0)
            headers = {"Authorization": f"Bearer {one.key}"}

            async def post(asked: dict[str, bool]) -> bytes:
                url = f"{one.base_url}/chat/completions"
                async with http.post(url, json=asked, headers=headers, timeout=timeout) as answer:
                    return await answer.read()

            assert json.loads(await post({})) == {"late": True}
            assert (await post({"stream": True})).endswith(b"data: {}\n\n")
            status = 400
            with pytest.raises(aiohttp.ClientError):
                await post({})


async def next_done(tasks: list[asyncio.Task[int]]) -> asyncio.Task[int]:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    first = done.pop()
    tasks.remove(first)
    return first


class forwarding:
    """A forwarder to a gateway, and a client of agents."""

    def __init__(self, served: HttpGateway, **options: float) -> None:
        self.gateway = SessionClient(served.store, TOKEN, BY, RETRY_S)
        self.forwarder = Forwarder(self.gateway, **options)

    async def __aenter__(self) -> tuple[Forwarder, aiohttp.ClientSession]:
        await self.forwarder.start()
        self.http = aiohttp.ClientSession()
        return self.forwarder, self.http

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()
        await self.forwarder.close()
        await self.gateway.close()
