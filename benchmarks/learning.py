"""Whether learning is worse where generation runs ahead: `make bench-learning`.

The tiny model on its task, and on a harder one, for five seeds, without `rollout.max_staleness` and with 1 and 2.
The command prints one line of JSON, by task and staleness:

- `reward`: of the mean reward over all steps, which is the area under the learning curve, mean and standard
  deviation over the seeds;
- `last`: the same of the last 10 steps;
- `tripped`: how many runs the divergence detector judged to diverge;

and `reward_at_equal_steps_ratio`: each `reward` to the one without staleness.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.rig.local_run import make_tiny, run, tiny_spec

SEEDS, STEPS, LAST = 5, 40, 10
STALENESS = (0, 1, 2)
# The first is the example's own. The second rewards digits and other characters in turns: a mixture of both earns
# 0.5 at most, and alternating them 1.
TASKS = {"sevens": "rewards.digit_share", "in turns": "rewards.in_turns"}
HARDER = """


def in_turns(completions, **_):
    pairs = [list(zip(text, text[1:])) for text in completions]
    return [sum(a.isdigit() != b.isdigit() for a, b in each) / max(1, len(each)) for each in pairs]
"""


def rewards(base: Path, task: str, staleness: int, seed: int) -> tuple[list[float], bool]:
    """The mean reward of each step, and whether the run was judged to diverge."""
    spec: dict[str, Any] = tiny_spec(base / "tiny", max_steps=STEPS, save_steps=STEPS, seed=seed)
    spec["rollout"] |= {"replicas": 1, "max_staleness": staleness}
    spec["trainer"]["reward_funcs"] = TASKS[task]
    rows, _ = run(base / f"{task}-{staleness}-{seed}".replace(" ", "-"), spec, HARDER)
    return [row.values["reward"] for row in rows], len({row.timeline for row in rows}) > 1


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--seeds", type=int, default=SEEDS)
    seeds = arguments.parse_args().seeds
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        make_tiny(base / "tiny")
        curves: dict[tuple[str, int], list[list[float]]] = {}
        tripped: dict[tuple[str, int], int] = {}
        for seed in range(seeds):  # the sides in turns
            for task in TASKS:
                for staleness in STALENESS:
                    curve, judged = rewards(base, task, staleness, seed)
                    curves.setdefault((task, staleness), []).append(curve)
                    tripped[task, staleness] = tripped.get((task, staleness), 0) + judged
                    print(f"{task}, staleness {staleness}, seed {seed}: {mean(curve):.3f}", flush=True)
        for (task, staleness), of_seeds in curves.items():
            whole, last = [mean(one) for one in of_seeds], [mean(one[-LAST:]) for one in of_seeds]
            told: dict[str, Any] = {
                "reward": _told(whole),
                "last": _told(last),
                "tripped": tripped[task, staleness],
            }
            found.setdefault(task, {})[str(staleness)] = told
    ratios = {
        task: {
            staleness: round(one["reward"][0] / sides["0"]["reward"][0], 3)
            for staleness, one in sides.items()
            if staleness != "0"
        }
        for task, sides in found.items()
    }
    print(json.dumps({"reward_at_equal_steps_ratio": ratios, **found, "seeds": seeds, "steps": STEPS}))


def _told(values: list[float]) -> tuple[float, float]:
    return round(mean(values), 3), round(stdev(values), 3) if len(values) > 1 else 0.0


if __name__ == "__main__":
    main()
