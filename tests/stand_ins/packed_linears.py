"""Linear layers whose matrices are packed away: the parameter is empty, and the layer computes from its own copy.

vLLM's build for CPUs does so on most processors (with oneDNN or AMX), not on all. Workers import this before they
load the model.
"""

from __future__ import annotations

from typing import Any

import torch

from grpo_orch.tasks.rollout.vllm.worker import Extension as Extension


def _pack(layer: Any, remove_weight: bool) -> None:
    packed = layer.weight.detach().clone()
    layer.cpu_linear = lambda x, _weight, bias: torch.nn.functional.linear(x, packed, bias)
    if remove_weight:
        layer.weight = torch.nn.Parameter(packed.new_empty(0), requires_grad=False)


def _pack_everywhere() -> None:
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = _pack


_pack_everywhere()
