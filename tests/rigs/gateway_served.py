"""A whole gateway on its own port and stand-in nodes, all on one event loop, and a client for it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from orchestrator.gateway.__main__ import listen
from orchestrator.gateway.routing.members import Members
from orchestrator.gateway.routing.watch import Watch
from orchestrator.gateway.surface.app import Gateway
from orchestrator.gateway.surface.listener import HEAD_S, listening
from policies.serving.wire import PolicyRef
from tests.budget import HANG_S
from tests.stand_ins.gateway_world import Node, World

TOKEN = "secret"
T = TypeVar("T")


class Served(World):
    """The gateway as its clients find it. `http` has the token."""

    def __init__(self, gateway: Gateway, sock: socket.socket, http: httpx.AsyncClient) -> None:
        self.gateway = gateway
        self.loop = asyncio.get_running_loop()
        self.port: int = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = http
        self.nodes = []

    @property
    def members(self) -> Members:  # type: ignore[override]
        return self.gateway.members


def serve(
    story: Callable[[Served], Coroutine[Any, Any, T]],
    *,
    head_s: float = HEAD_S,
    policy: str = "0-0",
    limit_s: float = HANG_S,
) -> T:
    """Run the story beside a gateway that wants the policy, if it is one, for `limit_s` at most."""

    async def both() -> T:
        gateway, sock = Gateway("boot-of-gateway", TOKEN), listen("127.0.0.1", None)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        base = f"http://127.0.0.1:{sock.getsockname()[1]}"
        async with (
            listening(gateway.app(), gateway.knows, sock, None, head_s),
            httpx.AsyncClient(headers=headers, base_url=base, timeout=HANG_S, trust_env=False) as http,
        ):
            served = Served(gateway, sock, http)
            if policy:
                gateway.members.want(PolicyRef(policy, f"policies/{policy}"))
            watching = asyncio.ensure_future(Watch(gateway.members).run())
            try:
                async with asyncio.timeout(limit_s):
                    got = await story(served)
                assert not watching.done()
                return got
            finally:
                watching.cancel()
                for node in served.nodes:
                    node.announcing.cancel()
                    node.kill()
                await gateway.members.close()

    return asyncio.run(both())


async def two_nodes(served: Served) -> tuple[Node, Node]:
    return await served.node("a"), await served.node("b")


class Stream:
    """An answer's events as they come."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.chunks: list[dict[str, Any]] = []
        self.done = False
        self._lines = response.aiter_lines()

    async def read(self, enough: int | None = None) -> None:
        """Until the choices have so many tokens in all, or to the end."""
        while not self.done and (enough is None or self.tokens() < enough):
            line = await anext(self._lines, None)
            if line is None:
                return
            if line == "data: [DONE]":
                self.done = True
            elif line:
                self.chunks.append(json.loads(line.removeprefix("data: ")))

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        return [one for chunk in self.chunks for one in chunk.get("choices", ()) if one["index"] == index]

    def token_ids(self, index: int = 0) -> list[int]:
        return [token for one in self.choices(index) for token in one["token_ids"]]

    def text(self, index: int = 0) -> str:
        return "".join(one["text"] if "text" in one else one["delta"]["content"] for one in self.choices(index))

    def tokens(self) -> int:
        return sum(len(one["token_ids"]) for chunk in self.chunks for one in chunk.get("choices", ()))


@asynccontextmanager
async def stream(served: Served, path: str, **body: Any) -> AsyncIterator[Stream]:
    whole = {"stream": True, "return_token_ids": True, **body}
    async with served.http.stream("POST", path, json=whole) as response:
        assert response.status_code == 200, await response.aread()
        yield Stream(response)


async def numbers(served: Served) -> dict[str, float]:
    """Every sample, by its name and its labels' values in the order of their names."""
    response = await served.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(response.text):
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(value for _, value in sorted(sample.labels.items()))
            found[f"{sample.name.removeprefix('grpo_gateway_')}{{{labels}}}"] = sample.value
    return found
