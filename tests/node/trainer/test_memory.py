"""What a trainer does with less memory is the same step, by TRL's own trainer: prompts, completions, gradients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from grpo_orch.policies.control.rollback import changes_to_save_memory
from tests.node.trainer.rig import GRPO, open_rig

CLOSE = 1e-5  # gradients summed in another order
STEPS = 2
# Completions of many lengths. Not AdamW: its first update is the sign of the gradient, however small that is.
SETTINGS = {"max_steps": STEPS, "save_steps": STEPS, "max_completion_length": 48, "optim": "sgd"}


class Gradients(TrainerCallback):
    """The gradient that the optimizer takes each step with, as one vector."""

    def __init__(self) -> None:
        self.of_steps: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, _args: Any, _state: Any, _control: Any, *, model: Any, **_: Any) -> None:
        found = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
        self.of_steps.append(torch.cat(found).clone())


@dataclass
class Trained:
    """What a few steps were."""

    gradients: list[torch.Tensor]
    generated: int  # completions at once
    asked: list[tuple[str, int]]  # policy and seed of each
    prompts: dict[str, set[tuple[int, ...]]]  # by policy


def train(folder: Path, tiny: Path, grpo: dict[str, Any]) -> Trained:
    with open_rig(folder, tiny, grpo={**SETTINGS, **grpo}) as rig:
        trainer = rig.train(seen := Gradients())
        return Trained(seen.of_steps, trainer.args.generation_batch_size, rig.gateway.asked, rig.gateway.prompts)


def with_less(grpo: dict[str, Any], times: int) -> dict[str, Any]:
    for _ in range(times):
        changes = changes_to_save_memory({**GRPO, **grpo})
        assert changes is not None
        grpo = {**grpo, **changes}
    return grpo


def differences(one: Trained, other: Trained) -> list[float]:
    pairs = zip(one.gradients, other.gradients, strict=True)
    return [float((a - b).abs().max() / a.abs().max()) for a, b in pairs]


# One generation for two optimizer steps, each taken twice.
WINDOW = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2}


@pytest.mark.parametrize(
    ("grpo", "times", "settings"),
    [
        ({}, 1, (4, 2, False)),
        ({"loss_type": "dr_grpo", "beta": 0.0}, 4, (1, 8, True)),
        (WINDOW, 2, (1, 4, False)),
    ],
    ids=["dapo", "dr_grpo-and-checkpointing", "window"],
)
def test_less_memory_makes_the_same_step(
    grpo: dict[str, Any], times: int, settings: tuple[int, int, bool], tiny: Path, tmp_path: Path
) -> None:
    less = with_less(grpo, times)
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing")
    assert tuple({**GRPO, **less}[key] for key in keys) == settings
    before, after = train(tmp_path / "before", tiny, grpo), train(tmp_path / "after", tiny, less)
    assert len(before.gradients) == STEPS
    assert (after.asked, after.prompts) == (before.asked, before.prompts)
    assert after.generated == before.generated
    first, second = differences(before, after)
    assert first < CLOSE
    assert second < 10 * CLOSE, "from weights that the first step has left apart by a last bit"


def test_bnpo_keeps_the_device_batch_as_long_as_possible(tiny: Path, tmp_path: Path) -> None:
    bnpo = {"loss_type": "bnpo"}
    before = train(tmp_path / "before", tiny, bnpo)
    first = train(tmp_path / "first", tiny, with_less(bnpo, 1))
    second = train(tmp_path / "second", tiny, with_less(bnpo, 2))
    assert max(differences(before, first)) < CLOSE, "gradient checkpointing"
    assert second.asked[: len(before.asked) // STEPS] == before.asked[: len(before.asked) // STEPS]
    assert differences(before, second)[0] > 1e-3
