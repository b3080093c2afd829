"""A request as the guard has it from vLLM's server (ASGI): whose it is, what is in it, and how it is answered."""

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
    """What of a completion's body has to be known here."""

    model: str | None = None


async def ask(app: App, scope: Scope, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """Status and body of the server's own answer, past the guard."""
    status, said = 500, b""
    messages: asyncio.Queue[Message] = asyncio.Queue()  # in which vLLM waits for the client to go: it stays
    messages.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})

    async def send(message: Message) -> None:
        nonlocal status, said
        if message["type"] == "http.response.start":
            status = message["status"]
        said += message.get("body", b"")

    headers = [(b"content-type", b"application/json")]
    asked = {**scope, "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers}
    try:
        await app(asked, messages.get, send)
    except ValueError as error:  # a log-probability that is no number cannot be written as JSON
        return 500, str(error).encode()
    return status, said


def is_local(scope: Scope) -> bool:
    """Whether the peer is on this machine: it came over loopback, or from the address that it went to."""
    client = (scope.get("client") or [None])[0]
    server = (scope.get("server") or [None])[0]
    return client is not None and (client in _LOOPBACK or client == server)


def bears(headers: dict[str, bytes], secret: str) -> bool:
    """Whether who asks has the secret."""
    return hmac.compare_digest(headers.get("authorization", b""), f"Bearer {secret}".encode())


async def body_of(receive: Receive) -> bytes:
    """A request's body, cut soon after BODY_SIZE_MAX bytes."""
    body = b""
    while len(body) <= BODY_SIZE_MAX:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    return body


async def model_of(receive: Receive) -> tuple[str | None, Receive]:
    """The model that a completion's body names, None if it names none, and what gives vLLM the same body."""
    messages = [await receive()]
    while messages[-1].get("more_body", False):
        messages.append(await receive())
    content = b"".join(message.get("body", b"") for message in messages)
    try:
        model = msgspec.json.decode(content, type=_Named).model
    except msgspec.DecodeError:
        model = None

    async def again() -> Message:
        return messages.pop(0) if messages else await receive()

    return model, again


async def answer(send: Send, status: int, text: str) -> None:
    """Answer with a text; 204 has none."""
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(text.encode())).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [] if status == 204 else headers})
    await send({"type": "http.response.body", "body": text.encode()})
