"""Serve the pages over HTTP, as HTML or JSON, and notify them of news. Everything here is read-only."""

from __future__ import annotations

import asyncio
import hashlib
import json
import mimetypes
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from shlex import quote
from typing import Any

from aiohttp import hdrs, web
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from grpo_orch.checkpoint.records.metrics import MetricsRow
from grpo_orch.checkpoint.store.errors import NotFound, StoreError
from grpo_orch.orchestrator.views.formatting import (
    continue_command,
    data_size,
    duration,
    escape_invisible,
    format_time,
    short,
    usd,
)
from grpo_orch.orchestrator.views.model import RunView, deadline_words, is_late
from grpo_orch.orchestrator.views.report import HELD_OUT
from grpo_orch.orchestrator.web import curves, pages
from grpo_orch.orchestrator.web.access import add_headers, guard
from grpo_orch.orchestrator.web.page import Page, PageError, PageRequest
from grpo_orch.orchestrator.web.watch import Observation, Watch, observations
from grpo_orch.policies.detect.divergence import Health
from grpo_orch.policies.model.phases import TERMINAL_RUN
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Role, RollbackStage

UNREADABLE_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure with its label and a note below. `tone` is good, warn, bad or empty."""

    label: str
    value: str
    below: str = ""
    tone: str = ""


def strip(observation: Observation) -> list[Figure]:
    """Return the figures at the top of every page, in order."""
    return observation.cached("strip", lambda: _figures(observation))


def troubles(view: RunView) -> list[str]:
    """Describe the problems that do not end the run, a line each."""
    lines = []
    for stopped in view.buying_stopped:
        wait_s = stopped.next_try_s - view.now_s
        when = f"in {duration(wait_s)}" if wait_s > 0 else "soon"
        lines.append(f"Buying is stopped for {stopped.kind}; next test machine {when}: {stopped.reason}")
    if view.store_slow:
        lines.append(
            "The store is slow: the newest checkpoint was postponed, earlier ones are still being uploaded"
        )
    ignored = view.unreadable[-UNREADABLE_SHOWN:]
    return lines + [f"{damaged.key} cannot be read and is ignored: {damaged.reason}" for damaged in ignored]


def deadline_line(view: RunView) -> Figure | None:
    """Describe the deadline, the progress towards it, and the forecast cost."""
    words = deadline_words(view)
    if not words:
        return None
    forecast = view.money.forecast_usd
    costs = [] if forecast is None else [f"{usd(forecast)} at the end"]
    return Figure("deadline", words[0], " · ".join([*words[1:], *costs]), "warn" if is_late(view) else "")


def headline(view: RunView) -> str:
    """Describe in a few words what matters most right now."""
    if view.phase in TERMINAL_RUN:
        hint = continue_command(view.phase, view.reason, view.store)
        return f"{view.reason}; {hint}" if hint else view.reason
    if not view.daemon.alive:
        return f"no controller; run: grpo-orch resume {quote(view.store)}"
    if view.rollback is not None and view.rollback.stage is not RollbackStage.PROBATION:
        return f"timeline {view.rollback.timeline} {view.rollback.text}"
    if view.health.health is not Health.HEALTHY:
        finding = "diverged" if view.health.health is Health.TRIPPED else "possible divergence"
        return f"{finding} since step {view.health.onset_step}"
    if view.parked_s is not None:
        return f"for {duration(view.parked_s)}: {view.reason}"
    return f"the trainer is {view.activity}" if view.activity else view.reason


def _figures(observation: Observation) -> list[Figure]:
    view, money = observation.view, observation.view.money
    of = f"of {view.max_steps:,}" if view.max_steps else ""
    above = view.kl is not None and view.kl_limit is not None and view.kl > view.kl_limit
    limit = f"limit {short(view.kl_limit)}" if view.kl_limit is not None else "no limit"
    forecast = f"{usd(money.forecast_usd)} at the end" if money.forecast_usd is not None else "so far"
    waiting = f"{view.requests_waiting} waiting" if view.requests_waiting else ""
    return [
        Figure("step", f"{view.step:,}", of),
        Figure("reward", short(view.reward), _held_out(observation.path)),
        Figure("KL", short(view.kl), limit, "bad" if above else ""),
        Figure("seconds a step", short(view.step_s), f"{duration(view.eta_s)} left" if view.eta_s else ""),
        Figure("tokens a second", short(view.tokens_per_s), waiting),
        _rollouts(view),
        Figure("spent", usd(money.spent_usd), forecast),
        Figure("rate", usd(money.usd_per_h), "an hour"),
    ]


def _rollouts(view: RunView) -> Figure:
    """Return the number of serving rollout nodes, and how many are wanted."""
    serving = [node for node in view.nodes if node.role is Role.ROLLOUT and node.phase is NodePhase.SERVING]
    on_demand = sum(node.market is Market.ON_DEMAND for node in serving)
    if view.fleet is None:
        below = "none in this run"
    elif view.phase in TERMINAL_RUN:
        below = ""
    else:
        below = f"of {view.fleet.nodes}, {on_demand} on demand" if on_demand else f"of {view.fleet.nodes} wanted"
    return Figure("rollout nodes", f"{len(serving)}", below)


def _held_out(rows: Sequence[MetricsRow]) -> str:
    found = next((row.values[HELD_OUT] for row in reversed(rows) if HELD_OUT in row.values), None)
    return f"held out {short(found)}" if found is not None else ""


# In the order of the navigation.
PAGES: tuple[Page, ...] = (
    pages.RUN,
    pages.NODES,
    pages.MONEY,
    pages.SAMPLES,
    pages.SAMPLE,
    pages.CHECKPOINTS,
    pages.ROLLBACKS,
    pages.EVENTS,
    curves.SERIES,
    curves.SPLIT,
    curves.LANES,
)

WATCHERS_MAX = 100  # concurrent; each holds a connection
QUIET_S = 15.0  # without news, a comment is sent at this interval to keep the connection open
RETRY_MS = 3000  # delay before a browser reconnects

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Site:
    """The request handlers and their shared state."""

    def __init__(self, watch: Watch, pages: Sequence[Page] = PAGES) -> None:
        self._watch = watch
        self._pages = pages
        self._static = _static_files()
        self._watchers = 0

    def app(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(middlewares=[guard, self._refuse])
        app.on_response_prepare.append(add_headers)
        app.cleanup_ctx.append(self._watching)
        app.add_routes([web.get(page.path, self._handler(page)) for page in self._pages])
        app.add_routes([web.get("/live", self._live), web.get("/static/{name:.+}", self._file)])
        return app

    async def _watching(self, _: web.Application) -> Any:
        task = asyncio.ensure_future(self._watch.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    def _handler(self, page: Page) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            observation = await self._watch.fresh()
            page_request = PageRequest(request.match_info, request.query)
            form = page_request.choice("format", ("html", "json"))
            data = await asyncio.to_thread(page.data, observation, page_request)
            if page.template is None or form == "json":
                return _json(data)
            drawn = await asyncio.to_thread(self._draw, page, observation, data, request.path_qs)
            return web.Response(text=drawn, content_type="text/html")

        return handle

    def _draw(self, page: Page, observation: Observation, data: dict[str, Any], url: str) -> str:
        assert page.template is not None
        return render(page.template, {**self._shared(observation, page, url), **data})

    def _shared(self, observation: Observation, page: Page | None, url: str) -> dict[str, Any]:
        """Return the variables of every template."""
        as_json = f"{url}{'&' if '?' in url else '?'}format=json"
        shared = {
            "observation": observation,
            "view": observation.view,
            "strip": strip(observation),
            "headline": headline(observation.view),
        }
        shared |= {"deadline": deadline_line(observation.view), "troubles": troubles(observation.view)}
        return {**shared, "page": page, "pages": self._pages, "url": url, "json_url": as_json}

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """Send server-sent events: `observation`, with its number, for every newer observation."""
        if self._watchers >= WATCHERS_MAX:
            raise PageError(503, f"{WATCHERS_MAX} pages are open already, close some")
        response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: "text/event-stream"})
        self._watchers += 1
        try:
            with suppress(ConnectionResetError):  # the page was closed
                await self._send_looks(request, response)
        finally:
            self._watchers -= 1
        return response

    async def _send_looks(self, request: web.Request, response: web.StreamResponse) -> None:
        await response.prepare(request)
        await response.write(f"retry: {RETRY_MS}\n\n".encode())
        stream = observations(self._watch, self._watch.newest.number)
        next_look = asyncio.ensure_future(anext(stream))
        try:
            while True:
                await asyncio.wait({next_look}, timeout=QUIET_S)
                if next_look.done():
                    await response.write(f"event: observation\ndata: {next_look.result().number}\n\n".encode())
                    next_look = asyncio.ensure_future(anext(stream))
                else:
                    await response.write(b": quiet\n\n")
        finally:
            next_look.cancel()
            with suppress(asyncio.CancelledError):
                await next_look
            await stream.aclose()

    async def _file(self, request: web.Request) -> web.Response:
        found = self._static.get(request.match_info["name"])
        if found is None:
            raise PageError(404, "not found")
        data, kind, tag = found
        headers = {hdrs.ETAG: tag, hdrs.CACHE_CONTROL: "no-cache", hdrs.CONTENT_TYPE: kind}
        if request.headers.get(hdrs.IF_NONE_MATCH) == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=data, headers=headers)

    @web.middleware
    async def _refuse(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn errors into error pages."""
        try:
            return await handler(request)
        except PageError as error:
            return self._error(request, error.status, str(error))
        except NotFound as error:
            return self._error(request, 404, str(error))
        except StoreError as error:
            return self._error(request, 503, str(error))
        except web.HTTPException as error:
            return self._error(request, error.status, "not found")

    def _error(self, request: web.Request, status: int, message: str) -> web.Response:
        if request.query.get("format") == "json":
            return _json({"error": message}, status)
        observation = self._watch.newest
        drawn = render("error.html", {**self._shared(observation, None, request.path_qs), "message": message})
        return web.Response(status=status, text=drawn, content_type="text/html")


