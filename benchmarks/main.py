"""What the fleet costs when nothing fails, and what each fault costs: `make bench-main`.

Time per step with one rollout node against TRL driving one vLLM server directly with the same work, in turns so
that the machine's mood meets both; then one run that meets every fault. The first steps of each run are left out:
there both sides warm up.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.rig.local_run import NODE_PYTHON, ROOT, make_tiny, run, tiny_spec

STEPS, WARM_UP, ROUNDS = 40, 5, 2
FAULTS = [
    {"at_step": 6, "kill": "rollout-1"},
    {"at_step": 12, "kill": "gateway"},
    {"at_step": 18, "kill": "daemon", "for_s": 3},
    {"at_step": 24, "kill": "trainer"},
    {"at_step": 32, "kill": "rollouts"},
]

console = Console()


def direct(folder: Path, tiny: Path) -> list[float]:
    """Seconds of each step of TRL on one vLLM server."""
    out = folder.with_suffix(".json")
    rig = ROOT / "benchmarks" / "rig" / "direct_trl.py"
    done = subprocess.run([NODE_PYTHON, rig, tiny, str(STEPS), out], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the baseline failed:\n{done.stdout}\n{done.stderr}")
    return steps_of(json.loads(out.read_text())["times_s"])


def ours(folder: Path, tiny: Path) -> list[float]:
    """Seconds of each step of the same work through the fleet, one rollout node."""
    spec = tiny_spec(tiny, max_steps=STEPS, save_steps=STEPS)
    spec["rollout"]["replicas"] = 1
    rows, _ = run(folder, spec)
    return steps_of([row.time_s for row in rows])


def steps_of(times_s: list[float]) -> list[float]:
    return [b - a for a, b in pairwise(times_s)][WARM_UP:]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        make_tiny(base / "tiny")
        baseline: list[float] = []
        fleet: list[float] = []
        for number in range(ROUNDS):
            with console.status(f"round {number + 1} of {ROUNDS}: TRL and one vLLM server"):
                baseline += direct(base / f"direct-{number}", base / "tiny")
            with console.status(f"round {number + 1} of {ROUNDS}: the fleet with one rollout node"):
                fleet += ours(base / f"fleet-{number}", base / "tiny")
        with console.status("one run that meets every fault"):
            spec = tiny_spec(base / "tiny", max_steps=STEPS, save_steps=10)
            spec["rehearse"] = {"faults": FAULTS}
            _, report = run(base / "faults", spec)
    show(baseline, fleet, report)


def show(baseline: list[float], fleet: list[float], report: dict[str, Any]) -> None:
    """Print the tables and write the figures."""
    ratio = median(fleet) / median(baseline)
    console.print(
        f"Conditions: this machine alone, CPU, the tiny example (2 layers, 32 completions of 16 tokens a step), "
        f"{len(fleet)} steps a side in {ROUNDS} turns each.",
        highlight=False,
    )
    table = Table("", "median s a step", "ratio", title="Nobody fails", title_justify="left")
    table.add_row("TRL and one vLLM server", f"{median(baseline):.3f}", "1.00")
    table.add_row("grpo-orch, one rollout node", f"{median(fleet):.3f}", f"{ratio:.2f}")
    console.print(table)
    costs = Table("fault", "seconds lost", "tokens made again", title="What each fault cost", title_justify="left")
    faults: dict[str, dict[str, float]] = {}
    for fault in report["faults"]:
        faults[fault["name"]] = {key: fault[key] for key in ("seconds_lost", "tokens_regenerated")}
        costs.add_row(fault["name"], f"{fault['seconds_lost']:.1f}", str(fault["tokens_regenerated"]))
    console.print(costs)
    out = ROOT / "benchmarks" / "results" / "main.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"step_time_ratio": ratio, "faults": faults}, indent=2) + "\n")
    console.print(f"Wrote {out.relative_to(ROOT)}", highlight=False)


if __name__ == "__main__":
    main()
