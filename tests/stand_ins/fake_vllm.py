"""A stand-in for vLLM: its HTTP API, and the tokens that it gives.

`FakeVllm` answers `/v1/completions` with vLLM's events, renders and parses chats, checks boot and policy as
`tasks.rollout.vllm.guard` does, and can be announced to the gateway. Each token is a function of the seed and of
every token before it: a completion that is continued correctly equals the undisturbed one, and no other does. Its
"weights" are a policy's label.

As a process, `python -m tests.stand_ins.fake_vllm`:
- `node NAME SEEN HOST PORT ATTRIBUTES` is a whole rollout node; each request is noted in the file SEEN.
- `agent` is the real agent of a rollout machine, whose engines are `engine HOST PORT`: processes like vLLM's, each
  with a child in another session.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import msgspec

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.security import identity
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.serving.wire import (
    DERENDER,
    HEADER_BOOT,
    HEADER_POLICY,
    RENDER,
    Announce,
    AnnounceReply,
    EngineStats,
    LoadPolicy,
)
from grpo_orch.tasks.rollout.vllm.server import EngineLimits

STREAM_INTERVAL = 4
VOCABULARY = 1000
CONTEXT = 4096  # tokens of prompt and answer together
UNEQUAL = 20
END = 900  # of each message in a chat
FOREVER = 1_000_000
EVENT_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOO_MANY = b'{"error":{"message":"max_tokens=%d cannot be greater than max_model_len=%d. Please request fewer"}}'
Announcing = Callable[[str, Announce], Awaitable[AnnounceReply]]


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
        if END in stops and token > END:  # so that answers are of about ten tokens
            token = END
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
    return rendered(body) if "messages" in body else body["prompt"]


def rendered(body: dict[str, Any]) -> list[int]:
    """A chat's tokens: of each message its role, its text byte by byte, and END. So what the model said is never
    spelled as it said it, and a tool call is printed with other spaces."""
    found = list(json.dumps(body["tools"]).encode()) if body.get("tools") else []
    for message in body["messages"]:
        calls = [json.dumps(call["function"], indent=1) for call in message.get("tool_calls") or []]
        text = "".join([message.get("reasoning") or "", message.get("content") or "", *calls])
        found += [VOCABULARY + len(message["role"]), *text.encode(), END]
    return [*found, VOCABULARY] if body.get("add_generation_prompt", True) else found


def render(body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a chat's render request, as far as the gateway reads it."""
    prompt = rendered(body)
    limit = body.get("max_tokens") or CONTEXT - len(prompt)
    params: dict[str, Any] = {"stop_token_ids": body.get("stop_token_ids") or []}
    if limit != 16:  # what is vLLM's default it leaves out
        params["max_tokens"] = limit
    return {"token_ids": prompt, "sampling_params": params, "features": None}


def derender(body: dict[str, Any]) -> dict[str, Any]:
    """The message that an answer's tokens are. With tools one whose first token is even is a call of the first
    tool; where the model reasons its first token is all of that."""
    chat, [choice] = body["chat_request"], body["generate_response"]["choices"]
    tokens = choice["token_ids"]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts(tokens)), "tool_calls": []}
    if chat.get("reasoning_effort"):
        message |= {"reasoning": texts(tokens[:1])[0], "content": "".join(texts(tokens[1:]))}
    if chat.get("tools") and tokens[0] % 2 == 0:
        arguments = json.dumps({"numbers": tokens}, separators=(",", ":"))
        function = {"name": chat["tools"][0]["function"]["name"], "arguments": arguments}
        call = {"id": secrets.token_hex(4), "type": "function", "function": function}
        message |= {"content": None, "tool_calls": [call]}
    content = (choice.get("logprobs") or {}).get("content") or []
    shown = zip(texts(tokens), content, strict=False)
    logprobs = [{"token": text, "logprob": one["logprob"], "top_logprobs": []} for text, one in shown]
    return {"choices": [{"index": 0, "message": message, "logprobs": {"content": logprobs} if content else None}]}


