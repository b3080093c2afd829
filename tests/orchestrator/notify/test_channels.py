"""What a server or a program can do to the notifier: nothing but not be told."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from orchestrator.notify.channels import Command, Undelivered, Webhook
from orchestrator.notify.message import Message
from tests.budget import HANG_S

MESSAGE = Message("demo-1/7.0", 7, 12.0, "demo", "s3://b/demo", "failed", "demo failed: <!channel> & co")


class Server:
    """Real sockets; answers each request with `answer`, piece by piece, and keeps what it was sent."""

    def __init__(self, answer: Iterator[bytes]) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._answer = answer
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/services/T0/B0/secret"
        self.heard = b""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with closing(connection), suppress(OSError):
            while b"}" not in self.heard:
                self.heard += connection.recv(65536)
            for piece in self._answer:
                connection.sendall(piece)


def test_slack_gets_its_own_form() -> None:
    server = Server(iter([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"]))
    Webhook(server.url).deliver(MESSAGE, HANG_S)
    head, _, body = server.heard.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /services/T0/B0/secret ")
    assert json.loads(body) == {"text": "demo failed: &lt;!channel&gt; &amp; co (demo-1/7.0)"}


def test_an_answer_without_an_end_is_not_read() -> None:
    begun = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + 65536 * b"x" + b"\r\n"
    Webhook(Server(iter([begun, *1000 * [chunk]])).url).deliver(MESSAGE, HANG_S)


def drip() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nX-Slow: "
    while True:
        time.sleep(0.01)  # what a slow server does
        yield b"x"


@pytest.mark.parametrize(
    ("answer", "limit_s", "why"),
    [
        (iter([b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"]), HANG_S, "HTTP status 404"),
        (iter([b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n"]), HANG_S, "HTTP status 302"),
        (iter([b"nonsense\r\n\r\n"]), HANG_S, "Error"),
        (iter([b"HTTP/1.1 200 OK\r\nX: "]), HANG_S, "Error"),
        (drip(), 0.3, "Timeout"),
    ],
)
def test_what_no_server_said_yes_to_is_undelivered_and_names_no_url(
    answer: Iterator[bytes], limit_s: float, why: str
) -> None:
    server = Server(answer)
    with pytest.raises(Undelivered, match=why) as caught:
        Webhook(server.url).deliver(MESSAGE, limit_s)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["not a url secret", "http://127.0.0.1:1/secret", "ftp://secret", "http://[secret"]
)
def test_a_url_that_leads_nowhere_is_undelivered(url: str) -> None:
    with pytest.raises(Undelivered) as caught:
        Webhook(url).deliver(MESSAGE, HANG_S)
    assert "secret" not in str(caught.value)


NO_NAME_SERVER = """
import socket, threading
from orchestrator.notify.channels import Undelivered, Webhook
from orchestrator.notify.message import Message

socket.getaddrinfo = lambda *_, **__: threading.Event().wait()
message = Message("demo-1/7.0", 7, 12.0, "demo", "s3://b/demo", "failed", "demo failed")
try:
    Webhook("http://hooks.example.com/secret").deliver(message, 0.3)
except Undelivered as error:
    print(error)
"""


def test_a_name_server_that_says_nothing_has_no_more_time_and_keeps_no_daemon_from_ending() -> None:
    argv = [sys.executable, "-c", NO_NAME_SERVER]
    ended = subprocess.run(argv, timeout=HANG_S, capture_output=True, check=True)
    assert b"Timeout" in ended.stdout
    assert b"secret" not in ended.stdout + ended.stderr


def test_a_server_is_found_by_its_name() -> None:
    server = Server(iter([b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]))
    Webhook(server.url.replace("127.0.0.1", "localhost")).deliver(MESSAGE, HANG_S)
    assert b"\r\nHost: localhost:" in server.heard


def test_a_name_that_nobody_has_is_undelivered(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(Undelivered, match="DNSError"):
        Webhook("http://hooks.example.com/secret").deliver(MESSAGE, HANG_S)


def test_a_command_gets_the_message_as_json(tmp_path: Path) -> None:
    keep = "import sys; open('told', 'w').write(sys.stdin.read())"
    Command((sys.executable, "-c", keep), str(tmp_path)).deliver(MESSAGE, HANG_S)
    told = json.loads((tmp_path / "told").read_text())
    assert told == {
        "id": "demo-1/7.0",
        "number": 7,
        "time_s": 12.0,
        "run": "demo",
        "store": "s3://b/demo",
        "kind": "failed",
        "text": "demo failed: <!channel> & co",
    }


def test_a_command_that_reads_nothing_fails_or_is_not_there_harms_nothing(tmp_path: Path) -> None:
    Command(("true",)).deliver(MESSAGE, HANG_S)
    with pytest.raises(Undelivered, match="exit code 3"):
        Command(("sh", "-c", "exit 3")).deliver(MESSAGE, HANG_S)
    for missing in ("grpo-orch-no-such-program", str(tmp_path), "nul\0"):
        with pytest.raises(Undelivered):
            Command((missing,)).deliver(MESSAGE, HANG_S)


def test_a_command_that_hangs_goes_with_all_its_processes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "alive")
    end = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    hung = Command(("sh", "-c", "exec 3>alive; sleep 100000 & wait"), str(tmp_path))
    with pytest.raises(Undelivered, match="was not done"):
        hung.deliver(MESSAGE, 0.5)
    os.set_blocking(end, True)
    assert os.read(end, 1) == b""  # nobody is left who holds the other end; while one does, this waits
    os.close(end)
