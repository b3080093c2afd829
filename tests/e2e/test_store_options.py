"""A store that needs options, which go from run.yaml to every process of the run and nowhere else.

moto's S3 server, a real daemon, and machines whose work is a stand-in that only sleeps.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from grpo_orch.checkpoint.store.run_store import OPTIONS_ENV
from grpo_orch.policies.model import exit_codes
from tests.budget import HANG_S
from tests.e2e.small_run import SmallRun
from tests.rigs.store.fault_proxy import Answer, FaultProxy, IgnoreConditions, fault_proxy
from tests.rigs.store.server import S3Server

NODES = ("trainer-0-i1", "rollout-0-i1", "rollout-1-i1")


class S3Run(SmallRun):
    """A run whose store is below a bucket. Only its run.yaml says how to reach it."""

    def __init__(self, folder: Path, server: S3Server) -> None:
        super().__init__(folder, server)
        self.env = {name: value for name, value in self.env.items() if not name.startswith("AWS_")}
        self.env["HOME"] = str(folder)
        self.secret = server.secret_key
        self.said: list[str] = []

    def cli(
        self, *arguments: str, code: int | None = 0, timeout_s: float = HANG_S
    ) -> subprocess.CompletedProcess[str]:
        done = super().cli(*arguments, code=code, timeout_s=timeout_s)
        self.said += [done.stdout, done.stderr]
        return done

    def written_at_home(self) -> list[Path]:
        return [path for path in Path(self.env["GRPO_ORCH_HOME"]).rglob("*") if path.is_file()]


@pytest.fixture
def run(tmp_path: Path, proxy: FaultProxy) -> Iterator[S3Run]:
    made = S3Run(tmp_path / "run", S3Server(proxy.endpoint, "somebody", "hunter2-Zm9vYmFy"))
    yield made
    proxy.heal()
    made.end()


def test_a_secret_reaches_the_processes_and_nothing_that_is_written(run: S3Run) -> None:
    run.start()
    for pid in (run.daemon_pid, *(pid for node in NODES for pid in run.pids(node))):
        assert json.loads(environment(run, pid)[OPTIONS_ENV]) == run.options
        assert run.secret not in " ".join(psutil.Process(pid).cmdline())
    os.kill(run.daemon_pid, signal.SIGKILL)
    run.cli("resume", run.url, "-d")
    run.until("the new daemon ticks", lambda: run.json("status", run.url)["daemon"]["alive"])
    run.cli("report", run.url)
    run.cli("down", run.url)

    secret = run.secret.encode()
    stored = {one.key: run.store.get(one.key) for one in run.store.entries("")}
    assert {"run.json", "journal/000000000001.json"} <= stored.keys()
    assert [key for key, data in stored.items() if secret in data] == []
    assert any(path.name == "daemon.log" and path.read_bytes() for path in run.written_at_home())
    (kept,) = (path for path in run.written_at_home() if secret in path.read_bytes())
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert run.secret not in "".join(run.said)


def environment(run: SmallRun, pid: int) -> dict[str, str]:
    """Of a process, once it is not in the middle of execve(2) any more, where it reads as empty."""
    found: dict[str, str] = {}
    run.until(f"the environment of {pid}", lambda: bool(found.update(psutil.Process(pid).environ()) or found))
    return found


@pytest.mark.slow
def test_on_another_machine_run_yaml_or_the_environment_is_needed(run: S3Run, proxy: FaultProxy) -> None:
    run.start()
    run.cli("down", run.url)
    here = run.env["GRPO_ORCH_HOME"]
    run.env["GRPO_ORCH_HOME"] = f"{here}-elsewhere"
    with fault_proxy(proxy.endpoint) as closed:
        closed.inject(Answer(403, "AccessDenied"))
        run.env |= {"AWS_ENDPOINT_URL": closed.endpoint, "AWS_REGION": "us-east-1"}
        run.env |= {"AWS_ACCESS_KEY_ID": "another", "AWS_SECRET_ACCESS_KEY": "another"}
        refused = run.cli("status", run.url, code=exit_codes.FAILED)
        assert len(refused.stderr.strip().splitlines()) == 1
        assert run.json("status", str(run.yaml))["phase"] == "stopped"
        run.env[OPTIONS_ENV] = json.dumps(run.options)
        assert run.json("status", run.url)["phase"] == "stopped"
    assert run.written_at_home() == []
    run.env["GRPO_ORCH_HOME"] = here  # whose machines are to be ended


@pytest.mark.slow
@pytest.mark.parametrize("command", ["up", "resume"])
def test_a_store_that_is_refused_is_left_as_it_was(run: S3Run, proxy: FaultProxy, command: str) -> None:
    if command == "resume":
        run.start()
        run.cli("down", run.url)
    before, written = run.store.entries(""), run.written_at_home()
    proxy.inject(IgnoreConditions())
    words = ["up", str(run.yaml), "-y", "-d"] if command == "up" else ["resume", run.url, "-d"]
    refused = run.cli(*words, code=exit_codes.FAILED)
    assert len(refused.stderr.strip().splitlines()) == 1
    assert run.url in refused.stderr
    assert [one.key for one in run.store.entries("")] == [one.key for one in before]
    assert command == "resume" or run.written_at_home() == written == [], "no daemon, no token, no options"
