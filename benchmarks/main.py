"""What the fleet costs when nothing fails, and what each fault costs: `make bench-main`.

Time per step with one rollout node against TRL driving one vLLM server directly with the same work, in turns so
that the machine's mood meets both; then one run that meets every fault. The first steps of each run are left out:
there both sides warm up.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.rig.local_run import NODE_PYTHON, ROOT, make_tiny, run, tiny_spec

STEPS, WARM_UP, ROUNDS = 30, 5, 2
# Tokens a completion: the demo's own, where a step is a tenth of a second and all overhead shows, and a length at
# which generating is most of a step, as it is in practice. No completion ends early: both sides do the same work.
LENGTHS = (16, 128)
FAULT_STEPS = 120
FAULTS = [
    {"at_step": 10, "kill": "rollout-1"},
    {"at_step": 25, "kill": "gateway"},
    {"at_step": 40, "kill": "daemon", "for_s": 3},
    {"at_step": 75, "kill": "trainer"},
    {"at_step": 100, "kill": "rollouts"},
]

console = Console()


def work(tokens: int) -> dict[str, Any]:
    """What both sides do: the changes to the example's `grpo`."""
    return {"max_steps": STEPS, "max_completion_length": tokens, "generation_kwargs": {"ignore_eos": True}}


def direct(folder: Path, tiny: Path, tokens: int) -> list[float]:
    """Seconds of each step of TRL on one vLLM server."""
    out = folder.with_suffix(".json")
    rig = ROOT / "benchmarks" / "rig" / "direct_trl.py"
    command = [str(part) for part in (NODE_PYTHON, rig, tiny, json.dumps(work(tokens)), out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the baseline failed:\n{done.stdout}\n{done.stderr}")
    return steps_of(json.loads(out.read_text())["times_s"])


def ours(folder: Path, tiny: Path, tokens: int) -> list[float]:
    """Seconds of each step of the same work through the fleet, one rollout node."""
    spec = tiny_spec(tiny, save_steps=STEPS, **work(tokens))
    spec["rollout"]["replicas"] = 1
    rows, _ = run(folder, spec)
    return steps_of([row.time_s for row in rows])


def steps_of(times_s: list[float]) -> list[float]:
    return [b - a for a, b in pairwise(times_s)][WARM_UP:]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        make_tiny(base / "tiny")
        baseline: dict[int, list[float]] = {tokens: [] for tokens in LENGTHS}
        fleet: dict[int, list[float]] = {tokens: [] for tokens in LENGTHS}
        for number, tokens in product(range(ROUNDS), LENGTHS):
            turn = f"round {number + 1} of {ROUNDS}, {tokens} tokens"
            with console.status(f"{turn}: TRL and one vLLM server"):
                baseline[tokens] += direct(base / f"direct-{number}-{tokens}", base / "tiny", tokens)
            with console.status(f"{turn}: the fleet with one rollout node"):
                fleet[tokens] += ours(base / f"fleet-{number}-{tokens}", base / "tiny", tokens)
        with console.status("one run that meets every fault"):
            spec = tiny_spec(base / "tiny", max_steps=FAULT_STEPS, save_steps=10)
            spec["rehearse"] = {"faults": FAULTS}
            _, report = run(base / "faults", spec)
    show(baseline, fleet, report)


def show(baseline: dict[int, list[float]], fleet: dict[int, list[float]], report: dict[str, Any]) -> None:
    """Print the tables and write the figures."""
    ratios = {tokens: median(fleet[tokens]) / median(baseline[tokens]) for tokens in LENGTHS}
    console.print(
        f"Conditions: this machine alone, CPU, the tiny example (2 layers, 32 completions a step), "
        f"{len(fleet[LENGTHS[0]])} steps a side and length, in {ROUNDS} turns.",
        highlight=False,
        soft_wrap=True,
    )
    title = "Nobody fails: median seconds a step"
    table = Table("tokens a completion", "TRL and one vLLM", "one node of ours", "ratio", title=title)
    for tokens in LENGTHS:
        times = [f"{median(side[tokens]):.3f}" for side in (baseline, fleet)]
        table.add_row(str(tokens), *times, f"{ratios[tokens]:.2f}")
    console.print(table)
    costs = Table("fault", "seconds lost", "tokens made again", title="What each fault cost")
    faults: dict[str, dict[str, float]] = {}
    for fault in report["faults"]:
        faults[fault["name"]] = {key: fault[key] for key in ("seconds_lost", "tokens_regenerated")}
        costs.add_row(fault["name"], f"{fault['seconds_lost']:.1f}", str(fault["tokens_regenerated"]))
    console.print(costs)
    figures = {
        "step_time_ratio": ratios[LENGTHS[-1]],
        "step_time_ratio_by_tokens": {str(tokens): ratio for tokens, ratio in ratios.items()},
        "faults": faults,
    }
    out = ROOT / "benchmarks" / "results" / "main.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(figures, indent=2) + "\n")
    console.print(f"Wrote {out.relative_to(ROOT)}", highlight=False)


if __name__ == "__main__":
    main()
