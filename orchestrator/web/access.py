"""Who may look, what every answer says to a browser, and TLS for browsers.

On this machine's own address nobody is asked, but a browser must mean that address by name: a page of somebody
else's cannot have its own name resolve to 127.0.0.1 and read here. On any other address a person shows the
run's secret once, in a form or as `?token=`, and has a cookie that is worth nothing elsewhere; a program sends
it as to the gateway, `Authorization: Bearer`.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import ssl
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

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


# TLS where the page is served on another address than this machine's own. The run's parties know each other by an
# Ed25519 certificate (`checkpoint.security.identity`), which browsers do not take. So this is another key, from
# the same secret: it is the same at each start, and a browser that was told once to trust it does so until the
# run's end. It keeps the secret off the wire; that the server is the right one shows in the fingerprint, which
# `grpo-orch web` prints.

_KEY_INFO = b"grpo-orch web key 1"
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256
_NOT_BEFORE = datetime(2000, 1, 1, tzinfo=UTC)
_NOT_AFTER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


def browser_context(secret: str) -> ssl.SSLContext:
    """Serves browsers, which show no certificate of their own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    key = _key(secret)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with os.fdopen(os.memfd_create("certificate"), "wb", buffering=0) as memory:  # ssl reads keys from files alone
        memory.write(private + certificate(secret).public_bytes(Encoding.PEM))
        context.load_cert_chain(f"/proc/self/fd/{memory.fileno()}")
    return context


def certificate(secret: str) -> x509.Certificate:
    """The same bytes at each start: its signature is deterministic (RFC 6979)."""
    key, name = _key(secret), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "grpo-orch web")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, _NOT_BEFORE, _NOT_AFTER)
    return builder.sign(key, SHA256(), ecdsa_deterministic=True)


def fingerprint(secret: str) -> str:
    """SHA-256 of the certificate, as browsers show it."""
    return certificate(secret).fingerprint(SHA256()).hex(":").upper()


def _key(secret: str) -> ec.EllipticCurvePrivateKey:
    seed = HKDF(SHA256(), length=48, salt=None, info=_KEY_INFO).derive(secret.encode())
    return ec.derive_private_key(1 + int.from_bytes(seed) % (_ORDER - 1), ec.SECP256R1())