def events(body: dict[str, Any], unequal: str = "") -> Iterator[dict[str, Any]]:
    """vLLM's events for one completion: the first token alone, then STREAM_INTERVAL at a time."""
    prompt = prompt_of(body)
    tokens, logprobs, reason = completion(body, prompt, unequal)
    count = len(tokens)
    cuts = sorted({0, *range(1, count, STREAM_INTERVAL), count})
    for start, end in pairwise(cuts):
        choice = {
            "index": 0,
            "logprobs": {"token_logprobs": logprobs[start:end]},
            "finish_reason": reason if end == count else None,
            "token_ids": tokens[start:end],
        }
        if start == 0:
            choice["prompt_token_ids"] = prompt
        yield {"id": "cmpl-0", "choices": [choice]}


class FakeVllm:
    """A node's server. Its attributes may be changed at any time; a request in progress follows them.

    Requests from the gateway show `token`, boot and policy. Requests from the node's own agent show `secret`.
    """

    def __init__(self, name: str, token: str, secret: str = "") -> None:
        self.name, self.token, self.secret = name, token, secret
        self.boot_id, self.address = secrets.token_hex(4), ""
        self.policy: str | None = None
        self.loads = False  # takes the policy that the gateway names
        self.max_requests = 256
        self.engine: EngineStats | None = None  # what it reports of itself
        self.event_s = 0.0
        self.doubling = 0  # requests that make an event take twice as long; 0: none do
        self.stalls = FOREVER  # sends no token after so many of a request
        self.deaf = False  # does not answer GET /health
        self.raw = b""  # sent in place of any answer
        self.breaks: bytes | None = None  # sent in place of all events but the first
        self.extra = b""  # sent after every answer
        self.refuses: Callable[[dict[str, Any]], bool] = lambda _: False  # answers 400 to these
        self.stumbles: Callable[[dict[str, Any]], bool] = lambda _: False  # over these chats: answers 500
        self.unequal = ""  # its last bits differ from those of a node with another such name
        self.done = True  # ends its answers
        self.at_a_time = FOREVER  # requests that its engine works at; the others wait in their order
        self.loses: set[int] = set()  # seeds for which it makes nothing
        self.makes: Callable[[dict[str, Any]], list[int]] = lambda body: completion(body, body["prompt"])[0]
        self.refusal = ""  # of PUT /grpo/sampling
        self.running = 0
        self.sent = 0  # tokens
        self.nonsense = b""  # in the place of a chat's prompt or message
        self.translated = 0  # messages to tokens, or back
        self.stalled = 0  # requests that have come to where it stalls
        self.aborted = 0
        self.asked: list[dict[str, Any]] = []  # every request's body
        self.seen: str | None = None  # a file with a line for each of them
        self._changed = asyncio.Event()
        self._working: list[object] = []
        self._connections: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._killed = False
        self._server: asyncio.Server | None = None

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> None:
        tls = identity.server_context(self.token) if identity.protects(host) else None
        self._server = await asyncio.start_server(self._serve, host, port, ssl=tls, reuse_address=True)
        self.address = identity.address(host, self._server.sockets[0].getsockname()[1])

    def change(self, **attributes: Any) -> None:
        """Change its behaviour, also towards requests in progress."""
        for name, value in attributes.items():
            assert hasattr(self, name), name
            setattr(self, name, value)
        self._changed.set()
        self._changed = asyncio.Event()

    def kill(self) -> None:
        """Break its sockets. Its agent keeps announcing it."""
        assert self._server is not None
        self._server.close()
        self._killed = True
        self.change()
        for writer in self._connections.values():
            writer.transport.abort()

    async def close(self) -> None:
        """Break its sockets; return once every connection has ended."""
        self.kill()
        if self._connections:
            await asyncio.wait([*self._connections])

    async def announce_forever(self, gateway: Announcing) -> None:
        """Announce it to the gateway, as its agent does, until the gateway drains it."""
        while True:
            announce = Announce(self.boot_id, self.address, self.policy, self.max_requests, engine=self.engine)
            reply = await gateway(self.name, announce)
            if reply.drain:
                return
            if self.loads and reply.policy is not None and reply.policy.label != self.policy:
                self.change(policy=reply.policy.label)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self._answer(head[0].split()[1], headers, body, reader, writer)
        del self._connections[task]
        writer.close()

    async def _answer(
        self,
        path: str,
        headers: dict[str, str],
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if self.secret and headers.get("authorization") == f"Bearer {self.secret}":
            writer.write(http_response(*self._answer_agent(path, body)))
        elif path == "/health":
            await self._until(lambda: not self.deaf)
            writer.write(http_response(200 if headers.get("authorization") == f"Bearer {self.token}" else 401))
        elif path in (RENDER, DERENDER):
            self.translated += 1
            request, status = json.loads(body), 200
            if headers.get(HEADER_BOOT.lower()) != self.boot_id:
                status, said = 409, {}
            elif self.refuses(request):
                status, said = 400, {"error": {"message": "no such template", "code": 400}}
            else:
                try:
                    said = (render if path == RENDER else derender)(request)
                except (KeyError, TypeError, AttributeError, ValueError) as error:  # as vLLM's checks would
                    status, said = 400, {"error": {"message": f"no chat: {error!r}", "code": 400}}
            if self.stumbles(request):
                status, said = 500, {"error": {"message": "the template failed", "code": 500}}
            await self._until(lambda: not self.deaf)
            writer.write(http_response(status, self.nonsense or json.dumps(said).encode()))
        else:
            request = json.loads(body)
            self.asked.append(request)
            if self.seen is not None:
                with Path(self.seen).open("a") as out:
                    out.write(json.dumps(request) + "\n")
            self.running += 1
            try:
                await self._in_turn(request, headers, reader, writer)
            finally:
                self.running -= 1

    def _answer_agent(self, path: str, body: bytes) -> tuple[int, bytes]:
        match path:
            case "/grpo/policy":
                wanted = msgspec.json.decode(body, type=LoadPolicy)
                assert list(Path(wanted.path).glob("*.safetensors"))
                self.policy = wanted.version
                return 204, b""
            case "/v1/completions":
                request = json.loads(body)
                assert request.get("temperature", 1.0) <= 2.0  # vLLM takes no more
                return 200, json.dumps({"choices": [{"token_ids": self.makes(request)}]}).encode()
            case "/grpo/sampling":
                return 200, self.refusal.encode()
            case "/grpo/bare":
                return 204, b""
            case "/grpo/engine":
                return 200, msgspec.json.encode(EngineLimits(8, CONTEXT))
            case "/metrics":
                return 200, b"vllm:num_requests_running 0\n"
        return 404, b""

    async def _in_turn(
        self,
        body: dict[str, Any],
        headers: dict[str, str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        await self._until(lambda: body["seed"] not in self.loses, reader)
        turn = object()
        self._working.append(turn)
        try:
            await self._until(lambda: self._working.index(turn) < self.at_a_time, reader)
            status, why = self._refusal(body, headers)
            if self.raw:
                writer.write(self.raw)
                await writer.drain()
                raise ConnectionError
            if status != 200:
                writer.write(http_response(status, why))
            else:
                await self._stream(body, reader, writer)
        finally:
            self._working.remove(turn)
            self.change()

    def _refusal(self, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, bytes]:
        if headers.get("authorization") != f"Bearer {self.token}":
            return 401, b""
        if (headers.get(HEADER_BOOT.lower()), headers.get(HEADER_POLICY.lower())) != (self.boot_id, self.policy):
            return 409, b"other weights"
        if self.refuses(body):
            return 400, b"no"
        if (body.get("max_tokens") or 0) > CONTEXT:
            return 400, TOO_MANY % (body["max_tokens"], CONTEXT)
        return 200, b""

    async def _stream(
        self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(EVENT_STREAM)
        policy, sent = self.policy, 0
        for event in events(body, self.unequal):
            await asyncio.sleep(self.event_s * (1 + (self.running / self.doubling if self.doubling else 0)))
            tokens = sum(len(choice.get("token_ids") or []) for choice in event["choices"])
            self.stalled += sent >= self.stalls
            await self._until(lambda sent=sent: sent < self.stalls or self.policy != policy, reader)  # type: ignore[misc]
            if self.policy != policy:
                event = {"error": {"message": "other weights now", "code": 409}}
            writer.write(_chunk(b"data: " + json.dumps(event).encode() + b"\n\n"))
            await writer.drain()
            sent += tokens
            self.sent += tokens
            if self.breaks is not None:
                writer.write((_chunk(self.breaks) if self.breaks else b"") + _chunk(b""))
                break
        if self.breaks is None and self.done:
            writer.write(_chunk(b"data: [DONE]\n\n") + _chunk(b"") + self.extra)
        await self._until(lambda: self.done, reader)

    async def _until(self, ready: Callable[[], bool], reader: asyncio.StreamReader | None = None) -> None:
        while not ready():
            if self._killed:
                raise ConnectionError("it was killed")
            waiting: set[asyncio.Future[bool | bytes]] = {asyncio.ensure_future(self._changed.wait())}
            if reader is not None:
                waiting.add(asyncio.ensure_future(reader.read(1)))
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in waiting - done:
                future.cancel()
            if any(future.result() == b"" for future in done):
                self.aborted += 1
                raise ConnectionError("the gateway left")


def http_response(status: int, body: bytes = b"") -> bytes:
    return f"HTTP/1.1 {status} .\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def run_node(name: str, seen: str, host: str, port: str, attributes: str) -> None:
    """Serve, and announce it to the run's gateway."""
    store = Store(os.environ["GRPO_ORCH_RUN"])
    node = FakeVllm(name, os.environ["GRPO_ORCH_TOKEN"])
    node.change(seen=seen, loads=True, **json.loads(attributes))
    await node.listen(host, int(port))
    tls = aiohttp.TCPConnector(ssl=identity.client_context(node.token))
    async with aiohttp.ClientSession(connector=tls, headers={"Authorization": f"Bearer {node.token}"}) as session:

        async def announce(name: str, announcement: Announce) -> AnnounceReply:
            try:
                gateway = documents.read_gateway(store)
                assert gateway is not None
                url = f"{gateway.url}/members/{name}"
                async with session.post(url, data=msgspec.json.encode(announcement)) as response:
                    response.raise_for_status()
                    reply = msgspec.json.decode(await response.read(), type=AnnounceReply)
                if reply.drain:
                    await session.delete(url, params={"boot": node.boot_id})
            except (aiohttp.ClientError, OSError):
                await asyncio.sleep(0.05)
                return AnnounceReply()
            return reply

        await node.announce_forever(announce)


async def run_engine(host: str, port: str) -> None:
    """Serve the agent that started this process, and its gateway."""
    engine = FakeVllm("", os.environ["GRPO_ORCH_TOKEN"], os.environ["GRPO_ORCH_NODE_SECRET"])
    engine.change(boot_id=os.environ["GRPO_ORCH_BOOT"], event_s=0.01)
    await engine.listen(host, int(port))
    await asyncio.Event().wait()


def run_agent() -> int:
    """Run the real agent with stand-ins for vLLM."""
    from grpo_orch.tasks.rollout import agent
    from grpo_orch.tasks.rollout.vllm import server

    def argv(_: object, host: str, port: int, *__: object, **___: object) -> list[str]:
        return ["-m", "tests.stand_ins.fake_vllm", "engine", host, str(port)]

    with patch.object(server, "argv_of", argv), patch.object(agent, "check_versions"):
        return agent.main()


def main(role: str, *arguments: str) -> int:
    match role:
        case "node":
            asyncio.run(run_node(*arguments))
        case "engine":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            asyncio.run(run_engine(*arguments))
        case "agent":
            sys.argv = sys.argv[:1]
            return run_agent()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
