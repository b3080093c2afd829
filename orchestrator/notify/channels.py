"""The two ways out: a webhook in Slack's form, and a command. Neither can hold its caller up for longer than it is
given."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
from dataclasses import asdict
from typing import Protocol

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from orchestrator.notify.message import Message


class Undelivered(Exception):
    """A message did not arrive, or may not have. Says why without the URL, which is a secret."""


class Channel(Protocol):
    """One way out. `name` is its key in the cursor."""

    name: str

    def deliver(self, message: Message, limit_s: float, /) -> None:
        """Tell it within `limit_s` seconds. Raises Undelivered."""


class Webhook:
    """Posts `{"text": ...}`. Any answer of 200 to 299 says that it arrived; what else is in it is not read."""

    name = "webhook"

    def __init__(self, url: str) -> None:
        self._url = url

    def deliver(self, message: Message, limit_s: float) -> None:
        try:
            status = asyncio.run(self._post(slack_text(message), limit_s))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise Undelivered(type(error).__name__) from None
        if not 200 <= status < 300:
            raise Undelivered(f"HTTP status {status}")

    async def _post(self, text: str, limit_s: float) -> int:
        whole = aiohttp.ClientTimeout(total=limit_s)  # a server that answers a byte a second has no more either
        async with (
            aiohttp.TCPConnector(resolver=_Resolver()) as connector,
            aiohttp.ClientSession(connector=connector, timeout=whole, trust_env=True) as session,
            session.post(self._url, json={"text": text}, allow_redirects=False) as answer,
        ):
            return answer.status


class _Resolver(AbstractResolver):
    """Looks each name up in a thread that nobody waits for.

    The event loop's own would be waited for when the loop closes and when the process ends, for as long as a name
    server says nothing.
    """

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses. Raises OSError."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[list[ResolveResult]] = loop.create_future()

        def tell(answer: list[ResolveResult] | OSError) -> None:
            if found.done():
                return  # it was given up
            if isinstance(answer, OSError):
                found.set_exception(answer)
            else:
                found.set_result(answer)

        def look_up() -> None:
            try:
                answer: list[ResolveResult] | OSError = _addresses(host, port, family)
            except OSError as error:
                answer = error
            except UnicodeError:  # no name of a host
                answer = OSError("no such host name")
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(tell, answer)

        threading.Thread(target=look_up, name="webhook-name", daemon=True).start()
        return await found

    async def close(self) -> None:
        """It holds nothing."""


def _addresses(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    found = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    return [
        ResolveResult(hostname=host, host=str(at[0]), port=port, family=kind, proto=proto, flags=flags)
        for kind, _, proto, _, at in found
    ]


def slack_text(message: Message) -> str:
    """With its id, and with the three characters quoted that mean something to Slack."""
    text = f"{message.text} ({message.id})"
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


class Command:
    """Runs a program with the message as one line of JSON on its standard input. Exit code 0 says that it arrived.

    Args:
        argv: the program and its arguments; no shell is between.
        folder: where it runs; None: where the daemon does.
    """

    name = "command"

    def __init__(self, argv: tuple[str, ...], folder: str | None = None) -> None:
        self._argv = argv
        self._folder = folder

    def deliver(self, message: Message, limit_s: float) -> None:
        try:
            process = subprocess.Popen(
                self._argv,
                cwd=self._folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise Undelivered(f"{self._argv[0]}: {getattr(error, 'strerror', None) or error}") from None
        try:
            process.communicate(json.dumps(asdict(message)).encode() + b"\n", timeout=limit_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise Undelivered(f"{self._argv[0]} was not done within {limit_s:.0f} s") from None
        if process.returncode != 0:
            raise Undelivered(f"{self._argv[0]} ended with exit code {process.returncode}")
