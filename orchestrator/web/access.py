"""Which requests are answered, and what every answer tells a browser.

The page is served on this machine's own address alone and asks nobody for a secret; from elsewhere it is reached
by `ssh -L`. A browser must mean that address by name: a page of somebody else's cannot have its own name resolve
to 127.0.0.1 and read here.
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
    """Answer, or report why not."""
    if _host_of(request) not in LOCAL_NAMES:
        return web.Response(status=421, text="not the name of this server: ask for 127.0.0.1 or localhost\n")
    if request.method not in ("GET", "HEAD"):
        allowed = {hdrs.ALLOW: "GET, HEAD"}
        return web.Response(status=405, text="nothing can be changed here\n", headers=allowed)
    return await handler(request)


async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
    """For every answer, errors among them."""
    response.headers.update(HEADERS)
    response.headers.setdefault(hdrs.CACHE_CONTROL, "no-store")
    response.headers.pop(hdrs.SERVER, None)


def _host_of(request: web.Request) -> str:
    """The name in `Host`, without its port."""
    named = request.headers.get(hdrs.HOST, "")
    bracketed = re.fullmatch(r"\[([0-9a-fA-F:]+)\](:[0-9]*)?", named)
    return bracketed[1] if bracketed else re.sub(r":[0-9]*$", "", named).lower()
