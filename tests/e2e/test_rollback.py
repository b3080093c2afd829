"""A run that really diverges: rolled back by itself, and with everything killed at each stage of the way."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.metrics import MetricsRow, read_metrics
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.checkpoint.stream.transfer import read_manifest
from grpo_orch.policies.model.events import (
    Diverged,
    Event,
    FleetMoved,
    RollbackStarted,
    TimelineForked,
    TimelineResumed,
    TrainerFenced,
)
from grpo_orch.policies.model.timelines import Fork
from tests.e2e.harness import Run
from tests.e2e.tiny import NODE_PYTHON, RUN_TIMEOUT_S, TINY, finish

pytestmark = [pytest.mark.whole, pytest.mark.slow]

STEPS = 50
STAGES: tuple[type[Event], ...] = (
    Diverged,
    RollbackStarted,
    TimelineForked,
    TrainerFenced,
    TimelineResumed,
    FleetMoved,
)
MODULES = {"trainer": "grpo_orch.tasks.trainer.main", "gateway": "grpo_orch.orchestrator.gateway"}
PROCESSES = ("daemon", *MODULES)


@dataclass(frozen=True)
class Outcome:
    """What must be the same, whatever was killed."""

    stages: tuple[type[Event], ...]
    forks: tuple[Fork, ...]
    weights: str  # digest of the last checkpoint's


def runaway(folder: Path, tiny: Path, **kl: Any) -> Run:
    spec = yaml.safe_load((TINY / "runaway.yaml").read_text())
    spec["trainer"]["model"] = str(tiny / "model")
    spec["trainer"]["dataset"] = str(tiny / "prompts.jsonl")
    spec["policies"]["kl"].update(kl)
    folder.mkdir()
    (folder / "rewards.py").write_text((TINY / "rewards.py").read_text())
    return Run(folder, spec, NODE_PYTHON)


def events_of(run: Run) -> list[Event]:
    return [event for record in journal.read(run.store) for event in record.decoded()]


def outcome(run: Run) -> Outcome:
    newest = Catalog(run.store, "test").newest().checkpoints[-1]
    assert (newest.at.timeline, newest.at.step) == (1, STEPS)
    weights = next(f.digest for f in read_manifest(run.store, newest).files if f.name == "model.safetensors")
    stages = tuple(type(event) for event in events_of(run) if isinstance(event, STAGES))
    return Outcome(stages, documents.read_forks(run.store), weights)


def rewards(rows: list[MetricsRow], timeline: int) -> dict[int, float]:
    return {row.step: row.values["reward"] for row in rows if row.timeline == timeline and "reward" in row.values}


def reach(run: Run, stage: type[Event]) -> None:
    run.until(stage.__name__, lambda: any(isinstance(event, stage) for event in events_of(run)), RUN_TIMEOUT_S)


def kill(run: Run, *names: str) -> None:
    """SIGKILL processes of the run, those that are there; a daemon is resumed."""
    for name in names:
        for pid in [run.daemon_pid] if name == "daemon" else run.pids("trainer-0-i1", MODULES[name]):
            with contextlib.suppress(ProcessLookupError):  # it had just ended
                os.kill(pid, signal.SIGKILL)
    if "daemon" in names:
        run.cli("resume", run.url, "-d")


@pytest.fixture(scope="module")
def undisturbed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run that diverges and is taken back, which nobody disturbs."""
    run = runaway(tmp_path_factory.mktemp("undisturbed") / "run", tiny)
    with run.up():
        finish(run)
        check(run)
        return outcome(run)


def check(run: Run) -> None:
    """What a user was promised."""
    (trip,) = (event for event in events_of(run) if isinstance(event, Diverged))
    (fork,) = documents.read_forks(run.store)
    assert fork.start_at is not None
    assert fork.start_at.step <= 20 < trip.step, "the learning rate grows from step 21 on"
    assert fork.changes == {"beta": 0.08, "learning_rate": 3e-5}

    rows = read_metrics(run.store)
    before, after = rewards(rows, 0), rewards(rows, 1)
    start = fork.start_at.step
    assert min(after) == start + 1
    assert max(before) == trip.step, "the guard stops it before the next step"
    at_target = sum(before[step] for step in range(start - 2, start + 1)) / 3
    # Twice the weight of the KL term takes some of the reward back; how much depends on the machine's last bits.
    assert sum(after[step] for step in range(STEPS - 4, STEPS + 1)) / 5 > 0.6 * at_target
    assert all(before[step] < 0.3 for step in range(trip.step - 1, trip.step + 1)), "it had really collapsed"

    first = next(row for row in rows if (row.timeline, row.step) == (1, start + 1))
    last = next(row for row in rows if (row.timeline, row.step) == (0, trip.step))
    rate = [
        row.values["learning_rate"] for row in rows if (row.timeline, row.step) in ((0, start + 1), (1, start + 1))
    ]
    assert rate[1] == pytest.approx(0.005 * rate[0]), "the scheduler's saved state did not bring it back"
    print(f"\nfrom the trip to the first new step: {first.time_s - last.time_s:.1f} s")
    report = run.json("report", run.url)
    assert report["rollbacks"]


def test_diverging_run_rolls_back_and_ends_healthy(undisturbed: Outcome) -> None:
    assert undisturbed.stages == STAGES
    assert [fork.timeline for fork in undisturbed.forks] == [1]


def test_kills_at_each_rollback_stage_end_the_same(undisturbed: Outcome, tiny: Path, tmp_path: Path) -> None:
    run = runaway(tmp_path / "run", tiny)
    with run.up():
        for stage in STAGES:
            reach(run, stage)
            kill(run, *PROCESSES)
        finish(run)
        check(run)
        assert outcome(run) == undisturbed
        assert run.state.epoch > len(STAGES)
