"""Who may look, and what every answer says to a browser.

On this machine's own address nobody is asked, but a browser must mean that address by name: a page of somebody
else's cannot have its own name resolve to 127.0.0.1 and read here. On any other address a person shows the run's
secret once, in a form or as `?token=`, and has a cookie that is worth nothing elsewhere; a program sends it as to
the gateway, `Authorization: Bearer`.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from checkpoint.security import identity

LOGIN = "/login"
COOKIE = "grpo_orch_web"
LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
FORM_SIZE_MAX = 4096
_HERE = re.compile(r"/(?![/\\])[!-\[\]-~]*")  # a path of this server; a browser takes a backslash for a slash
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


class Access:
    """Lets requests in.

    Args:
        host: the address that is listened on.
        secret: the run's; None: nobody is asked for it, which is for this machine's own address alone.
        form: the page that asks for the secret, for the path to go on to.
    """

    def __init__(self, host: str, secret: str | None, form: Callable[[str, str], web.Response]) -> None:
        if secret is None and identity.protects(host):
            raise ValueError(f"{host} can be reached from elsewhere: it takes the run's secret")
        self._secret = secret
        self._form = form
        self._session = secrets.token_urlsafe(32)
        self._local = not identity.protects(host)

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer, or say why not."""
        if self._local and _host_of(request) not in LOCAL_NAMES:
            return web.Response(status=421, text="not the name of this server: ask for 127.0.0.1 or localhost\n")
        if request.method not in ("GET", "HEAD") and (self._secret is None or request.path != LOGIN):
            return web.Response(
                status=405, text="nothing can be changed here\n", headers={hdrs.ALLOW: "GET, HEAD"}
            )
        if self._secret is None or request.path.startswith("/static/") or self._is_known(request):
            return await handler(request)
        if request.method == "POST":
            return await self._log_in(request)
        if "token" in request.query:
            further = str(request.rel_url.without_query_params("token"))
            return self._admit(request.query["token"], further)
        return self._form(request.path_qs if request.path != LOGIN else "/", "")

    def _is_known(self, request: web.Request) -> bool:
        shown = request.headers.get(hdrs.AUTHORIZATION, "").removeprefix("Bearer ")
        return _same(request.cookies.get(COOKIE, ""), self._session) or _same(shown, self._secret or "")

    async def _log_in(self, request: web.Request) -> web.StreamResponse:
        if (request.content_length or 0) > FORM_SIZE_MAX:
            return web.Response(status=413)
        try:
            said = await request.post()
        except (LookupError, ValueError, HttpProcessingError):  # no such charset, not text of it, no such form
            return web.Response(status=400, text="that is no form\n")
        return self._admit(str(said.get("token", "")).strip(), str(said.get("next", "/")))

    def _admit(self, shown: str, further: str) -> web.Response:
        if not _same(shown, self._secret or ""):
            return self._form(further if _HERE.fullmatch(further) else "/", "That is not this run's secret.")
        answer = web.Response(status=303, headers={hdrs.LOCATION: further if _HERE.fullmatch(further) else "/"})
        answer.set_cookie(
            COOKIE, self._session, httponly=True, samesite="Strict", secure=not self._local, path="/"
        )
        return answer


async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
    """For every answer, errors among them."""
    response.headers.update(HEADERS)
    response.headers.setdefault(hdrs.CACHE_CONTROL, "no-store")
    response.headers.pop(hdrs.SERVER, None)


def _same(shown: str, expected: str) -> bool:
    return bool(expected) and hmac.compare_digest(shown.encode(errors="surrogatepass"), expected.encode())


def _host_of(request: web.Request) -> str:
    """The name in `Host`, without its port."""
    named = request.headers.get(hdrs.HOST, "")
    bracketed = re.fullmatch(r"\[([0-9a-fA-F:]+)\](:[0-9]*)?", named)
    return bracketed[1] if bracketed else re.sub(r":[0-9]*$", "", named).lower()
