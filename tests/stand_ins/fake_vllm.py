"""A stand-in for a rollout node: `python -m tests.stand_ins.fake_vllm`, vLLM and its agent in one small process.

It answers `/v1/completions` and `/v1/chat/completions` with vLLM's events, checks boot and policy as
`tasks.rollout.vllm.guard` does, and announces itself to the gateway as `tasks.rollout.agent` does. Each token is a
function of the seed and of every token before it, so that a completion which is continued elsewhere equals the
undisturbed one, and one that is continued wrongly does not. Its "weights" are a version's name, and like a real
node it starts on base weights. Every request it gets is noted in a file.
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

from checkpoint.records import documents
from checkpoint.security import identity
from checkpoint.store.run_store import Store
from policies.serving.wire import HEADER_BOOT, HEADER_POLICY, Announce, AnnounceReply

STREAM_INTERVAL = 4
VOCABULARY = 1000
CONTEXT = 4096  # tokens of prompt and answer together
UNEQUAL = 20
# How a stream may end after its first event without being complete.
BREAKS = {
    "nothing": b"",
    "done": b"data: [DONE]\n\n",
    "abort": b'data: {"choices": [{"index": 0, "token_ids": [], "finish_reason": "abort"}]}\n\ndata: [DONE]\n\n',
    "error": b'data: {"error": {"message": "engine died", "code": 500}}\n\ndata: [DONE]\n\n',
    "nonsense": b"data: {\n\n",
    "deep": b'data: {"choices": [], "x": ' + b"[" * 50_000 + b"\n\n",
    "no-token": b'data: {"choices": [{"token_ids": [-1], "logprobs": {"token_logprobs": [0.0]}}]}\n\n',
    "no-logprobs": b'data: {"choices": [{"index": 0, "token_ids": [1], "finish_reason": "stop"}]}\n\n',
    "too-many": b'data: {"choices": [{"token_ids": %a, "logprobs": {"token_logprobs": %a}}]}\n\n'
    % ([7] * 999, [-1.0] * 999),
}


def completion(body: dict[str, Any], prompt: list[int], unequal: str = "") -> tuple[list[int], list[float], str]:
    """The tokens, their log-probabilities and the finish reason that any stand-in gives for this request.

    One that computes `unequal` last bits gives a neighbouring token one time in UNEQUAL, others than a stand-in
    of another such name, and other last bits of each log-probability.
    """
    digest = hashlib.blake2b(str(body["seed"]).encode(), digest_size=4)
    for token in prompt:
        digest.update(token.to_bytes(4, "big"))
    # Like vLLM's, this penalty knows of no token but those of this request's own answer.
    own = hashlib.blake2b(digest_size=4) if body.get("presence_penalty") else None
    tokens: list[int] = []
    logprobs: list[float] = []
    stops = set(body.get("stop_token_ids") or [])
    limit = body.get("max_tokens")
    while len(tokens) < (CONTEXT - len(prompt) if limit is None else limit):
        number = int.from_bytes(digest.copy().digest(), "big")
        if own is not None:
            number += int.from_bytes(own.copy().digest(), "big")
        token, ulps = number % VOCABULARY, 0
        if unequal:
            ulps = int.from_bytes(hashlib.blake2b(unequal.encode() + digest.digest()).digest()[:4], "big")
            token = (token + (ulps % UNEQUAL == 0)) % VOCABULARY
        while len(tokens) < body.get("min_tokens", 0) and token in stops:
            token = (token + 1) % VOCABULARY
        tokens.append(token)
        logprobs.append(-(number % 1009) / 1009 * (1 + (ulps % 7) * 1e-7))
        digest.update(token.to_bytes(4, "big"))
        if own is not None:
            own.update(token.to_bytes(4, "big"))
        if token in stops:
            return tokens, logprobs, "stop"
    return tokens, logprobs, "length"


def expected(seed: int, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
    """A whole completion as a stand-in gives it."""
    tokens, logprobs, _ = completion({"seed": seed, "max_tokens": max_tokens}, prompt)
    return tokens, logprobs


def texts(tokens: list[int]) -> list[str]:
    """The text that each token shows. One token in ten is the first half of a character: it shows nothing, and the
    next one both."""
    shown, half = [], ""
    for number, token in enumerate(tokens):
        half += f"{token:03d} "
        begins = token % 10 == 0 and number < len(tokens) - 1
        shown.append("" if begins else half)
        half = half if begins else ""
    return shown


def prompt_of(body: dict[str, Any]) -> list[int]:
    """The token ids of the prompt or of the messages."""
    prompt = body.get("prompt", json.dumps(body.get("messages")))
    return list(prompt.encode()) if isinstance(prompt, str) else prompt


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

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if request.headers.get("Authorization") == f"Bearer {self.token}" else 401)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        asked = (request.headers.get(HEADER_BOOT), request.headers.get(HEADER_POLICY))
        status = self.options.status or (200 if asked == (self.boot_id, self.policy) else 409)
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            status = 401
        self.running += status == 200
        self.note(status, body, asked)
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
        for number, event in enumerate(chat_events(body) if "messages" in body else events(body)):
            if number:
                await self.may_go_on(request)
            await asyncio.sleep(self.options.event_s)
            if policy != self.policy:
                event = {"error": {"message": "other weights now", "code": 409}}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if self.options.breaks:
                await response.write(BREAKS[self.options.breaks])
                break
        return response

    async def may_go_on(self, request: web.Request) -> None:
        """Wait for the file `--until`, or for the gateway to leave."""
        while self.options.until and not Path(self.options.until).exists():
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError("the gateway left")
            await asyncio.sleep(0.01)

    def note(self, status: int, body: dict[str, Any], asked: tuple[str | None, str | None]) -> None:
        line = {"status": status, "seed": body["seed"], "boot": asked[0], "policy": asked[1], "held": self.policy}
        line |= {"running": self.running, "prompt": len(prompt_of(body)), "max_tokens": body["max_tokens"]}
        with Path(self.options.seen).open("a") as out:
            out.write(json.dumps(line) + "\n")

    async def announce_for_ever(self) -> None:
        tls = aiohttp.TCPConnector(ssl=identity.client_context(self.token))
        headers = {"Authorization": f"Bearer {self.token}"}
        async with aiohttp.ClientSession(connector=tls, headers=headers) as session:
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


def events(body: dict[str, Any], unequal: str = "") -> Iterator[dict[str, Any]]:
    """vLLM's events for one completion: the first token alone, then STREAM_INTERVAL at a time."""
    prompt = prompt_of(body)
    tokens, logprobs, reason = completion(body, prompt, unequal)
    shown, count = texts(tokens), len(tokens)
    cuts = sorted({0, *range(1, count, STREAM_INTERVAL), count})
    for start, end in pairwise(cuts):
        choice = {
            "index": 0,
            "text": "".join(shown[start:end]),
            "logprobs": {
                "token_logprobs": logprobs[start:end],
                "tokens": shown[start:end],
                "top_logprobs": [
                    {text: value} for text, value in zip(shown[start:end], logprobs[start:end], strict=True)
                ],
            },
            "finish_reason": reason if end == count else None,
            "token_ids": tokens[start:end],
        }
        if start == 0:
            choice["prompt_token_ids"] = prompt
        yield {"id": "cmpl-0", "choices": [choice]}


