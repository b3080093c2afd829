"""DeepSpeed's Adam over the machine's own memory, restarted so that it goes on with the same bits.

Its module keeps the powers of both betas, and no checkpoint does: multiplied once more at each step, and computed
anew where steps do not follow each other, as at a restart, which rounds otherwise (DeepSpeed 0.19,
`csrc/includes/cpu_adam.h`).
"""

from __future__ import annotations

from typing import Any

import torch


def catch_up(optimizer: Any) -> None:
    """Take the steps that an optimizer has taken by its loaded state once more, over no weights: a microsecond
    each. Nothing for any other optimizer.

    Args:
        optimizer: the trainer's, as accelerate and DeepSpeed have wrapped it.
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
