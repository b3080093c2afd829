"""A stand-in for a rollout node: `python -m tests.fake_vllm`, vLLM and its agent in one small process.

It answers `/v1/completions` with vLLM's events, from a function of seed, prompt and position, checks boot and
policy as `tasks.vllm_guard` does, and announces itself to the gateway as `tasks.rollout` does. Its "weights" are a
version's name, and like a real node it starts on base weights. Every request it gets is noted in a file.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from checkpoint import documents
from checkpoint.store import Store
from policies.wire import HEADER_BOOT, HEADER_POLICY, Announce, AnnounceReply

STREAM_INTERVAL = 4
# How a stream may end after its first event without being complete.
BREAKS = {
    "nothing": b"",
    "done": b"data: [DONE]\n\n",
    "abort": b'data: {"choices": [{"index": 0, "token_ids": [], "finish_reason": "abort"}]}\n\ndata: [DONE]\n\n',
    "error": b'data: {"error": {"message": "engine died", "code": 500}}\n\ndata: [DONE]\n\n',
    "nonsense": b"data: {\n\n",
    "no-logprobs": b'data: {"choices": [{"index": 0, "token_ids": [1], "finish_reason": "stop"}]}\n\n',
}


def token_at(seed: int, prompt: list[int], position: int) -> tuple[int, float]:
    """The token and log-probability at one position: what any stand-in gives for this seed and prompt."""
    words = json.dumps([seed, prompt, position]).encode()
    number = int.from_bytes(hashlib.blake2b(words, digest_size=4).digest(), "big")
    return number % 50_000, -(number % 1000) / 1000


def expected(seed: int, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
    """A whole completion as a stand-in gives it."""
    pairs = [token_at(seed, prompt, position) for position in range(max_tokens)]
    return [token for token, _ in pairs], [logprob for _, logprob in pairs]


class FakeNode:
    """One node's state and handlers."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.boot_id = secrets.token_hex(4)
        self.policy: str | None = None
        self.token = os.environ["GRPO_ORCH_TOKEN"]
        self.store = Store(os.environ["GRPO_ORCH_RUN"])
        self.address = ""
        self.running = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        asked = (request.headers.get(HEADER_BOOT), request.headers.get(HEADER_POLICY))
        status = self.options.status or (200 if asked == (self.boot_id, self.policy) else 409)
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            status = 401
        self.running += status == 200
        self.note(status, body["seed"], asked)
        if status != 200:
            return web.json_response(
                {"error": {"message": "refused by the stand-in", "code": status}}, status=status
            )
        try:
            response = await self.stream(request, body, asked[1])
        finally:
            self.running -= 1
        if not self.options.breaks:  # counted out before: the gateway may send the next when it reads this
            await response.write(b"data: [DONE]\n\n")
        return response

    async def stream(self, request: web.Request, body: dict[str, Any], policy: str | None) -> web.StreamResponse:
        """Every event of the answer but the one that says that it is whole."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events(body):
            await asyncio.sleep(self.options.event_s)
            if policy != self.policy:
                event = {"error": {"message": "other weights now", "code": 409}}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if self.options.breaks:
                await response.write(BREAKS[self.options.breaks])
                break
        return response

    def note(self, status: int, seed: int, asked: tuple[str | None, str | None]) -> None:
        line = {"status": status, "seed": seed, "boot": asked[0], "policy": asked[1], "held": self.policy}
        line["running"] = self.running
        with Path(self.options.seen).open("a") as out:
            out.write(json.dumps(line) + "\n")

    async def announce_for_ever(self) -> None:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {self.token}"}) as session:
            while True:
                try:
                    await self.announce(session)
                except (aiohttp.ClientError, OSError):
                    await asyncio.sleep(0.05)

    async def announce(self, session: aiohttp.ClientSession) -> None:
        gateway = documents.read_gateway(self.store)
        assert gateway is not None
        said = Announce(self.boot_id, self.address, self.policy, self.options.max_requests)
        url = f"{gateway.url}/members/{self.options.node}"
        async with session.post(url, data=msgspec.json.encode(said)) as response:
            response.raise_for_status()
            reply = msgspec.json.decode(await response.read(), type=AnnounceReply)
        if reply.policy is not None and reply.policy.version != self.policy and not self.options.never_load:
            self.policy = reply.policy.version
        if reply.drain:
            async with session.delete(url, params={"boot": self.boot_id}):
                raise SystemExit(0)


def events(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """vLLM's events for one request: the first token alone, then STREAM_INTERVAL at a time."""
    count = body["max_tokens"]
    tokens, logprobs = expected(body["seed"], body["prompt"], count)
    cuts = [0, *range(1, count, STREAM_INTERVAL), count]
    for start, end in pairwise(cuts):
        yield {
            "id": "cmpl-0",
            "choices": [
                {
                    "index": 0,
                    "text": "",
                    "logprobs": {"token_logprobs": logprobs[start:end], "tokens": []},
                    "finish_reason": "length" if end == count else None,
                    "token_ids": tokens[start:end],
                }
            ],
        }


async def serve(options: argparse.Namespace) -> None:
    node = FakeNode(options)
    app = web.Application()
    app.add_routes([web.post("/v1/completions", node.complete)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", options.port, reuse_address=True).start()
    node.address = f"127.0.0.1:{runner.addresses[0][1]}"
    await node.announce_for_ever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", required=True)
    parser.add_argument("--seen", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--event-s", type=float, default=0.0)
    parser.add_argument("--max-requests", type=int, default=256)
    parser.add_argument("--never-load", action="store_true")
    parser.add_argument("--breaks", choices=BREAKS, help="end every stream early, in this way")
    parser.add_argument("--status", type=int, default=0, help="answer this to every request")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
