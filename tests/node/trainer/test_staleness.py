"""Windows that are sampled ahead, from older policies: always the same ones, whatever is killed when."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from grpo_orch.checkpoint.records.metrics import STALENESS, read_metrics
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.trainer_requests import request_seed
from tests.budget import HANG_S
from tests.node.trainer.rig import GRPO, LORA, STATES, Rig, open_rig
from tests.node.trainer.test_resume import journalled_steps, kill_after_completion, kill_at_step

STEPS = GRPO["max_steps"]
COMPLETIONS = GRPO["per_device_train_batch_size"]  # of a window


@dataclass(frozen=True)
class Case:
    """A run; the steps that are done when its windows begin, and the policies that these are sampled from."""

    staleness: int
    policies: dict[int, int]
    grpo: dict[str, Any] = field(default_factory=dict)
    peft: dict[str, Any] | None = None
    evaluates: bool = False
    windows: int = 1  # that begin in a step


# Each step has two windows of one prompt.
IN_PARTS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 1}
EVALUATION = {"eval_steps": 3, "per_device_eval_batch_size": 8}
CASES = {
    "two": Case(2, {step: max(0, step - 2) for step in range(STEPS)}, EVALUATION, peft=LORA, evaluates=True),
    # Windows of four steps: checkpoints and evaluations are in the middle of one.
    "long": Case(
        1,
        {0: 0, 4: 0},
        {"steps_per_generation": 2, "num_iterations": 2, "save_steps": 3},
    ),
    "parts": Case(
        1, {step: max(0, step - 1) for step in range(STEPS)}, IN_PARTS | EVALUATION, evaluates=True, windows=2
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_killed_trainer_ends_in_the_same_weights(name: str, tiny: Path, tmp_path: Path) -> None:
    case, seed = CASES[name], random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)
    spec = {"grpo": case.grpo, "peft": case.peft, "evaluates": case.evaluates, "max_staleness": case.staleness}
    with open_rig(tmp_path / "calm", tiny, **spec) as calm:
        assert calm.wait(calm.start_trainer()) == 0
    expected = {step: {policy} for step, policy in case.policies.items()}
    assert sampled_from(calm, case.windows) == expected
    stale = {row.step - 1: row.values.get(STALENESS) for row in read_metrics(calm.store)}
    assert {step: found for step, found in stale.items() if found is not None} == {
        step: step - policy for step, policy in case.policies.items()
    }
    with open_rig(tmp_path / "killed", tiny, **spec) as killed:
        kill_after_completion(killed, 1, dice.randrange(1, 3 * COMPLETIONS))
        kill_at_step(killed, 2, dice.randrange(STEPS // 2, STEPS), delay_s=dice.random() * 0.3)
        journalled, asked_before = journalled_steps(killed.store), len(killed.gateway.asked)
        assert killed.wait(killed.start_trainer(3), 3) == 0
        assert killed.digests(*STATES) == calm.digests(*STATES)
    assert killed.gateway.unproved == calm.gateway.unproved == []
    assert killed.results() == calm.results()
    assert len({loss for *_, loss in calm.results()}) == STEPS, "nothing was learned, so this proves nothing"
    assert sampled_from(killed, case.windows) == expected
    again = {seed for _, seed in killed.gateway.asked[asked_before:]}
    assert not again & {seed for step in journalled for seed in seeds_of(step)}, "the journal holds these"


def test_training_begins_while_the_rest_of_its_step_is_generated(tiny: Path, tmp_path: Path) -> None:
    """The last completions of each step are made only once its first window was trained on."""
    trained = threading.Event()

    class Watches(TrainerCallback):
        def on_substep_end(self, *_: Any, **__: Any) -> None:
            trained.set()

    def holds(made: int) -> None:
        if made % COMPLETIONS == COMPLETIONS // 2:
            assert trained.wait(HANG_S)
            trained.clear()

    with open_rig(tmp_path, tiny, grpo={**IN_PARTS, "max_steps": 3}) as rig:
        rig.gateway.on_completion = holds
        rig.train(Watches())
        assert rig.gateway.batches == [COMPLETIONS] * 3
        assert len(rig.results()) == 3


def sampled_from(rig: Rig, windows: int) -> dict[int, set[int]]:
    """By the steps that are done when so many windows begin: those of the policies that they were asked of."""
    steps = {seed: step for step in range(STEPS) for number in range(windows) for seed in seeds_of(step, number)}
    found: dict[int, set[int]] = {}
    for policy, seed in rig.gateway.asked:
        if seed in steps:
            found.setdefault(steps[seed], set()).add(PolicyVersion.parse(policy).step)
    return found


def seeds_of(step: int, number: int = 0) -> set[int]:
    """Of the completions of a window that begins after so many steps, by default the first one."""
    return {
        request_seed(42, 0, step, number, prompt, sample)
        for prompt in range(COMPLETIONS // GRPO["num_generations"])
        for sample in range(GRPO["num_generations"])
    }
