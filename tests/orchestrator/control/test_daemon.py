"""A daemon's process: its log, its output, its last words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store import layout
from grpo_orch.orchestrator.control import launcher
from grpo_orch.orchestrator.home import run_digest, save_run_digest
from grpo_orch.policies.model.events import RunCreated, RunMoved
from grpo_orch.policies.model.spec import Notify
from grpo_orch.policies.model.vocabulary import RunPhase
from tests.budget import HANG_S
from tests.rigs.locales import ASCII_LOCALE
from tests.stand_ins.control_plane import Run
from tests.stand_ins.world import spec

BUG = """
from grpo_orch.orchestrator.control import daemon
daemon.log_as_json()
try:
    {}["missing"]
except KeyError:
    daemon.log.exception("tick_failed")
"""


def test_a_bug_is_logged_with_its_traceback_and_the_moment() -> None:
    done = subprocess.run([sys.executable, "-c", BUG], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    assert (said["event"], said["level"]) == ("tick_failed", "error")
    assert "KeyError: 'missing'" in said["exception"]
    assert datetime.fromisoformat(said["timestamp"]).utcoffset() is not None


PRINTS = r"print('yan\u0131t \u2713', chr(0xD83D))"


def test_process_prints_any_text_in_an_ascii_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ASCII_LOCALE.items():
        monkeypatch.setenv(name, value)
    log = tmp_path / "log"
    assert launcher.spawn(["-c", PRINTS], log).wait() == 0
    assert log.read_text("utf-8") == "yanıt ✓ \\ud83d\n"


# A delivery may take long on a busy machine.
PATIENT = f"""
import sys
from grpo_orch.orchestrator import notify
from grpo_orch.orchestrator.control import daemon
daemon.DRAIN_S = {HANG_S}
notify.Notifier.__init__.__defaults__ = ({HANG_S}, notify.RETRY_S, notify.RETRY_MAX_S)
sys.exit(daemon.main())
"""


def test_failed_run_is_notified_before_its_daemon_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []

    class Service(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path / "home"))
    notify = Notify(url_env=("HOOK",), command=("sh", "-c", "cat > told; env > environment"))
    run = Run(tmp_path / "store", replace(spec(), notify=notify)).create()
    store = run.store
    save_run_digest(store.url, run_digest(store.get(layout.RUN)))
    run.happens(RunCreated("sim", "sim-0"), RunMoved(RunPhase.FAILED, "the trainer failed 5 times"))
    with HTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"json://127.0.0.1:{server.server_port}/secret"
        words = [sys.executable, "-c", PATIENT, store.url, "up"]
        done = subprocess.run(
            words, env={**os.environ, "HOOK": url}, capture_output=True, text=True, timeout=HANG_S, check=True
        )
        server.shutdown()
    assert [json.loads(body)["message"] for body in heard] == [
        "sim failed: the trainer failed 5 times (sim-0/2.1)"
    ]
    assert '"id": "sim-0/2.1"' in (tmp_path / "told").read_text()
    told = documents.NOTIFIED.read(store)
    assert told is not None
    assert told.sent == {"HOOK": 3, "command": 3}
    assert url not in (tmp_path / "environment").read_text() + done.stdout + done.stderr
