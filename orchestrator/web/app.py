"""Serve the pages over HTTP, as HTML or JSON. Everything here is read-only.

The server listens on the loopback address only and needs no secret; use `ssh -L` from other machines. The Host
header must name the loopback address, so that a foreign site whose name resolves to it cannot read the pages (DNS
rebinding).
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import hdrs, web
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from grpo_orch.checkpoint.records.metrics import MetricsRow
from grpo_orch.checkpoint.store.errors import NotFound, StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.gateway.surface.listener import listening
from grpo_orch.orchestrator.views.formatting import (
    data_size,
    duration,
    escape_invisible,
    format_time,
    short,
    usd,
)
from grpo_orch.orchestrator.views.report import HELD_OUT
from grpo_orch.orchestrator.views.view_model import RunView, headline, troubles
from grpo_orch.orchestrator.web import curves, pages
from grpo_orch.orchestrator.web.page import Page, PageError, PageRequest
from grpo_orch.orchestrator.web.run_watch import Observation, Watch
from grpo_orch.policies.model.phases import TERMINAL_RUN
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Role

UNREADABLE_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure with its label and a note below."""

    label: str
    value: str
    below: str = ""
    is_bad: bool = False


def _troubles(view: RunView) -> list[str]:
    """Describe the problems that do not end the run, a line each."""
    lines = [f"{label}: {words}" for label, words in troubles(view)]
    if view.store_slow:
        lines.append(
            "The store is slow: the newest checkpoint was postponed, earlier ones are still being uploaded"
        )
    ignored = view.unreadable[-UNREADABLE_SHOWN:]
    return lines + [f"{damaged.key} cannot be read and is ignored: {damaged.reason}" for damaged in ignored]


def _figures(observation: Observation) -> list[Figure]:
    view, money = observation.view, observation.view.money
    of = f"of {view.max_steps:,}" if view.max_steps else ""
    above = view.kl is not None and view.kl_limit is not None and view.kl > view.kl_limit
    limit = f"limit {short(view.kl_limit)}" if view.kl_limit is not None else "no limit"
    forecast = f"{usd(money.forecast_usd)} at the end" if money.forecast_usd is not None else "so far"
    waiting = f"{view.requests_waiting} waiting" if view.requests_waiting else ""
    return [
        Figure("step", f"{view.step:,}", of),
        Figure("reward", short(view.reward), _held_out(observation.reader.path)),
        Figure("KL", short(view.kl), limit, above),
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
    if view.rollouts_wanted is None:
        below = "none in this run"
    elif view.phase in TERMINAL_RUN:
        below = ""
    else:
        below = f"of {view.rollouts_wanted}{f', {on_demand} on demand' if on_demand else ' wanted'}"
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
    Page("/live", lambda observation, _: {"number": observation.number}),
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Reject a wrong Host header or method, else call the handler."""
    if _host_of(request) not in LOCAL_NAMES:
        return web.Response(status=421, text="wrong host name: use 127.0.0.1 or localhost\n")
    if request.method not in ("GET", "HEAD"):
        allowed = {hdrs.ALLOW: "GET, HEAD"}
        return web.Response(status=405, text="this page is read-only\n", headers=allowed)
    return await handler(request)


async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
    """Set the headers of every response, including errors."""
    response.headers.update(HEADERS)
    response.headers.setdefault(hdrs.CACHE_CONTROL, "no-store")
    response.headers.pop(hdrs.SERVER, None)


def _host_of(request: web.Request) -> str:
    """Return the name in the Host header, without its port."""
    named = request.headers.get(hdrs.HOST, "")
    bracketed = re.fullmatch(r"\[([0-9a-fA-F:]+)\](:[0-9]*)?", named)
    return bracketed[1] if bracketed else re.sub(r":[0-9]*$", "", named).lower()


class Site:
    """The request handlers and their shared state."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def app(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(middlewares=[guard, self._refuse])
        app.on_response_prepare.append(add_headers)
        app.add_routes([web.get(page.path, self._handler(page)) for page in PAGES])
        app.router.add_static("/static", Path(__file__).parent / "static")
        return app

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
        view = observation.view
        return {
            "observation": observation,
            "view": view,
            "strip": _figures(observation),
            "headline": headline(view),
            "troubles": _troubles(view),
            "page": page,
            "pages": PAGES,
            "url": url,
            "json_url": f"{url}{'&' if '?' in url else '?'}format=json",
        }

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


# The server.

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 8642


def serve(store: Store, port: int | None, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `on_ready` is called with the URL once the server listens.

    `port`: None means DEFAULT_PORT or any free one, 0 any free one. Raises OSError if the port is not available,
    StoreError if the run cannot be read.
    """
    asyncio.run(_serve(store, _listen(port), on_ready))


async def _serve(store: Store, sock: socket.socket, on_ready: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with listening(Site(Watch(store)).app(), lambda _: True, sock, None):
        on_ready(f"http://{LOOPBACK}:{sock.getsockname()[1]}/")
        await stop.wait()


def _listen(port: int | None) -> socket.socket:
    """Return a listening socket; `port` as in `serve`. Raises OSError."""
    try:
        return socket.create_server((LOOPBACK, DEFAULT_PORT if port is None else port))
    except OSError:
        if port is not None:
            raise
        return socket.create_server((LOOPBACK, 0))
