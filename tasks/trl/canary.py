"""The trainer's side of the canary: its log-probabilities of the fixed text, see `policies.serving.canary`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from policies.serving.canary import Canary, token_ids_for


def canary_of(model: Any, mixed_precision: str) -> Canary:
    """Compute the text on a model of transformers as it is now, adapters included.

    One short forward pass without dropout: no random number is drawn and nothing of the model changes. Where the
    model is divided over processes, all of them have to call.

    Args:
        mixed_precision: what accelerate runs the model's forward pass in: `no`, `bf16`, `fp16` or `fp8`.
    """
    config = model.config.get_text_config()
    token_ids = token_ids_for(config.vocab_size)
    inputs = torch.tensor([token_ids], device=model.device)
    with torch.no_grad(), as_evaluated(model):
        logits = model(input_ids=inputs, use_cache=False).logits[0, :-1].float()
    rows = logits.log_softmax(dim=-1).gather(1, inputs[0, 1:, None])[:, 0].tolist()
    return Canary(
        token_ids,
        [one if math.isfinite(one) else None for one in rows],
        _dtype_of(model, mixed_precision),
        int(config.num_hidden_layers),
        sorted(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
    )


def forget_order(accelerator: Any) -> None:
    """Keep ZeRO stage 3 from fetching ahead for the next forward pass in the order of the canary's.

    There the head is a module that runs; in TRL's pass it is gathered by hand instead, and what is being fetched
    ahead cannot be: DeepSpeed raises (`partition_parameters.py`, "Cannot partition a param in flight"). The order
    is learnt anew from the next pass, as when a model takes another way through its modules.
    """
    coordinator = accelerator.deepspeed_engine_wrapped.engine.optimizer.parameter_offload.get_param_coordinator()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()


def _dtype_of(model: Any, mixed_precision: str) -> str:
    computes_in = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}
    return computes_in.get(mixed_precision, str(model.dtype).removeprefix("torch."))


@contextlib.contextmanager
def as_evaluated(model: Any) -> Iterator[None]:
    """Every module as in evaluation; then each as it was, for some may be frozen so."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
