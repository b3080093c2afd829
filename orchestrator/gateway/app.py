"""The gateway's HTTP surface: who asks is checked first, then what he sends, then it is handed on.

Contracts are in `policies.wire`. Nothing is said to anyone without the run's secret.
"""

from __future__ import annotations

import hmac
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

import msgspec
import structlog
from aiohttp import hdrs, web

from orchestrator.gateway.dispatch import BatchRun, Ledger
from orchestrator.gateway.members import Members
from orchestrator.gateway.upstream import RESERVED
from policies.vocabulary import PolicyVersion
from policies.wire import Announce, Batch, GatewayStatus

log = structlog.get_logger()
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

BATCH_SIZE_MAX = 512 * 1024 * 1024  # 4,096 prompts of 16,384 tokens are 450 MB of JSON
ANNOUNCE_SIZE_MAX = 64 * 1024
SEED_END = 2**63  # vLLM's seeds are signed 64-bit numbers


class Gateway:
    """The handlers and what they share.

    Args:
        boot_id: names this process.
        token: the run's secret.
    """

    def __init__(self, boot_id: str, token: str) -> None:
        self.boot_id = boot_id
        self.members = Members()
        self._token = token
        self._ledger = Ledger()
        self._started_at_s = time.monotonic()

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=BATCH_SIZE_MAX, middlewares=[self._check_token])
        app.on_response_prepare.append(_hide_server)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.post("/v1/rollouts", self._rollouts),
                web.post("/members/{node}", self._announce),
                web.delete("/members/{node}", self._leave),
                web.post("/members/{node}/drain", self._drain),
            ]
        )
        return app

    def status(self) -> GatewayStatus:
        """What there is to know of this gateway now; `seq` is for who writes it down."""
        wanted = self.members.wanted
        return GatewayStatus(
            boot_id=self.boot_id,
            policy=None if wanted is None else wanted.label,
            members=self.members.status(),
            requests_waiting=self.members.waiting(),
            tokens_delivered=self._ledger.delivered,
            tokens_discarded=self._ledger.discarded,
            handovers=self._ledger.handovers,
            up_s=time.monotonic() - self._started_at_s,
        )

    @web.middleware
    async def _check_token(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get(hdrs.AUTHORIZATION, "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            return web.Response(status=401)
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200)

    async def _announce(self, request: web.Request) -> web.Response:
        if request.content_length is None or request.content_length > ANNOUNCE_SIZE_MAX:
            raise web.HTTPRequestEntityTooLarge(ANNOUNCE_SIZE_MAX, request.content_length or 0)
        said = _decode(await request.read(), Announce)
        return _json(await self.members.announce(request.match_info["node"], said))

    async def _leave(self, request: web.Request) -> web.Response:
        boot_id = request.query.get("boot")
        if not boot_id:
            raise web.HTTPBadRequest(text="which boot leaves? (?boot=ID)")
        self.members.leave(request.match_info["node"], boot_id)
        return web.Response(status=204)

    async def _drain(self, request: web.Request) -> web.Response:
        self.members.drain(request.match_info["node"])
        return web.Response(status=204)

    async def _rollouts(self, request: web.Request) -> web.StreamResponse:
        batch = _decode(await request.read(), Batch)
        _check_batch(batch)
        self.members.want(batch.policy)
        response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: "application/x-ndjson"})
        await response.prepare(request)
        run = BatchRun(batch, self.members, self._token, self._ledger)
        # When the trainer goes away this handler is cancelled, or its next write fails: both close the iterator.
        async with aclosing(run.lines()) as lines:
            async for line in lines:
                await response.write(msgspec.json.encode(line) + b"\n")
        await response.write_eof()
        return response


def _check_batch(batch: Batch) -> None:
    """Raise HTTPBadRequest for what no node could do."""
    try:
        PolicyVersion.parse(batch.policy.version)
    except ValueError as error:
        raise web.HTTPBadRequest(text=str(error)) from error
    if reserved := sorted(RESERVED.intersection(batch.sampling)):
        raise web.HTTPBadRequest(text=f"sampling may not set {', '.join(reserved)}: the gateway does")
    if not (math.isfinite(batch.deadline_s) and batch.deadline_s > 0):
        raise web.HTTPBadRequest(text=f"deadline_s must be above 0, not {batch.deadline_s}")
    if len({one.index for one in batch.requests}) != len(batch.requests):
        raise web.HTTPBadRequest(text="two requests have the same index")
    for one in batch.requests:
        if not one.prompt_token_ids or not 0 <= one.seed < SEED_END:
            raise web.HTTPBadRequest(text=f"request {one.index}: an empty prompt, or a seed outside [0, 2**63)")


def _decode(body: bytes, cls: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=cls)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise web.HTTPBadRequest(text=f"not a {cls.__name__}: {error}") from error


def _json(document: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), content_type="application/json")


async def _hide_server(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.pop(hdrs.SERVER, None)