def chat_events(body: dict[str, Any], unequal: str = "") -> Iterator[dict[str, Any]]:
    """The same as a chat has them, after an event with the role and the prompt."""
    empty = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    yield {"id": "chatcmpl-0", "choices": [empty], "prompt_token_ids": prompt_of(body)}
    for event in events(body, unequal):
        said = event["choices"][0]
        logprobs = said["logprobs"]
        content = [
            {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
            for token, value in zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
        ]
        choice = {
            "index": 0,
            "delta": {"content": said["text"]},
            "logprobs": {"content": content},
            "finish_reason": said["finish_reason"],
            "token_ids": said["token_ids"],
        }
        yield {"id": "chatcmpl-0", "choices": [choice]}


async def serve(options: argparse.Namespace) -> None:
    node = FakeNode(options)
    app = web.Application()
    app.add_routes(
        [
            web.get("/health", node.health),
            web.post("/v1/completions", node.complete),
            web.post("/v1/chat/completions", node.complete),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    tls = identity.server_context(node.token) if identity.protects(options.host) else None
    await web.TCPSite(runner, options.host, options.port, ssl_context=tls, reuse_address=True).start()
    node.address = identity.address(options.host, runner.addresses[0][1])
    await node.announce_for_ever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", required=True)
    parser.add_argument("--seen", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--event-s", type=float, default=0.0)
    parser.add_argument("--max-requests", type=int, default=256)
    parser.add_argument("--never-load", action="store_true")
    parser.add_argument("--breaks", choices=BREAKS, help="end every stream early, in this way")
    parser.add_argument("--status", type=int, default=0, help="answer this to every request")
    parser.add_argument("--until", help="send only the first event of an answer before this file is there")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
