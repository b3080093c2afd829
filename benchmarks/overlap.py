"""What generation ahead of training gains (`rollout.max_staleness`): `make bench-overlap`.

One rollout node with a real vLLM and TRL's trainer, the tiny model, completions of equal length. What a GPU would
train is stood in for by a wait of T seconds in the trainer, for on a CPU both sides would share the same cores; G,
the seconds of generation, are real and measured first. For each G/T, runs with staleness 0 and 1 in turns. The
command prints one line of JSON:

- `speedup: {g_over_t: ratio}`: median seconds a step without staleness to those with it;
- `idle_share: {g_over_t: {"trainer": [0, 1], "fleet": [0, 1]}}`: of a step, without and with staleness.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from benchmarks.rig.local_run import make_tiny, run, tiny_spec
from checkpoint.records.metrics import AHEAD_S, GENERATE_S, Row

STEPS, WARM_UP, ROUNDS = 24, 4, 1
TOKENS = 224  # of a completion, so that generating is most of a step without the wait
G_OVER_T = (0.5, 1.0, 2.0)
WAITS = """

import time


def waits(completions, **_):
    time.sleep({seconds})
    return [0.0] * len(completions)
"""


def steps(folder: Path, tiny: Path, *, staleness: int, train_s: float) -> list[tuple[float, Row]]:
    """The seconds of each step behind the first ones, with its row."""
    generation = {"max_completion_length": TOKENS, "generation_kwargs": {"ignore_eos": True}}
    spec = tiny_spec(tiny, max_steps=STEPS, save_steps=STEPS, **generation)
    spec["rollout"] |= {"replicas": 1, "max_staleness": staleness}
    spec["trainer"]["reward_funcs"] = ["rewards.digit_share", "rewards.waits"]
    rows, _ = run(folder, spec, WAITS.format(seconds=train_s))
    return [(row.time_s - before.time_s, row) for before, row in pairwise(rows)][WARM_UP:]


def seconds(made: list[tuple[float, Row]]) -> float:
    return median(took_s for took_s, _ in made)


def idle(made: list[tuple[float, Row]]) -> tuple[float, float]:
    """The shares of a step in which the trainer waits for completions, and the node has none to make."""
    waited = mean((row.values[GENERATE_S] - row.values.get(AHEAD_S, 0.0)) / took_s for took_s, row in made)
    made_for = mean(min(1.0, row.values[GENERATE_S] / took_s) for took_s, row in made)
    return round(waited, 3), round(1 - made_for, 3)


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = arguments.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        make_tiny(base / "tiny")
        alone = steps(base / "alone", base / "tiny", staleness=0, train_s=0.0)
        generate_s = median(row.values[GENERATE_S] for _, row in alone)
        print(f"a step without training: {seconds(alone):.2f} s, of it {generate_s:.2f} s generation", flush=True)
        speedup, shares = {}, {}
        for ratio in G_OVER_T:
            sides: dict[int, list[tuple[float, Row]]] = {0: [], 1: []}
            for number in range(rounds):
                for staleness, side in sides.items():
                    folder = base / f"{ratio}-{number}-{staleness}"
                    side += steps(folder, base / "tiny", staleness=staleness, train_s=generate_s / ratio)
            took_s = [seconds(side) for side in sides.values()]
            (trainer_0, fleet_0), (trainer_1, fleet_1) = (idle(side) for side in sides.values())
            speedup[str(ratio)] = round(took_s[0] / took_s[1], 2)
            shares[str(ratio)] = {"trainer": [trainer_0, trainer_1], "fleet": [fleet_0, fleet_1]}
            told = f"{took_s[0]:.2f} s a step without staleness, {took_s[1]:.2f} s with staleness 1"
            print(f"G/T {ratio}: {told}", flush=True)
    print(json.dumps({"speedup": speedup, "idle_share": shares, "steps": STEPS - WARM_UP - 1, "rounds": rounds}))


if __name__ == "__main__":
    main()
