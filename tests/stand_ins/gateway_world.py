"""A completer and stand-in nodes on one event loop: tests decide what a node does, and when, without a process.

The nodes speak HTTP over real sockets and give the tokens of `tests.stand_ins.fake_vllm`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from orchestrator.gateway.job import Finished, Job
from orchestrator.gateway.routing.dispatch import Completer, Ledger
from orchestrator.gateway.routing.members import Members
from orchestrator.gateway.routing.watch import DRAIN_S, Watch
from policies.serving.member import Row
from policies.serving.silence import SilenceLimits
from policies.serving.wire import CHAT, COMPLETIONS, Announce, EngineWord, PolicyRef
from tests.budget import HANG_S
from tests.stand_ins.fake_vllm import CONTEXT, chat_events, completion, events, prompt_of

TOO_MANY = b'{"error":{"message":"max_tokens=%d cannot be greater than max_model_len=%d. Please request fewer"}}'
T = TypeVar("T")
EVENT_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Node:
    """A member's server. Its attributes may be changed at any time."""

    def __init__(self, world: World, name: str, policy: str, max_requests: int) -> None:
        self.world, self.name, self.policy, self.max_requests = world, name, policy, max_requests
        self.boot_id = f"boot-of-{name}"
        self.event_s = 0.0
        self.doubling = 0  # requests that make an event take twice as long; 0: none do
        self.stalls = 1_000_000  # sends no token after so many of a request
        self.deaf = False  # does not answer GET /health
        self.raw = b""  # sent in place of any answer
        self.breaks: bytes | None = None  # sent in place of all events but the first
        self.extra = b""  # sent after every answer
        self.refuses: Callable[[dict[str, Any]], bool] = lambda _: False  # answers 400 to these
        self.unequal = ""  # its last bits are others than those of a node with another such name
        self.done = True  # ends its answers
        self.changed = asyncio.Event()  # look again
        self.at_a_time = 1_000_000  # requests that its engine works at; the others wait in their order
        self.loses: set[int] = set()  # seeds of which it makes nothing
        self.engine: EngineWord | None = None  # what it says of itself
        self.loads = False  # turns to the policy that it is told to hold
        self.running = 0
        self.sent = 0  # tokens
        self._working: list[object] = []
        self.asked: list[dict[str, Any]] = []  # every request's body
        self.stalled = 0  # requests that have come to where it stalls
        self.aborted = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.announcing = asyncio.ensure_future(self._announce_for_ever())

    def change(self, **attributes: Any) -> None:
        """Change what it does, for those as well that it is at work on."""
        for name, value in attributes.items():
            setattr(self, name, value)
        self.changed.set()
        self.changed = asyncio.Event()

    def kill(self) -> None:
        """Its sockets break. Its agent goes on announcing it."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    @property
    def row(self) -> Row:
        found = self.world.members.row(self.name)
        assert found is not None
        return found

    async def _announce_for_ever(self) -> None:
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        while True:
            said = Announce(self.boot_id, f"127.0.0.1:{port}", self.policy, self.max_requests, engine=self.engine)
            reply = await self.world.members.announce(self.name, said)
            if reply.drain:
                self.world.members.leave(self.name, self.boot_id)
                return
            if self.loads and reply.policy is not None and reply.policy.label != self.policy:
                self.change(policy=reply.policy.label)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                size = int(head.partition("Content-Length: ")[2].partition("\r\n")[0])
                body = await reader.readexactly(size)
                if head.startswith("GET /health "):
                    await self._until(lambda: not self.deaf)
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                    continue
                self.asked.append(json.loads(body))
                self.running += 1
                try:
                    await self._in_turn(json.loads(body), reader, writer)
                finally:
                    self.running -= 1
        self._writers.discard(writer)
        writer.close()

    async def _in_turn(
        self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await self._until(lambda: body["seed"] not in self.loses, reader)
        turn = object()
        self._working.append(turn)
        try:
            await self._until(lambda: self._working.index(turn) < self.at_a_time, reader)
            await self._answer(body, reader, writer)
        finally:
            self._working.remove(turn)
            self.change()

    async def _answer(
        self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self.refuses(body):
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\nno")
            return
        if (body.get("max_tokens") or 0) > CONTEXT:
            said = TOO_MANY % (body["max_tokens"], CONTEXT)
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%b" % (len(said), said))
            return
        if self.raw:
            writer.write(self.raw)
            await writer.drain()
            writer.close()
            raise ConnectionError
        writer.write(EVENT_STREAM)
        policy, sent = self.policy, 0
        make = chat_events if "messages" in body else events
        for event in make(body, self.unequal):
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
            waiting: set[asyncio.Future[bool | bytes]] = {asyncio.ensure_future(self.changed.wait())}
            if reader is not None:
                waiting.add(asyncio.ensure_future(reader.read(1)))
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for one in waiting - done:
                one.cancel()
            if any(one.result() == b"" for one in done):
                self.aborted += 1
                raise ConnectionError("the gateway left")


class World:
    """A gateway's inside."""

    def __init__(self, limits: Callable[[], SilenceLimits], drain_s: float) -> None:
        self.ledger = Ledger()
        self.members = Members("secret", limits=limits)
        self.completer = Completer(self.members, self.ledger)
        self.watch = Watch(self.members, drain_s)
        self.nodes: list[Node] = []

    async def node(self, name: str, policy: str = "0-0", max_requests: int = 256, **attributes: Any) -> Node:
        """Start a node that is a member when this returns, and from its first request on has these attributes."""
        node = Node(self, name, policy, max_requests)
        node.change(**attributes)
        self.nodes.append(node)
        await node.start()
        await self.until(lambda: self.members.row(name) is not None)
        return node

    def ask(self, job: Job) -> asyncio.Task[Finished]:
        return asyncio.ensure_future(self.completer.complete(job))

    async def until(self, ready: Callable[[], object]) -> None:
        async with asyncio.timeout(HANG_S):
            while not ready():
                await asyncio.sleep(0.005)


