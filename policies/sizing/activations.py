"""What a forward and a backward pass hold beside weights, gradients and states."""

from __future__ import annotations

from dataclasses import dataclass

from policies.sizing.shapes import Shape
from policies.sizing.training import FLOAT32, Training

# TRL 1.16 computes logits in tiles of so many tokens and words (`kernels/chunked_logprob.py`, `trainer/utils.py`).
TILE_TOKENS = 4096
TILE_VOCAB = 32_768


@dataclass(frozen=True, slots=True)
class Passing:
    """Bytes that come and go with a batch."""

    activations: int
    logits: int


def passing(shape: Shape, training: Training) -> Passing:
    """Return what a batch takes on its way through the model."""
    layer = (
        training.tokens
        * training.compute_bytes
        * (8 * shape.hidden + 4 * shape.mlp_width + 2 * (shape.heads + shape.kv_heads) * shape.head_dim)
    )
    residual = training.tokens * shape.hidden * training.compute_bytes
    kept = shape.layers * residual + layer if training.checkpointing else shape.layers * layer
    scored = training.sequences * training.completion_tokens
    tile = min(scored, TILE_TOKENS) * TILE_VOCAB * training.compute_bytes
    head = shape.embedding_params * FLOAT32 if training.lora is None else 0
    return Passing(kept, tile + head)
