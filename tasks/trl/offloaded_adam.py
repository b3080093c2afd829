"""Restarts DeepSpeed's CPU Adam so that it continues bit for bit.

Its module keeps the powers of both betas outside of any checkpoint. It multiplies them at each step, but computes
them again if steps do not follow each other, as after a restart, which rounds differently (DeepSpeed 0.19,
`csrc/includes/cpu_adam.h`).
"""

from __future__ import annotations

from typing import Any

import torch


def catch_up(optimizer: Any) -> None:
    """Repeat the steps of the loaded state over no weights, a microsecond each. Other optimizers are left alone.

    Args:
        optimizer: the trainer's, wrapped by accelerate and DeepSpeed.
    """
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not hasattr(optimizer, "ds_opt_adam"):
        return
    group, none = optimizer.param_groups[0], torch.empty(0)
    taken = max((int(state["step"]) for state in optimizer.state.values() if state), default=0)
    for step in range(1, taken + 1):
        settings = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"])
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, *settings, none, none, none, none)
