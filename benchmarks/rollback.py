"""How long a rollback takes, from the diverged step to the first new one: `make bench-rollback`.

A run of the tiny example that really diverges; in the same run the trainer is killed once while all is well, so
that the restart which every rollback contains is measured beside it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.rig.local_run import ROOT, TINY, make_tiny, run
from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.records.metrics import MetricsRow
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.events import (
    Event,
    FleetMoved,
    RollbackStarted,
    TimelineForked,
    TimelineResumed,
    TrainerFenced,
)

ROUNDS = 3
KILLED_AT_STEP = 8
STAGES: tuple[type[Event], ...] = (RollbackStarted, TimelineForked, TrainerFenced, TimelineResumed, FleetMoved)
FIRST_STEP = "FirstNewStep"
RESTART = "restart"

console = Console()


def spec_of(model_folder: Path) -> dict[str, Any]:
    """The example that diverges, with its trainer killed once before."""
    spec: dict[str, Any] = yaml.safe_load((TINY / "runaway.yaml").read_text())
    spec["trainer"]["model"] = str(model_folder / "model")
    spec["trainer"]["dataset"] = str(model_folder / "prompts.jsonl")
    spec["rehearse"] = {"faults": [{"at_step": KILLED_AT_STEP, "kill": "trainer"}]}
    return spec


def measure(folder: Path, model_folder: Path) -> dict[str, float]:
    """Seconds from the trip's row to each stage and to the first new step; and those of the plain restart."""
    rows, report = run(folder, spec_of(model_folder))
    if not report["rollbacks"]:
        raise SystemExit(f"the run did not diverge; its logs are below {folder}")
    trip_s = max(row.time_s for row in rows if row.timeline == 0)
    first_s = min(row.time_s for row in rows if row.timeline == 1)
    seconds = {kind.__name__: at_s - trip_s for kind, at_s in stages((folder / "store").as_uri()).items()}
    return {**seconds, FIRST_STEP: first_s - trip_s, RESTART: restart_s(rows)}


def stages(url: str) -> dict[type[Event], float]:
    """When each stage of the first rollback was journalled."""
    times: dict[type[Event], float] = {}
    for record in journal.read(Store(url)):
        for event in record.decoded():
            if isinstance(event, STAGES):
                times.setdefault(type(event), record.time_s)
    return times


def restart_s(rows: list[MetricsRow]) -> float:
    """From the last row before the trainer was killed to the first one of its next attempt."""
    attempts = {number: [row for row in rows if (row.timeline, row.attempt) == (0, number)] for number in (1, 2)}
    return min(row.time_s for row in attempts[2]) - max(row.reached_s for row in attempts[1])


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        make_tiny(base / "tiny")
        rounds = []
        for number in range(ROUNDS):
            with console.status(f"round {number + 1} of {ROUNDS}"):
                rounds.append(measure(base / f"run-{number}", base / "tiny"))
    medians = {key: median(one[key] for one in rounds) for key in rounds[0]}
    table = Table("stage", "seconds from the trip, median", "all", title="A rollback")
    for key, seconds in medians.items():
        table.add_row(key, f"{seconds:.1f}", ", ".join(f"{one[key]:.1f}" for one in rounds))
    console.print(table)
    ratio = medians[FIRST_STEP] / medians[RESTART]
    console.print(
        f"Conditions: this machine alone, CPU, the tiny example, {ROUNDS} rounds. A trainer killed in the "
        f"same runs made its next step after {medians[RESTART]:.1f} s: a rollback takes {ratio:.2f} times that.",
        highlight=False,
        soft_wrap=True,
    )
    figures = {"seconds": medians, "rollback_to_restart_ratio": ratio, "rounds": rounds}
    out = ROOT / "benchmarks" / "results" / "rollback.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(figures, indent=2) + "\n")
    console.print(f"Wrote {out.relative_to(ROOT)}", highlight=False)


if __name__ == "__main__":
    main()
