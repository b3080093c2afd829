"""Delivery of notifications: what a server or a program may do, and that none of it holds up the daemon."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from grpo_orch.orchestrator.notify import Command, DeliveryFailed, Message, Service, is_service_url
from tests.budget import HANG_S

MESSAGE = Message("demo-1/7.0", 7, 12.0, "demo", "s3://b/demo", "failed", "demo failed: <!channel> & co")


class Server:
    """A real HTTP server for one request, which it keeps; answers with `answer`, piece by piece."""

    def __init__(self, answer: Iterator[bytes]) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._answer = answer
        self.url = f"json://127.0.0.1:{self._socket.getsockname()[1]}/services/T0/B0/secret"
        self.received = b""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with closing(connection), suppress(OSError):
            while b"}" not in self.received:
                self.received += connection.recv(65536)
            for piece in self._answer:
                connection.sendall(piece)


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def test_service_receives_text_id_and_severity() -> None:
    server = Server(iter([OK]))
    Service("HOOK", server.url).deliver(MESSAGE, HANG_S)
    head, _, body = server.received.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /services/T0/B0/secret ")
    received = json.loads(body)
    assert received["message"] == "demo failed: <!channel> & co (demo-1/7.0)"
    assert received["type"] == "failure"


def drip() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nX-Slow: "
    while True:
        time.sleep(0.01)  # what a slow server does
        yield b"x"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (iter([b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"]), "404"),
        (iter([b"nonsense\r\n\r\n"]), "onnection error"),
        (iter([]), "onnection error"),
    ],
)
def test_refused_message_is_undelivered_with_reason_but_no_url(answer: Iterator[bytes], reason: str) -> None:
    server = Server(answer)
    with pytest.raises(DeliveryFailed, match=reason) as caught:
        Service("HOOK", server.url).deliver(MESSAGE, HANG_S)
    assert str(caught.value).startswith("HOOK: ")
    assert "secret" not in str(caught.value)


def test_service_that_never_finishes_is_killed_at_the_limit() -> None:
    with pytest.raises(DeliveryFailed, match="HOOK did not finish within 3 s"):
        Service("HOOK", Server(drip()).url).deliver(MESSAGE, 3.0)


@pytest.mark.parametrize(
    "url", ["not a url secret", "json://127.0.0.1:1/secret", "ftp://secret", "json://[secret"]
)
def test_unreachable_url_is_undelivered_and_not_quoted(url: str) -> None:
    with pytest.raises(DeliveryFailed) as caught:
        Service("HOOK", url).deliver(MESSAGE, HANG_S)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "known"),
    [
        ("https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ", True),
        ("json://example.com/path", True),
        ("mailto://user:password@example.com", True),
        ("slack://x", False),
        ("nonsense://secret", False),
        ("", False),
    ],
)
def test_service_urls_are_recognised_without_sending(
    url: str, known: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert is_service_url(url) is known
    assert "secret" not in "".join(capfd.readouterr())


def test_command_reads_the_message_as_json(tmp_path: Path) -> None:
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


def test_missing_or_failing_command_is_undelivered(tmp_path: Path) -> None:
    Command(("true",)).deliver(MESSAGE, HANG_S)
    with pytest.raises(DeliveryFailed, match="exit code 3"):
        Command(("sh", "-c", "exit 3")).deliver(MESSAGE, HANG_S)
    for missing in ("grpo-orch-no-such-program", str(tmp_path), "nul\0"):
        with pytest.raises(DeliveryFailed):
            Command((missing,)).deliver(MESSAGE, HANG_S)


def test_hanging_command_is_killed_with_its_process_group(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "alive")
    end = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    hung = Command(("sh", "-c", "exec 3>alive; sleep 100000 & wait"), str(tmp_path))
    with pytest.raises(DeliveryFailed, match="did not finish"):
        hung.deliver(MESSAGE, 0.5)
    os.set_blocking(end, True)
    assert os.read(end, 1) == b""  # nobody is left who holds the other end; while one does, this waits
    os.close(end)
