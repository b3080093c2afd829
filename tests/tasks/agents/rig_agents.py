"""Agents of every kind, for `tests.tasks.agents`. Some write process ids into the folder that their row names."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def ask(base_url: str, api_key: str, messages: list[dict[str, str]], **more: Any) -> str:
    """One turn, with an HTTP client that does not ask again."""
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return str(json.loads(answer.read())["choices"][0]["message"]["content"])


async def answers(base_url: str, api_key: str, row: Row) -> float:
    """Two turns."""
    messages = [{"role": "user", "content": str(row["prompt"])}]
    for text in ("and then?", ""):
        said = await asyncio.to_thread(ask, base_url, api_key, messages)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": text}]
    return len(messages[1]["content"]) / 10


async def none(*_: Any) -> None:
    return None


def plain(*_: Any) -> int:
    return 1


async def raises(*_: Any) -> float:
    print("about to fail")
    raise ValueError("no\nluck")


async def exits(*_: Any) -> float:
    os._exit(3)


async def crashes(*_: Any) -> float:
    ctypes.string_at(0)
    return 1.0


async def text(*_: Any) -> str:
    return "0.5"


async def infinite(*_: Any) -> float:
    return float("inf")


async def talks(*_: Any) -> float:
    for _line in range(20_000):
        print("x" * 1000)
    print("the end")
    return 1.0


async def eats(*_: Any) -> float:
    return float(len(bytearray(4 << 30)))


def note(row: Row, *pids: int) -> None:
    part = Path(row["folder"], "part")
    part.write_text(json.dumps(pids))
    part.replace(Path(row["folder"], "pids"))


async def hangs(_base_url: str, _api_key: str, row: Row) -> float:
    """With a child in a session of its own, both deaf to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(
        [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"],
        start_new_session=True,
    )
    note(row, os.getpid(), child.pid)
    time.sleep(600)
    return 1.0


async def leaves_child(_base_url: str, _api_key: str, row: Row) -> float:
    """Ends itself and leaves a daemon."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    note(row, child.pid)
    return 0.25


async def kills_keeper(_base_url: str, _api_key: str, row: Row) -> float:
    """And the host, too, where its row says so; and leaves a daemon."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    note(row, child.pid)
    if row.get("host"):
        parent = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
    os.kill(os.getppid(), signal.SIGKILL)
    return 1.0


async def tells(_base_url: str, _api_key: str, row: Row) -> float:
    """Its environment, and random numbers."""
    import random
    import tempfile

    found = {"env": dict(os.environ), "random": random.random(), "tmp": tempfile.mkdtemp(), "cwd": os.getcwd()}
    Path(row["folder"], "told").write_text(json.dumps(found))
    return 1.0


def huge(*_: Any) -> float:
    return 1e39


def surrogate(*_: Any) -> float:
    raise ValueError("half a pair: \ud800")


def forks(*_: Any) -> float:
    """Both processes come to the end."""
    if child := os.fork():
        os.waitpid(child, 0)
        return 0.75
    return 0.25


def stops_keeper(_base_url: str, _api_key: str, row: Row) -> float:
    note(row, os.getpid())
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(600)
    return 1.0


def withholds_body(base_url: str, api_key: str, _: Row) -> float:
    """Begins a request and never ends it."""
    import socket

    host, port = base_url.removeprefix("http://").partition("/")[0].split(":")
    path = base_url.removeprefix(f"http://{host}:{port}")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {api_key}\r\n"
        connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        time.sleep(600)
    return 1.0


async def asks_for_ever(base_url: str, api_key: str, row: Row) -> float:
    """In several threads, whatever the answer is."""

    def ask_on() -> None:
        while True:
            try:
                ask(base_url, api_key, [{"role": "user", "content": "?"}], **row.get("more", {}))
            except urllib.error.HTTPError:
                continue

    await asyncio.gather(*[asyncio.to_thread(ask_on) for _ in range(8)])
    return 1.0


async def one_token(base_url: str, api_key: str, _: Row) -> float:
    """Two turns of one token each, as it wants them."""
    for text in ("a", "b"):
        await asyncio.to_thread(ask, base_url, api_key, [{"role": "user", "content": text}], max_tokens=1)
    return 1.0
