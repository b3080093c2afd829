"""The gateway's HTTP API: authorize a request, validate its body, pass it on.

`policies.serving.wire` and docs/gateway.md define the API. Requests without the run's secret get a bare 401.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import msgspec
from aiohttp import hdrs, web

from grpo_orch.checkpoint.security import identity
from grpo_orch.orchestrator.gateway.job import QueueFull, RequestRefused
from grpo_orch.orchestrator.gateway.routing.dispatch import Completer, Ledger
from grpo_orch.orchestrator.gateway.routing.gateway_members import Members
from grpo_orch.orchestrator.gateway.surface import admission
from grpo_orch.orchestrator.gateway.surface.admission import ApiError
from grpo_orch.orchestrator.gateway.surface.batch import BatchRun
from grpo_orch.orchestrator.gateway.surface.chat import Translator
from grpo_orch.orchestrator.gateway.surface.metrics import CONTENT_TYPE, Metrics
from grpo_orch.orchestrator.gateway.surface.openai import OpenAI, error_document
from grpo_orch.orchestrator.gateway.surface.orphaned_requests import OrphanedRequests
from grpo_orch.orchestrator.gateway.surface.session_log import SessionLog
from grpo_orch.orchestrator.gateway.surface.sessions import Sessions
from grpo_orch.policies.model.vocabulary import machine_of
from grpo_orch.policies.serving.gateway_status import GatewayStatus, describe
from grpo_orch.policies.serving.joining import Stage
from grpo_orch.policies.serving.silence_limits import SilenceLimits
from grpo_orch.policies.serving.wire import (
    JOINING,
    ROLLOUTS,
    SESSIONS,
    Announce,
    AnnounceReply,
    OpenSession,
    training_trace,
)

_announce = msgspec.json.Decoder(Announce)
_stage = msgspec.json.Decoder(Stage)
_open = msgspec.json.Decoder(OpenSession)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gateway:
    """The handlers and their shared state.

    Args:
        boot_id: identifies this process.
        token: the run's secret.
        session_log: records the turns of sessions.
        limits: makes the silence limits of a member.
    """

    def __init__(
        self,
        boot_id: str,
        token: str,
        session_log: SessionLog,
        limits: Callable[[], SilenceLimits] = SilenceLimits,
    ) -> None:
        self.boot_id = boot_id
        self.members = Members(token, identity.client_context(token), limits)
        self._expected = f"Bearer {token}".encode()
        self.ledger = Ledger()
        self._metrics = Metrics(self.members, self.ledger)
        self.completer = Completer(self.members, self.ledger, self._metrics.observe)
        self.orphans = OrphanedRequests(self.members, self.completer, self.ledger)
        self._translator = Translator(self.members)
        self.sessions = Sessions(self.members, self.completer, self.ledger, self._translator, session_log)
        self._started_at_s = time.monotonic()

    def app(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(middlewares=[self._answer])
        app.on_response_prepare.append(_hide_server)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._serve_metrics),
                web.post(ROLLOUTS, self._rollouts),
                web.post("/members/{node}", self._announce),
                web.post(f"{JOINING}/{{node}}", self._update_stage),
                web.get("/members", self._list),
                web.get("/events", self._events),
                web.delete("/members/{node}", self._remove),
                web.post("/members/{node}/drain", self._drain),
                web.put(f"{SESSIONS}/{{session}}", self._open),
                web.get(f"{SESSIONS}/{{session}}", self._trace),
                web.delete(f"{SESSIONS}/{{session}}", self._drop),
                *OpenAI(
                    self.members,
                    self.completer,
                    self.ledger,
                    self._translator,
                    self.sessions,
                    int(time.time()),
                ).routes(),
            ]
        )
        return app

    def status(self) -> GatewayStatus:
        """Return the gateway's current status. The writer sets `seq`."""
        wanted, members, now_s = self.members.wanted, self.members.status(), time.monotonic()
        return GatewayStatus(
            boot_id=self.boot_id,
            policy=None if wanted is None else wanted.label,
            members=members,
            requests_waiting=self.members.places.waiting.count,
            tokens_delivered=self.ledger.delivered,
            tokens_discarded=self.ledger.discarded,
            handovers=self.ledger.handovers,
            changes=self.members.changes,
            versions=self.members.version_spreads.last,
            up_s=now_s - self._started_at_s,
            joining=self.members.joining_nodes.status({machine_of(member.node) for member in members}, now_s),
        )

    def is_authorized(self, request: web.BaseRequest) -> bool:
        """Return whether the request carries the run's secret. Counts the answer if not."""
        header = request.headers.get(hdrs.AUTHORIZATION, "").encode(errors="surrogateescape")
        is_authorized = hmac.compare_digest(header, self._expected)
        if not is_authorized:
            self._metrics.answers["unknown", 401] += 1
        return is_authorized

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request and count the answer."""
        response = await self._answer_or_refuse(request, handler)
        resource = request.match_info.route.resource
        self._metrics.answers["unknown" if resource is None else resource.canonical, response.status] += 1
        return response

    async def _answer_or_refuse(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            return _refusal(request, error)
        except RequestRefused as error:
            return _refusal(request, ApiError(error.status, str(error)))
        except QueueFull as error:
            return _refusal(request, ApiError(503, str(error)))
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            response = _refusal(request, ApiError(405, f"method not allowed; use {allowed}"))
            response.headers[hdrs.ALLOW] = allowed
            return response
        except web.HTTPException as error:
            return _refusal(request, ApiError(error.status, f"no such path: {request.rel_url.raw_path[:200]}"))

    async def _health(self, _: web.Request) -> web.Response:
        """Answer 200 while the gateway runs."""
        return web.Response(status=200)

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        """Return the metrics in Prometheus' text format."""
        return web.Response(body=self._metrics.render(), headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})

    async def _announce(self, request: web.Request) -> web.Response:
        """Announce a node, from its agent; the answer is the policy to hold."""
        node = node_of(request)
        announcement = await admission.read_json(request, _announce, "announcement")
        admission.check_announce(announcement)
        return _json(await self.members.announce(node, announcement))

    async def _update_stage(self, request: web.Request) -> web.Response:
        """Report a joining node's stage and progress, from its agent; the answer is the policy to fetch."""
        node = node_of(request)
        stage = await admission.read_json(request, _stage, "stage")
        admission.check_stage(stage)
        self.members.joining_nodes.update(node, stage, time.monotonic())
        return _json(AnnounceReply(policy=self.members.wanted))

    async def _rollouts(self, request: web.Request) -> web.StreamResponse:
        """Complete a trainer's batch (`policies/serving/wire.py`), streaming each completion once finished."""
        self.members.places.waiting.check_capacity()
        batch, prompts = await admission.read_batch(request, self.members.time_slices)
        response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: "application/x-ndjson"})
        await response.prepare(request)
        run = BatchRun(batch, prompts, self.members, self.ledger, self.orphans)
        # If the trainer disconnects, this handler is cancelled or its next write fails; both close the iterator.
        async with aclosing(run.chunks()) as chunks:
            async for chunk in chunks:
                await response.write(chunk)
        await response.write_eof()
        return response

    async def _open(self, request: web.Request) -> web.Response:
        """Open a session with its policy, sampling parameters and limits."""
        parameters = await admission.read_json(request, _open, "session")
        admission.check_session(parameters)
        self.sessions.open(_session_of(request), parameters)
        return web.Response(status=204)

    async def _trace(self, request: web.Request) -> web.Response:
        """Return a session's branches; with `?form=openenv`, as OpenEnv's `TrainingTrace`."""
        trace = self.sessions.trace(_session_of(request), admission.opening_of(request))
        form = request.query.get("form")
        if form not in (None, "openenv"):
            raise ApiError(400, f"form must be openenv or absent, not {form[:40]!a}")
        return _json(trace if form is None else training_trace(trace))

    async def _drop(self, request: web.Request) -> web.Response:
        """Close a session; its open requests get 404."""
        self.sessions.drop(_session_of(request), admission.opening_of(request))
        return web.Response(status=204)

    async def _list(self, _: web.Request) -> web.Response:
        """Return the wanted policy, and each member with its state and last change."""
        members, policy = self.members, self.members.wanted
        wanted = None if policy is None else policy.label
        return _json({"policy": wanted, "members": describe(members.status(), members.changes, wanted)})

    async def _events(self, _: web.Request) -> web.Response:
        """Return the last 64 membership changes with their reasons."""
        return _json({"changes": self.members.changes})

    async def _drain(self, request: web.Request) -> web.Response:
        """Send a node no new requests; it leaves after its running ones. A joining node drains once it joins."""
        self.members.drain(node_of(request))
        return web.Response(status=204)

    async def _remove(self, request: web.Request) -> web.Response:
        """Remove a node immediately: its requests continue elsewhere, and its machine cannot rejoin.

        With `?boot=ID`, as its agent sends it, only that boot leaves.
        """
        node, boot_id = node_of(request), request.query.get("boot")
        if boot_id is not None:
            self.members.leave(node, admission.name_of("boot", boot_id))
        elif not self.members.remove(node):
            raise ApiError(404, f"{node} is not a member")
        return web.Response(status=204)


def _refusal(request: web.Request, error: ApiError) -> web.Response:
    """Return an error in the format of the path: OpenAI's, or plain text."""
    is_openai = request.path.startswith(("/v1/", f"{SESSIONS}/")) and request.path != ROLLOUTS
    if is_openai:
        return _json(error_document(error), error.status)
    return web.Response(status=error.status, text=f"{error}\n")


def _json(document: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(document), content_type="application/json")


async def _hide_server(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.pop(hdrs.SERVER, None)


def _session_of(request: web.Request) -> str:
    return admission.name_of("session", request.match_info["session"])


def node_of(request: web.Request) -> str:
    """Return the node that the path names. Raises ApiError."""
    return admission.name_of("node", request.match_info["node"])
