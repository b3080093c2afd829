"""Computes the trainer's log-probabilities of the canary's fixed text, see `policies.serving.canary`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from grpo_orch.policies.serving.canary import Canary, token_ids_for


def canary_of(model: Any, mixed_precision: str) -> Canary:
    """Return the canary of a transformers model with its present weights, adapters included.

    It takes one short forward pass without dropout, draws no random number and does not change the model. If the
    model is divided over processes, all of them must call this.

    Args:
        mixed_precision: accelerate's setting: `no`, `bf16`, `fp16` or `fp8`.
    """
    config = model.config.get_text_config()
    token_ids = token_ids_for(config.vocab_size)
    inputs = torch.tensor([token_ids], device=model.device)
    with torch.no_grad(), as_evaluated(model):
        logits = model(input_ids=inputs, use_cache=False).logits[0, :-1].float()
    rows = logits.log_softmax(dim=-1).gather(1, inputs[0, 1:, None])[:, 0].tolist()
    return Canary(
        token_ids,
        [logprob if math.isfinite(logprob) else None for logprob in rows],
        _dtype_of(model, mixed_precision),
        int(config.num_hidden_layers),
        sorted(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
    )


def forget_order(accelerator: Any) -> None:
    """Keep ZeRO stage 3 from prefetching in the canary's order in the next forward pass.

    In the canary's pass the head runs as a module. In TRL's pass it is gathered by hand, which DeepSpeed refuses
    for a parameter that is being prefetched (`partition_parameters.py`, "Cannot partition a param in flight").
    DeepSpeed records a new order in the next pass.
    """
    coordinator = accelerator.deepspeed_engine_wrapped.engine.optimizer.parameter_offload.get_param_coordinator()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()


def _dtype_of(model: Any, mixed_precision: str) -> str:
    computes_in = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}
    return computes_in.get(mixed_precision, str(model.dtype).removeprefix("torch."))


@contextlib.contextmanager
def as_evaluated(model: Any) -> Iterator[None]:
    """Set every module to evaluation mode, and restore each module's own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
