"""Those who do not belong to a run, and what they are told at one of its ports."""

from __future__ import annotations

import socket
import ssl
from datetime import UTC, datetime
from unittest.mock import patch

from grpo_orch.checkpoint.security import identity
from tests.budget import HANG_S

ALERT = 0x15  # TLS's own way to say no: the first byte of it


def strangers(secret: str) -> dict[str, ssl.SSLContext | None]:
    """How they may come to the run with this secret; None is plain HTTP."""
    trusting = {
        "without a certificate": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        "without a certificate, in TLS 1.2": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        "of another run": identity.client_context(f"{secret}, nearly"),
        "with a certificate that the run's key has made, but not the run's": _expired(secret),
    }
    trusting["without a certificate, in TLS 1.2"].maximum_version = ssl.TLSVersion.TLSv1_2
    for context in trusting.values():
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # they take any server
    return {"in plain HTTP": None, **trusting}


def _expired(secret: str) -> ssl.SSLContext:
    with patch.object(identity, "NOT_AFTER", datetime(2001, 1, 1, tzinfo=UTC)):
        return identity.client_context(secret)


def knock(host: str, port: int, token: str, tls: ssl.SSLContext | None) -> bytes:
    """Send a whole request with the run's token; return all that comes back above TLS.

    Raises TimeoutError when the connection is left open without an answer.
    """
    request = f"GET /health HTTP/1.1\r\nHost: run\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
    heard = b""
    with socket.create_connection((host, port), timeout=HANG_S) as plain:
        try:
            sock = plain if tls is None else tls.wrap_socket(plain)
            sock.sendall(request.encode())
            while some := sock.recv(65536):
                heard += some
        except (ssl.SSLError, ConnectionError):
            pass
    return heard


def check_closed(host: str, port: int, token: str) -> None:
    """Whoever knows the run's secret is answered there; no stranger is told a byte of HTTP."""
    assert knock(host, port, token, identity.client_context(token)).startswith(b"HTTP/1.1 200")
    for who, tls in strangers(token).items():
        heard = knock(host, port, token, tls)
        assert heard == b"" or heard[0] == ALERT, f"a client {who} heard {heard!r}"
