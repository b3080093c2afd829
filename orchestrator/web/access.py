"""Decide which requests are answered, and set security headers on every response.

The page listens on the loopback address only and needs no secret; use `ssh -L` from other machines. The Host
header must name the loopback address, so that a foreign site whose name resolves to 127.0.0.1 cannot read the page
(DNS rebinding).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

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
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


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
