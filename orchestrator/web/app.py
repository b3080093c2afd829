"""The pages over HTTP: each drawn, or as JSON, and what keeps them live. Nothing here changes anything."""

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

from checkpoint.records.metrics import Row
from checkpoint.store.errors import NotFound, StoreError
from orchestrator.views.model import RunView, deadline_words, is_late
from orchestrator.views.report import HELD_OUT
from orchestrator.views.words import data_size, duration, going_on, short, shown, usd, written
from orchestrator.web import course, pages
from orchestrator.web.access import add_headers, guard
from orchestrator.web.page import Asked, Page, Refused
from orchestrator.web.watch import Look, Watch, looks
from policies.detect.divergence import Health
from policies.model.phases import TERMINAL_RUN
from policies.model.vocabulary import Market, NodePhase, Role, RollbackStage

SET_ASIDE_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure, what it is, and what stands below it. `tone` is good, warn, bad or nothing."""

    label: str
    value: str
    below: str = ""
    tone: str = ""


def strip(look: Look) -> list[Figure]:
    """The figures, in their order."""
    return look.once("strip", lambda: _figures(look))


def troubles(view: RunView) -> list[str]:
    """What is off and does not end the run, a line each."""
    told = []
    for one in view.not_bought:
        wait_s = one.tried_again_s - view.now_s
        when = f"in {duration(wait_s)}" if wait_s > 0 else "any time now"
        told.append(f"No machines are bought, {one.kind}; one is tried {when}: {one.reason}")
    if view.store_slow:
        told.append("The store is slow: the newest checkpoint was put off, those before it are still on their way")
    told += [f"{one.key} cannot be read and is left out: {one.why}" for one in view.set_aside[-SET_ASIDE_SHOWN:]]
    return told


def deadline_line(view: RunView) -> Figure | None:
    """When the run is to be done, where it is on the way there, and what that costs as it goes now."""
    words = deadline_words(view)
    if not words:
        return None
    forecast = view.money.forecast_usd
    costs = [] if forecast is None else [f"{usd(forecast)} at the end"]
    return Figure("deadline", words[0], " · ".join([*words[1:], *costs]), "warn" if is_late(view) else "")


def headline(view: RunView) -> str:
    """What matters most right now, in a few words."""
    if view.phase in TERMINAL_RUN:
        hint = going_on(view.phase, view.reason, view.store)
        return f"{view.reason}; {hint}" if hint else view.reason
    if not view.daemon.alive:
        return f"nobody steers it: grpo-orch resume {quote(view.store)}"
    if view.rollback is not None and view.rollback.stage is not RollbackStage.PROBATION:
        return f"timeline {view.rollback.timeline} {view.rollback.text}"
    if view.health.health is not Health.HEALTHY:
        word = "diverged" if view.health.health is Health.TRIPPED else "watched"
        return f"{word} since step {view.health.onset_step}"
    if view.parked_s is not None:
        return f"for {duration(view.parked_s)}: {view.reason}"
    return f"the trainer is {view.activity}" if view.activity else view.reason


def _figures(look: Look) -> list[Figure]:
    view, money = look.view, look.view.money
    of = f"of {view.max_steps:,}" if view.max_steps else ""
    above = view.kl is not None and view.kl_limit is not None and view.kl > view.kl_limit
    limit = f"limit {short(view.kl_limit)}" if view.kl_limit is not None else "no limit"
    forecast = f"{usd(money.forecast_usd)} at the end" if money.forecast_usd is not None else "so far"
    waiting = f"{view.requests_waiting} waiting" if view.requests_waiting else ""
    return [
        Figure("step", f"{view.step:,}", of),
        Figure("reward", short(view.reward), _held_out(look.path)),
        Figure("KL", short(view.kl), limit, "bad" if above else ""),
        Figure("seconds a step", short(view.step_s), f"{duration(view.eta_s)} to go" if view.eta_s else ""),
        Figure("tokens a second", short(view.tokens_per_s), waiting),
        _rollouts(view),
        Figure("spent", usd(money.spent_usd), forecast),
        Figure("rate", usd(money.usd_per_h), "an hour"),
    ]


def _rollouts(view: RunView) -> Figure:
    """How many serve, of how many there are to be: places that a smaller fleet has left are no part of it."""
    serving = [one for one in view.nodes if one.role is Role.ROLLOUT and one.phase is NodePhase.SERVING]
    on_demand = sum(one.market is Market.ON_DEMAND for one in serving)
    if view.fleet is None:
        below = "none in this run"
    elif view.phase in TERMINAL_RUN:
        below = ""
    else:
        below = f"of {view.fleet.nodes}, {on_demand} on demand" if on_demand else f"of {view.fleet.nodes} wanted"
    return Figure("rollout nodes", f"{len(serving)}", below)


def _held_out(rows: Sequence[Row]) -> str:
    found = next((row.values[HELD_OUT] for row in reversed(rows) if HELD_OUT in row.values), None)
    return f"held out {short(found)}" if found is not None else ""


# The handlers.

# In the order of the navigation.
PAGES: tuple[Page, ...] = (
    pages.RUN,
    pages.NODES,
    pages.MONEY,
    pages.SAMPLES,
    pages.SAMPLE,
    pages.CHECKPOINTS,
    pages.ROLLBACKS,
    pages.DIARY,
    course.SERIES,
    course.SPLIT,
    course.LANES,
)

WATCHERS_MAX = 100  # at a time; each holds a connection
QUIET_S = 15.0  # after so long without news a word keeps the connection open
RETRY_MS = 3000  # a browser connects again so long after the connection was lost

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Site:
    """The handlers and what they share."""

    def __init__(self, watch: Watch, pages: Sequence[Page] = PAGES) -> None:
        self._watch = watch
        self._pages = pages
        self._static = _static_files()
        self._watchers = 0

    def app(self) -> web.Application:
        """The aiohttp application."""
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
            look = await self._watch.fresh()
            asked = Asked(request.match_info, request.query)
            wanted = asked.choice("format", ("html", "json"))
            data = await asyncio.to_thread(page.data, look, asked)
            if page.template is None or wanted == "json":
                return _json(data)
            drawn = await asyncio.to_thread(self._draw, page, look, asked, data, request.path_qs)
            return web.Response(text=drawn, content_type="text/html")

        return handle

    def _draw(self, page: Page, look: Look, asked: Asked, data: dict[str, Any], url: str) -> str:
        assert page.template is not None
        return render(page.template, {**self._shared(look, page, url), "asked": asked, **data})

    def _shared(self, look: Look, page: Page | None, url: str) -> dict[str, Any]:
        """What every template may use."""
        as_json = f"{url}{'&' if '?' in url else '?'}format=json"
        told = {"look": look, "view": look.view, "strip": strip(look), "headline": headline(look.view)}
        told |= {"deadline": deadline_line(look.view), "troubles": troubles(look.view)}
        return {**told, "page": page, "pages": self._pages, "url": url, "json_url": as_json}

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: `look`, with its number, whenever there is news."""
        if self._watchers >= WATCHERS_MAX:
            raise Refused(503, f"{WATCHERS_MAX} are watching already")
        response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: "text/event-stream"})
        self._watchers += 1
        try:
            with suppress(ConnectionResetError):  # the page was left
                await self._tell(request, response)
        finally:
            self._watchers -= 1
        return response

    async def _tell(self, request: web.Request, response: web.StreamResponse) -> None:
        await response.prepare(request)
        await response.write(f"retry: {RETRY_MS}\n\n".encode())
        stream = looks(self._watch, self._watch.newest.number)
        coming = asyncio.ensure_future(anext(stream))
        try:
            while True:
                await asyncio.wait({coming}, timeout=QUIET_S)
                if coming.done():
                    await response.write(f"event: look\ndata: {coming.result().number}\n\n".encode())
                    coming = asyncio.ensure_future(anext(stream))
                else:
                    await response.write(b": quiet\n\n")
        finally:
            coming.cancel()
            with suppress(asyncio.CancelledError):
                await coming
            await stream.aclose()

    async def _file(self, request: web.Request) -> web.Response:
        found = self._static.get(request.match_info["name"])
        if found is None:
            raise Refused(404, "nothing is there")
        data, kind, tag = found
        headers = {hdrs.ETAG: tag, hdrs.CACHE_CONTROL: "no-cache", hdrs.CONTENT_TYPE: kind}
        if request.headers.get(hdrs.IF_NONE_MATCH) == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=data, headers=headers)

    @web.middleware
    async def _refuse(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers for what cannot be shown."""
        try:
            return await handler(request)
        except Refused as error:
            return self._error(request, error.status, str(error))
        except NotFound as error:
            return self._error(request, 404, str(error))
        except StoreError as error:
            return self._error(request, 503, str(error))
        except web.HTTPException as error:
            return self._error(request, error.status, "nothing is there")

    def _error(self, request: web.Request, status: int, message: str) -> web.Response:
        if request.query.get("format") == "json":
            return _json({"error": message}, status)
        look = self._watch.newest
        drawn = render("error.html", {**self._shared(look, None, request.path_qs), "message": message})
        return web.Response(status=status, text=drawn, content_type="text/html")


def _json(data: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(status=status, text=json.dumps(data, allow_nan=False), content_type="application/json")


def _static_files() -> dict[str, tuple[bytes, str, str]]:
    """By name: content, type, and a tag of it."""
    found: dict[str, tuple[bytes, str, str]] = {}
    root = resources.files("orchestrator.web") / "static"
    folders = [("", root), ("vendor/", root / "vendor")]
    for prefix, folder in folders:
        for one in folder.iterdir():
            if one.is_file():
                data = one.read_bytes()
                kind = mimetypes.guess_type(one.name)[0] or "text/plain"
                suffix = "; charset=utf-8" if kind.startswith("text/") else ""
                found[prefix + one.name] = data, kind + suffix, f'"{hashlib.sha256(data).hexdigest()[:20]}"'
    return found


# The templates, with everything escaped, and how numbers and times are written in them.


def _day_and_time(time_s: float) -> str:
    """`21 Nov 14:03:59`, local."""
    return written(time_s, "%d %b %H:%M:%S")


def _iso(time_s: float) -> str:
    return written(time_s, "%Y-%m-%dT%H:%M:%SZ", local=False)


def _as_text(value: Any) -> Any:
    """Every text that a template prints goes through `shown`."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else shown(value)


_environment = Environment(
    loader=PackageLoader("orchestrator.web"),
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
    cut=shown,
)


def render(template: str, data: dict[str, Any]) -> str:
    """Draw a template."""
    return _environment.get_template(template).render(data)