def run(
    story: Callable[[World], Coroutine[Any, Any, T]],
    *,
    limits: Callable[[], SilenceLimits] = SilenceLimits,
    drain_s: float = DRAIN_S,
) -> T:
    """Run the story beside the gateway's own work, for HANG_S at most."""

    async def both() -> T:
        world = World(limits, drain_s)
        world.members.want(PolicyRef("0-0", "policies/0-0"))
        watching = asyncio.ensure_future(world.watch.run())
        try:
            async with asyncio.timeout(HANG_S):
                got = await story(world)
            assert not watching.done()
            return got
        finally:
            watching.cancel()
            for node in world.nodes:
                node.announcing.cancel()
                node.kill()
            await world.members.close()

    return asyncio.run(both())


numbers: Iterator[int] = iter(range(1_000_000))


def job(*, chat: bool = False, policy: str = "0-0", group: object = None, **body: Any) -> Job:
    """A job whose tokens are its own."""
    seed = next(numbers)
    prompt: dict[str, Any] = {"prompt": [1, 2, 3]}
    if chat:
        prompt = {"messages": [{"role": "user", "content": "hello"}]}
    options = {name: body.pop(name) for name in ("recovery", "keep_text") if name in body}
    whole = {"temperature": 1.0, "max_tokens": 16, "seed": seed, **prompt, **body}
    return Job(
        body=whole,
        policy=policy,
        group=seed if group is None else group,
        prompt_tokens=3,
        path=CHAT if chat else COMPLETIONS,
        prompt_token_ids=whole["prompt"] if isinstance(whole.get("prompt"), list) else None,
        **options,
    )


def undisturbed(job: Job) -> tuple[list[int], list[float], str]:
    """What the job must come to."""
    return completion(job.body, prompt_of(job.body))


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