def _json(data: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(status=status, text=json.dumps(data, allow_nan=False), content_type="application/json")


def _static_files() -> dict[str, tuple[bytes, str, str]]:
    """Return content, MIME type and ETag of each file, by name."""
    found: dict[str, tuple[bytes, str, str]] = {}
    root = resources.files("grpo_orch.orchestrator.web") / "static"
    folders = [("", root), ("vendor/", root / "vendor")]
    for prefix, folder in folders:
        for file in folder.iterdir():
            if file.is_file():
                data = file.read_bytes()
                kind = mimetypes.guess_type(file.name)[0] or "text/plain"
                suffix = "; charset=utf-8" if kind.startswith("text/") else ""
                found[prefix + file.name] = data, kind + suffix, f'"{hashlib.sha256(data).hexdigest()[:20]}"'
    return found


# The templates, with autoescaping, and their number and time formats.


def _day_and_time(time_s: float) -> str:
    """Return `21 Nov 14:03:59`, local time."""
    return format_time(time_s, "%d %b %H:%M:%S")


def _iso(time_s: float) -> str:
    return format_time(time_s, "%Y-%m-%dT%H:%M:%SZ", local=False)


def _as_text(value: Any) -> Any:
    """Pass every text that a template prints through `shown`."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else escape_invisible(value)


_environment = Environment(
    loader=PackageLoader("grpo_orch.orchestrator.web"),
    autoescape=True,
    finalize=_as_text,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.filters.update(
    short=short,
    usd=lambda value: "–" if value is None else usd(value),
    duration=lambda value: "–" if value is None else duration(value),
    data_size=data_size,
    time=_day_and_time,
    iso=_iso,
    cut=escape_invisible,
)


def render(template: str, data: dict[str, Any]) -> str:
    """Draw a template."""
    return _environment.get_template(template).render(data)
