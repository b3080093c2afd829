"""The run page beside a real daemon: it ends when that does, however it ends, and not the other way round."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.home import run_digest, save_run_digest
from tests.budget import HANG_S, until
from tests.rigs.store.server import free_port
from tests.stand_ins.control_plane import Run

pytestmark = pytest.mark.slow


@dataclass
class Steered:
    """A run whose daemon finds no machine to have, and goes on trying."""

    store: Store
    environment: dict[str, str]
    url: str = ""
    daemon: int = 0

    def cli(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "grpo_orch", *words]
        return subprocess.run(argv, env=self.environment, capture_output=True, text=True, timeout=HANG_S)

    def begins(self) -> None:
        done = self.cli("resume", self.store.url, "--detach", "--web-port", str(free_port()))
        assert done.returncode == 0, done.stdout + done.stderr
        self.url = next(word for word in done.stdout.split() if word.startswith("http://127.0.0.1:"))
        lease = documents.LEASE.read(self.store)
        assert lease is not None
        self.daemon = lease.pid

    @property
    def page(self) -> int:
        children = Path(f"/proc/{self.daemon}/task/{self.daemon}/children").read_text().split()
        return next(
            int(one)
            for one in children
            if "grpo_orch.orchestrator.web" in Path(f"/proc/{one}/cmdline").read_text()
        )

    def shows(self) -> bool:
        with suppress(URLError, ConnectionError), urlopen(self.url + "?format=json", timeout=HANG_S) as answer:
            return bool(json.loads(answer.read())["run"]["name"] == "sim")
        return False


def is_there(pid: int) -> bool:
    """A process that nobody has waited for yet has ended all the same."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def steered(tmp_path: Path) -> Iterator[Steered]:
    store = Run(tmp_path / "store").create().store
    environment = {
        **os.environ,
        "GRPO_ORCH_HOME": str(tmp_path / "home"),
        "GRPO_ORCH_NODE_PYTHON": str(tmp_path / "there-is-none"),
    }
    made = Steered(store, environment)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_ORCH_HOME", environment["GRPO_ORCH_HOME"])
        save_run_digest(store.url, run_digest(store.get(layout.RUN)))
    try:
        yield made
    finally:
        with suppress(ProcessLookupError):
            if made.daemon:
                os.kill(made.daemon, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_run_page_ends_with_its_daemon(steered: Steered, number: signal.Signals) -> None:
    steered.begins()
    until("so", steered.shows)
    page = steered.page
    os.kill(steered.daemon, number)
    until("so", lambda: not is_there(page))
    assert not steered.shows()


def test_a_page_that_dies_is_all_that_dies(steered: Steered) -> None:
    steered.begins()
    until("so", steered.shows)
    os.kill(steered.page, signal.SIGKILL)
    until("so", lambda: not steered.shows())
    before = documents.LEASE.read(steered.store)
    assert before is not None
    until(
        "as it is to be beside the daemon",
        lambda: (now := documents.LEASE.read(steered.store)) is not None and now != before,
    )
    assert is_there(steered.daemon)


def test_port_in_use_is_one_line_and_nothing_is_started(steered: Steered) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = steered.cli("resume", steered.store.url, "--detach", "--web-port", port)
    assert done.returncode == 2
    assert f"--web-port {port}: cannot listen on 127.0.0.1: Address already in use" in done.stderr
    assert documents.LEASE.read(steered.store) is None
