"""Commands that steer one run at the same moment: one daemon is left, and each says what has become of the run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.journal import Journal
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import Lease
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.control import launcher, lease
from grpo_orch.orchestrator.home import run_digest, save_run_digest
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import RunMoved
from grpo_orch.policies.model.vocabulary import RunPhase
from tests.budget import HANG_S, until
from tests.rigs.command_line import Cli
from tests.stand_ins.control_plane import Run

Race = Callable[..., None]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(launcher, "START_TIMEOUT_S", HANG_S)
    monkeypatch.setattr(launcher, "OTHER_LEASE_TIMEOUT_S", HANG_S)
    return Run(tmp_path / "my run").create().store


@pytest.fixture
def quicker(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Race]:
    """Another daemon takes the run while the command's own comes up, and moves it as given once it is told."""
    threads: list[threading.Thread] = []
    seen = threading.Event()  # the lease of the other, by the command

    def is_held(read: Callable[[], Lease | None]) -> bool:
        held = lease.is_held(read)
        if held:
            seen.set()
        return held

    monkeypatch.setattr(launcher, "is_held", is_held)

    def steer(*phases: RunPhase) -> None:
        other = Journal(store, "other/1")
        other.take_over(time.time(), "other", 1, "resume")
        documents.LEASE.write(store, lease.own_lease(other.epoch, time.time(), time.time()))
        until("a command", lambda: seen.is_set() and documents.read_commands(store))
        other.append(time.time(), tuple(RunMoved(phase, "told to") for phase in phases))
        documents.LEASE.drop(store)

    def race(*phases: RunPhase) -> None:
        def spawn(*_: object) -> subprocess.Popen[bytes]:
            threads.append(threading.Thread(target=steer, args=phases, daemon=True))
            threads[-1].start()
            return subprocess.Popen([sys.executable, "-c", f"raise SystemExit({exit_codes.HELD})"])

        monkeypatch.setattr(launcher, "spawn", spawn)

    yield race
    documents.send_command(store, "down", time.time())  # so that the other ends
    for thread in threads:
        thread.join()


def test_slower_of_two_resumes_names_the_daemon_and_exits_held(
    store: Store, quicker: Race, grpo_orch: Cli
) -> None:
    quicker()
    answer = grpo_orch("resume", "-d", store.url)
    assert answer.code == exit_codes.HELD
    assert f"{store.url} already has a daemon: pid {os.getpid()} on " in answer.line
    assert f"stop it with `grpo-orch down '{store.url}'`" in answer.line


@pytest.fixture
def taken_meanwhile(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Another's daemon takes the run after the command has seen that nobody has it, and before its own does, which
    is a real one. The other says that it steers before that one looks, or after."""
    started: list[subprocess.Popen[bytes]] = []
    spawn = launcher.spawn

    def race(early: bool) -> None:
        def take_first(*given: Any) -> subprocess.Popen[bytes]:
            other = Journal(store, "other/1")
            if not early:
                other.take_over(time.time(), "other", 1, "resume")
            lead = lease.own_lease(other.epoch, time.time(), time.time())
            if early:
                documents.LEASE.write(store, lead)
            started.append(spawn(*given))
            assert started[-1].wait(HANG_S) == exit_codes.HELD
            documents.LEASE.write(store, lead)
            return started[-1]

        monkeypatch.setattr(launcher, "spawn", take_first)

    yield race
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("early", [True, False])
def test_second_of_two_simultaneous_daemons_takes_nothing(
    store: Store, taken_meanwhile: Callable[[bool], None], grpo_orch: Cli, early: bool
) -> None:
    """Else the first one's command has ended with 0, and its daemon does not steer."""
    save_run_digest(store.url, run_digest(store.get(layout.RUN)))
    taken_meanwhile(early)
    epoch = journal.recover(store).state.epoch
    answer = grpo_orch("resume", "-d", store.url)
    assert answer.code == exit_codes.HELD
    assert f"{store.url} already has a daemon: pid {os.getpid()} on " in answer.line
    assert journal.recover(store).state.epoch == epoch + (not early)


def test_down_with_slower_daemon_has_the_other_stop_the_run(store: Store, quicker: Race, grpo_orch: Cli) -> None:
    quicker(RunPhase.STOPPING, RunPhase.STOPPED)
    answer = grpo_orch("down", store.url)
    assert answer.code == exit_codes.OK, answer.err
    assert "sim: stopped; all its machines are returned." in answer.out
    assert f"Continue with: grpo-orch resume '{store.url}'" in answer.out


def test_down_whose_daemon_ends_early_reports_no_end_of_run(store: Store, quicker: Race, grpo_orch: Cli) -> None:
    quicker(RunPhase.STOPPING)
    answer = grpo_orch("down", store.url)
    assert answer.code == exit_codes.FAILED
    told = f"the daemon exited while the run is stopping; run `grpo-orch down '{store.url}'` again"
    assert answer.line == told
