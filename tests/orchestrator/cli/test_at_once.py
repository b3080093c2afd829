"""Commands that steer one run at the same moment: one daemon is left, and each says what has become of the run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint.journal.journal import Journal
from checkpoint.records import documents
from checkpoint.records.documents import Lease, RunRecord
from checkpoint.store.run_store import Store
from orchestrator.control import launcher, lease
from policies.model import exit_codes
from policies.model.events import RunMoved
from policies.model.vocabulary import RunPhase
from tests.budget import until
from tests.rigs.command_line import Cli
from tests.stand_ins.world import spec

Race = Callable[..., None]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path / "home"))
    made = Store(f"file://{tmp_path}/my run")
    run = replace(spec(), cloud="local", storage=made.url, workdir=str(tmp_path))
    documents.create_run(made, RunRecord(documents.SCHEMA, "sim-0", time.time(), run))
    return made


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
        journal = Journal(store, "other/1")
        journal.take_over(time.time(), "other", 1, "resume")
        documents.LEASE.write(store, lease.own_lease(journal.epoch, time.time()))
        until("a command", lambda: seen.is_set() and documents.read_commands(store))
        journal.append(time.time(), tuple(RunMoved(phase, "told to") for phase in phases))
        documents.LEASE.drop(store)

    def race(*phases: RunPhase) -> None:
        def spawn(*_: object) -> subprocess.Popen[bytes]:
            threads.append(threading.Thread(target=steer, args=phases, daemon=True))
            threads[-1].start()
            return subprocess.Popen([sys.executable, "-c", f"raise SystemExit({exit_codes.HELD})"])

        monkeypatch.setattr(launcher, "_spawn", spawn)

    yield race
    documents.send_command(store, "down", time.time())  # so that the other ends
    for thread in threads:
        thread.join()


def test_the_slower_of_two_resumes_says_who_steers_and_ends_with_the_code_for_it(
    store: Store, quicker: Race, grpo_orch: Cli
) -> None:
    quicker()
    answer = grpo_orch("resume", "-d", store.url)
    assert answer.code == exit_codes.HELD
    assert f"{store.url} is steered by pid {os.getpid()} on " in answer.line
    assert f"stop it with `grpo-orch down '{store.url}'`" in answer.line


def test_a_down_whose_daemon_is_the_slower_has_the_other_stop_the_run(
    store: Store, quicker: Race, grpo_orch: Cli
) -> None:
    quicker(RunPhase.STOPPING, RunPhase.STOPPED)
    answer = grpo_orch("down", store.url)
    assert answer.code == exit_codes.OK, answer.err
    assert "sim is stopped; no machine of it is left." in answer.out
    assert f"Continue with: grpo-orch resume '{store.url}'" in answer.out


def test_a_down_whose_daemon_ends_too_early_does_not_say_that_the_run_has_ended(
    store: Store, quicker: Race, grpo_orch: Cli
) -> None:
    quicker(RunPhase.STOPPING)
    answer = grpo_orch("down", store.url)
    assert answer.code == exit_codes.FAILED
    told = f"its daemon has ended and the run is stopping; run `grpo-orch down '{store.url}'` again"
    assert answer.line == told
