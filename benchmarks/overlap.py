"""What it gains that generation and training overlap: `make bench-overlap`.

One rollout node with a real vLLM and TRL's trainer, the tiny model, completions that end where the model ends
them, so that some are many times longer than others. What a GPU would train is stood in for by a wait in the
trainer, for on a CPU both sides would share the same cores: T is that wait with the real training of so small a
model. G, the seconds of generation, are real; both are measured first. The command prints one line of JSON:

- `speedup: {g_over_t: ratio}`: median seconds a step without `rollout.max_staleness` to those with 1, in turns.
  With "queued" the node runs a quarter of a step's requests at a time, as a node does that is sized for its work;
- `streaming_speedup: {requests a place: ratio}`: the same for a step of one window to one of four
  (`steps_per_generation`), without staleness, at G = T; where all requests run at once, and where they queue;
- `idle_share: {g_over_t: {"trainer": [0, 1], "fleet": [0, 1]}}`: of a step, without and with staleness.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.rig.local_run import make_tiny, run, tiny_spec
from grpo_orch.checkpoint.records.metrics import StepTiming, median_timing, step_timings

STEPS, WARM_UP, ROUNDS = 13, 2, 1
TOKENS = 224  # at most
COMPLETIONS, WINDOWS = 128, 4  # of a step, where its windows are compared
# Where staleness is: so few that their real training, which takes the cores from the node, is short beside G.
FEW_COMPLETIONS = 16
PLACES = (128, 32)  # requests that the node runs at a time
QUEUED = 4
CASES = ((0.5, PLACES[0]), (1.0, PLACES[0]), (2.0, PLACES[0]), (2.0, QUEUED))  # G over T, places
WAITS = """

import time


def waits(completions, **_):
    time.sleep({seconds})
    return [0.0] * len(completions)
"""


def steps(
    folder: Path,
    tiny: Path,
    *,
    staleness: int = 0,
    train_s: float = 0.0,
    windows: int = 1,
    places: int = PLACES[0],
    completions: int = COMPLETIONS,
) -> list[StepTiming]:
    """The timings of a run's steps behind the first ones."""
    parts = WINDOWS if completions == COMPLETIONS else 1
    grpo: dict[str, Any] = {
        "per_device_train_batch_size": completions // parts,
        "gradient_accumulation_steps": parts,
        "steps_per_generation": parts // windows,
        "max_completion_length": TOKENS,
        "learning_rate": 1e-6,  # lengths stay as they are
    }
    spec = tiny_spec(tiny, max_steps=STEPS, save_steps=STEPS, **grpo)
    spec["rollout"] |= {"replicas": 1, "max_staleness": staleness}
    spec["rollout"]["vllm"] = {**spec["rollout"].get("vllm", {}), "max-num-seqs": places}
    spec["trainer"]["reward_funcs"] = ["rewards.digit_share", "rewards.waits"]
    rows, _ = run(folder, spec, WAITS.format(seconds=train_s / windows))
    return [timing for _, timing in step_timings(rows)][WARM_UP:]


def wait_s(alone: StepTiming, g_over_t: float) -> float:
    """What the trainer waits for in a step, beside its real work without a wait, for that ratio of G to T."""
    return max(0.0, alone.generate_s / g_over_t - (alone.step_s - alone.generate_s))


def compared(base: Path, rounds: int, sides: list[dict[str, Any]], **shared: Any) -> list[list[StepTiming]]:
    """The timings of two ways, in turns."""
    found: list[list[StepTiming]] = [[], []]
    for number in range(rounds):
        for at, (side, into) in enumerate(zip(sides, found, strict=True)):
            into += steps(base / f"{number}-{at}", base.parent / "tiny", **side, **shared)
    return found


def seconds(made: list[StepTiming]) -> float:
    found = median_timing(made)
    assert found is not None
    return found.step_s


def shares(made: list[StepTiming]) -> tuple[float, float]:
    """Of a step, in which the trainer waits, and in which the node has nothing to do."""
    trainer = mean(one.trainer_idle_s / one.step_s for one in made)
    fleet = mean(one.fleet_idle_s / one.step_s for one in made)
    return round(trainer, 3), round(fleet, 3)


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = arguments.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        make_tiny(base / "tiny")
        load = os.getloadavg()[0]
        speedup, idle_share, streaming = {}, {}, {}
        for places in PLACES:
            alone = median_timing(steps(base / f"alone-{places}", base / "tiny", places=places))
            assert alone is not None
            told = f"{alone.step_s:.2f} s a step, of it {alone.generate_s:.2f} s generation"
            print(f"without training, {COMPLETIONS // places} requests a place: {told}", flush=True)
            sides = [{"windows": 1}, {"windows": WINDOWS}]
            folder = base / f"streaming-{places}"
            made = compared(folder, rounds, sides, train_s=wait_s(alone, 1.0), places=places)
            took_s = [seconds(side) for side in made]
            streaming[str(COMPLETIONS // places)] = round(took_s[0] / took_s[1], 2)
            print(f"  one window {took_s[0]:.2f} s a step, {WINDOWS} windows {took_s[1]:.2f} s", flush=True)
        for ratio, places in CASES:
            case = f"{ratio}{'-queued' if places == QUEUED else ''}"
            shared: dict[str, Any] = {"completions": FEW_COMPLETIONS, "places": places}
            few = median_timing(steps(base / f"few-{case}", base / "tiny", **shared))
            assert few is not None
            sides = [{"staleness": 0}, {"staleness": 1}]
            made = compared(base / f"ahead-{case}", rounds, sides, train_s=wait_s(few, ratio), **shared)
            took_s = [seconds(side) for side in made]
            (trainer_0, fleet_0), (trainer_1, fleet_1) = (shares(side) for side in made)
            speedup[case] = round(took_s[0] / took_s[1], 2)
            idle_share[case] = {"trainer": [trainer_0, trainer_1], "fleet": [fleet_0, fleet_1]}
            told = f"{took_s[0]:.2f} s a step without staleness, {took_s[1]:.2f} s with staleness 1"
            print(f"G/T {case}: {told}, of it {few.generate_s:.2f} s generation", flush=True)
    found = {"speedup": speedup, "streaming_speedup": streaming, "idle_share": idle_share}
    print(json.dumps({**found, "steps": STEPS - WARM_UP - 1, "rounds": rounds, "load": round(load, 2)}))


if __name__ == "__main__":
    main()
