"""up, status, resume, down, with a real daemon and real machines whose work is a stand-in that only sleeps."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_orch.checkpoint import journal
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import NodeRequested
from grpo_orch.policies.model.vocabulary import RunPhase
from tests.e2e.small_run import SmallRun


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    made = SmallRun(tmp_path)
    yield made
    made.end()


def requested(run: SmallRun) -> list[str]:
    return [e.node for r in journal.read(run.store) for e in r.decoded() if isinstance(e, NodeRequested)]


def test_second_up_or_resume_names_the_holder(run: SmallRun) -> None:
    run.start()
    pid = run.daemon_pid
    for command in (["up", str(run.yaml), "-y", "-d"], ["resume", run.url, "-d"], ["resume", str(run.yaml), "-d"]):
        done = run.cli(*command, code=exit_codes.HELD)
        assert f"already has a daemon: pid {pid}" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_resume_adopts_machines_after_daemon_was_killed(run: SmallRun) -> None:
    run.start()
    pids = {node: run.pids(node) for node in run.state.nodes}
    os.kill(run.daemon_pid, signal.SIGKILL)
    assert run.json("status", run.url)["daemon"]["alive"] is False
    assert {node: run.pids(node) for node in pids} == pids
    run.cli("resume", run.url, "-d")
    before = len(journal.read(run.store))
    run.until("the new daemon ticks", lambda: run.json("status", run.url)["daemon"]["alive"])
    assert {node: run.pids(node) for node in pids} == pids, "nothing was killed, nothing was started"
    assert requested(run) == ["trainer-0-i1", "rollout-0-i1", "rollout-1-i1"]
    assert run.state.epoch > 1
    assert len(journal.read(run.store)) >= before


@pytest.mark.parametrize("steered", [True, False])
def test_down_leaves_no_process_and_resume_continues(run: SmallRun, *, steered: bool) -> None:
    run.start()
    if not steered:
        os.kill(run.daemon_pid, signal.SIGKILL)
    done = run.cli("down", run.url)
    assert "all its machines are returned" in done.stdout
    assert run.state.phase is RunPhase.STOPPED
    for node in ("trainer-0-i1", "rollout-0-i1", "rollout-1-i1"):
        assert run.pids(node) == []
    run.cli("down", run.url)  # again is no error
    run.cli("resume", run.url, "-d")
    run.until("three machines again", run.booted)
    assert set(run.state.nodes) == {"trainer-0-i2", "rollout-0-i2", "rollout-1-i2"}


def test_a_killed_machine_is_replaced(run: SmallRun) -> None:
    run.start()
    os.kill(run.own_pids()["rollout-1-i1"], signal.SIGKILL)
    run.until("its replacement", lambda: "rollout-1-i2" in run.state.nodes and run.booted())
    assert run.pids("rollout-1-i1") == []
    events = run.cli("events", run.url).stdout
    assert "its processes died" in events


def test_sigterm_ends_the_daemon_and_leaves_the_machines(run: SmallRun) -> None:
    run.start()
    pids = run.pids("rollout-0-i1")
    os.kill(run.daemon_pid, signal.SIGTERM)
    run.until("the lease is dropped", lambda: run.json("status", run.url)["daemon"]["alive"] is False)
    assert run.pids("rollout-0-i1") == pids


def test_machines_end_without_daemon_and_gateway(tmp_path: Path) -> None:
    """The daemon is killed and no gateway works: nothing is left, also of what the work has started."""
    run = SmallRun(tmp_path, policies={"fleet": {"dead_man_min": 0.5}})
    try:
        run.start()
        nodes = list(run.state.nodes)
        os.kill(run.daemon_pid, signal.SIGKILL)
        run.until("no process is left", lambda: not any(run.pids(node) for node in nodes))
    finally:
        run.end()


MISTAKES = {
    ("status", "s3-bucket/typo"): "expected a store URL",
    ("status", "nowhere://x/y"): "unknown scheme; expected a URL that starts with file://",
    ("resume", "file:///tmp/there-is-no-run-here"): "no run in file:///tmp/there-is-no-run-here",
    ("logs", "rollout-9"): "no log of 'rollout-9'; available logs: ",
    ("up", "missing.yaml"): "missing.yaml",
}


@pytest.mark.slow
def test_mistakes_are_one_clear_line(run: SmallRun) -> None:
    run.start()
    for arguments, message in MISTAKES.items():
        done = run.cli(*arguments, code=None)
        assert done.returncode in (exit_codes.USAGE, exit_codes.FAILED), arguments
        assert message in done.stderr, arguments
        assert len(done.stderr.strip().splitlines()) == 1, arguments


def test_a_missing_node_environment_is_one_clear_line(run: SmallRun, tmp_path: Path) -> None:
    run.env["GRPO_ORCH_NODE_PYTHON"] = str(tmp_path / "nowhere")
    done = run.cli("up", str(run.yaml), "-y", "-d", code=None)
    assert done.returncode == exit_codes.FAILED
    assert f"GRPO_ORCH_NODE_PYTHON={tmp_path / 'nowhere'}: no such file" in done.stderr
