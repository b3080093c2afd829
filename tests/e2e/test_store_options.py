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
import yaml

from checkpoint.store.run_store import OPTIONS_ENV, Store
from policies.model import exit_codes
from policies.model.vocabulary import NodePhase
from tests.budget import HANG_S
from tests.e2e.harness import Run
from tests.e2e.test_control import STAND_IN, small_spec
from tests.rigs.store.fault_proxy import Answer, FaultProxy, IgnoreConditions, fault_proxy
from tests.stand_ins.earlier_trainer import leave_heartbeat

NODES = ("trainer-0-i1", "rollout-0-i1", "rollout-1-i1")


class S3Run(Run):
    """A run whose store is below a bucket. Only its run.yaml says how to reach it."""

    def __init__(self, folder: Path, url: str, options: dict[str, str]) -> None:
        super().__init__(folder, small_spec(), STAND_IN)
        (folder / "rewards.py").write_text("def one(completions, **kwargs):\n    return [1.0]\n")
        self.url, self.options = url, options
        self.yaml.write_text(yaml.safe_dump({**small_spec(), "storage": {"url": url, "options": options}}))
        self.env = {name: value for name, value in self.env.items() if not name.startswith("AWS_")}
        self.env["HOME"] = str(folder)
        self.said: list[str] = []

    @property
    def store(self) -> Store:
        return Store(self.url, retry_s=1.0, options=self.options)

    @property
    def secret(self) -> str:
        return str(self.options["secret_access_key"])

    def cli(
        self, *arguments: str, code: int | None = 0, timeout_s: float = HANG_S
    ) -> subprocess.CompletedProcess[str]:
        done = super().cli(*arguments, code=code, timeout_s=timeout_s)
        self.said += [done.stdout, done.stderr]
        return done

    def start(self) -> None:
        self.cli("up", str(self.yaml), "-y", "-d")
        leave_heartbeat(self.store)
        self.until("three machines", self.booted)

    def booted(self) -> bool:
        nodes = self.state.nodes.values()
        return len(nodes) == 3 and all(n.phase is NodePhase.BOOTING for n in nodes)

    def written_at_home(self) -> list[Path]:
        return [path for path in Path(self.env["GRPO_ORCH_HOME"]).rglob("*") if path.is_file()]


@pytest.fixture
def run(tmp_path: Path, proxy: FaultProxy) -> Iterator[S3Run]:
    options = {"region": "us-east-1", "access_key_id": "somebody", "secret_access_key": "hunter2-Zm9vYmFy"}
    made = S3Run(tmp_path, f"s3://rig-bucket/{tmp_path.name}", {"endpoint": proxy.endpoint, **options})
    yield made
    proxy.heal()
    made.end()


def test_a_secret_reaches_the_processes_and_nothing_that_is_written(run: S3Run) -> None:
    run.start()
    run.until("their work and its child", lambda: all(len(run.pids(node)) == 3 for node in NODES))
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


def environment(run: Run, pid: int) -> dict[str, str]:
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
def test_a_store_that_is_refused_is_left_as_it_was(run: S3Run, proxy: FaultProxy) -> None:
    proxy.inject(IgnoreConditions())
    refused = run.cli("up", str(run.yaml), "-y", "-d", code=exit_codes.FAILED)
    assert len(refused.stderr.strip().splitlines()) == 1
    assert run.url in refused.stderr
    assert run.store.entries("") == []
    assert run.written_at_home() == [], "no daemon, no token, no options"


@pytest.mark.slow
def test_a_refused_store_is_not_resumed(run: S3Run, proxy: FaultProxy) -> None:
    run.start()
    run.cli("down", run.url)
    before = [one.key for one in run.store.entries("")]
    proxy.inject(IgnoreConditions())
    run.cli("resume", run.url, "-d", code=exit_codes.FAILED)
    assert [one.key for one in run.store.entries("")] == before
