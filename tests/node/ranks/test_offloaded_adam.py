"""An optimizer of DeepSpeed's in the machine's memory goes on as if it had not been away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from grpo_orch.tasks.trl.parts.checkpointing import catch_up

BETAS = (0.9, 0.999)
TAKEN = 200


class Module:
    """As far as steps go what DeepSpeed's compiled one does (`csrc/includes/cpu_adam.h`), in its own precision."""

    def __init__(self) -> None:
        self._step, self.powers = 0, (np.float32(1), np.float32(1))

    def adam_update(self, _id: int, step: int, _lr: float, one: float, two: float, *rest: Any) -> None:
        assert [len(tensor) for tensor in rest[3:]] == [0] * 4, "no weight is touched"
        betas = (np.float32(one), np.float32(two))
        if step == self._step + 1:
            self.powers = (self.powers[0] * betas[0], self.powers[1] * betas[1])
        elif step != self._step:
            self.powers = (np.float32(float(betas[0]) ** step), np.float32(float(betas[1]) ** step))
        self._step = step


def optimizer_at(step: int) -> Any:
    group = {"lr": 1e-3, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True}
    return SimpleNamespace(ds_opt_adam=Module(), opt_id=0, param_groups=[group], state={"p": {"step": step}})


def step(optimizer: Any, number: int) -> None:
    none = torch.empty(0)
    optimizer.ds_opt_adam.adam_update(0, number, 1e-3, *BETAS, 1e-8, 0.0, True, none, none, none, none)


def test_beta_powers_match_an_uninterrupted_optimizer() -> None:
    calm, restarted, late = optimizer_at(0), optimizer_at(TAKEN), optimizer_at(TAKEN)
    for number in range(1, TAKEN + 2):
        step(calm, number)
    catch_up(SimpleNamespace(optimizer=SimpleNamespace(optimizer=restarted)))
    step(restarted, TAKEN + 1)
    assert restarted.ds_opt_adam.powers == calm.ds_opt_adam.powers
    step(late, TAKEN + 1)
    assert late.ds_opt_adam.powers != calm.ds_opt_adam.powers, "then there would be nothing to catch up"


def test_other_optimizers_are_left_alone() -> None:
    catch_up(torch.optim.AdamW([torch.zeros(1, requires_grad=True)]))
    catch_up(optimizer_at(0))
