"""Writes to one object of Google Cloud Storage: not more than one a second, whoever writes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import pytest

from grpo_orch.checkpoint.records.metrics import MetricsRow, MetricsWriter
from grpo_orch.checkpoint.store import run_store
from grpo_orch.checkpoint.store.run_store import Pace, Store
from grpo_orch.policies.tick.snapshot import Trainer
from grpo_orch.tasks.storing.heartbeat import Heartbeat


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, for_s: float) -> None:
        self.now_s += for_s


def test_writes_to_one_name_are_spaced_and_others_are_not() -> None:
    fake = Time()
    held = Pace(1.0, fake.clock, fake.sleep)
    written: list[tuple[str, float]] = []
    for key in ("a", "b", "a", "a", "c"):
        held.wait(key)
        written.append((key, fake.now_s - 100))
    assert written == [("a", 0), ("b", 0), ("a", 1), ("a", 2), ("c", 2)]
    fake.sleep(5)
    held.wait("a")
    assert fake.now_s == 107, "long ago is no reason to wait"


def test_the_second_of_two_writers_waits_for_the_first() -> None:
    slept: list[float] = []
    held = Pace(1.0, lambda: 100.0, slept.append)
    for _ in range(3):
        held.wait("a")
    assert slept == [1.0, 2.0]


class Google(BaseHTTPRequestHandler):
    """As much of Google's API as a write needs; tells `server.puts` of each."""

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.puts.append(unquote(self.path.partition("?")[0]))  # type: ignore[attr-defined]
        self._answer(200)

    def do_GET(self) -> None:
        self._answer(200 if "?" in self.path else 404)

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def _answer(self, status: int) -> None:
        body = b"<ListBucketResult></ListBucketResult>" if status == 200 else b""
        self.send_response(status)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def google() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Google)
    server.puts = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_trainers_overwrites_are_spaced_out(google: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(run_store.Pace.__init__, "__defaults__", (lambda: 100.0, slept.append))
    key = {"gcs_base_url": f"http://127.0.0.1:{google.server_port}", "disable_oauth": True}
    key |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    options = {"service_account_key": json.dumps(key), "allow_http": "true"}
    store = Store("gs://bucket/run", options=options, retry_s=5.0)
    heartbeat = Heartbeat(store, Trainer("trainer-0-i1", 1, 0, 0, 0, "starting", 0.0))
    heartbeat.start()
    heartbeat.stop("done")
    assert len(slept) >= 1, "two beats within a second"
    slept.clear()
    writer = MetricsWriter(store)
    for step in (1, 2, 3):
        writer.append(MetricsRow(0, step, 1.0, 1, {}))
    assert slept == [1.0, 2.0]
    assert google.puts.count("/bucket/run/metrics/0000/00000000.jsonl") == 3  # type: ignore[attr-defined]
