"""Read, authenticate and answer ASGI requests in the guard of vLLM's server."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_SIZE_MAX = 64 * 1024
_LOOPBACK = ("127.0.0.1", "::1")


class _Named(msgspec.Struct):
    """The field of a completion's body that the guard needs."""

    model: str | None = None


async def post(app: App, scope: Scope, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """Send a request to the server from inside the guard. Returns the response's status and body."""
    status, content = 500, b""
    messages: asyncio.Queue[Message] = asyncio.Queue()  # vLLM waits on it for a disconnect, which never comes
    messages.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})

    async def send(message: Message) -> None:
        nonlocal status, content
        if message["type"] == "http.response.start":
            status = message["status"]
        content += message.get("body", b"")

    headers = [(b"content-type", b"application/json")]
    request = {**scope, "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers}
    try:
        await app(request, messages.get, send)
    except ValueError as error:  # JSON cannot represent a log-probability that is NaN
        return 500, str(error).encode()
    return status, content


def is_local(scope: Scope) -> bool:
    """Return whether the client is on this machine: its address is loopback or the server's own."""
    client = (scope.get("client") or [None])[0]
    server = (scope.get("server") or [None])[0]
    return client is not None and (client in _LOOPBACK or client == server)


def has_secret(headers: dict[str, bytes], secret: str) -> bool:
    """Return whether the request is authorized by the secret."""
    return hmac.compare_digest(headers.get("authorization", b""), f"Bearer {secret}".encode())


async def body_of(receive: Receive) -> bytes:
    """Read a request's body, truncated soon after BODY_SIZE_MAX bytes."""
    body = b""
    while len(body) <= BODY_SIZE_MAX:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    return body


async def model_of(receive: Receive) -> tuple[str | None, Receive]:
    """Read the model from a completion's body, or None. Also returns a `receive` that gives vLLM the same body."""
    messages = [await receive()]
    while messages[-1].get("more_body", False):
        messages.append(await receive())
    content = b"".join(message.get("body", b"") for message in messages)
    try:
        model = msgspec.json.decode(content, type=_Named).model
    except msgspec.DecodeError:
        model = None

    async def replay() -> Message:
        return messages.pop(0) if messages else await receive()

    return model, replay


async def answer(send: Send, status: int, text: str) -> None:
    """Answer with a text; empty for 204."""
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(text.encode())).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [] if status == 204 else headers})
    await send({"type": "http.response.body", "body": text.encode()})
