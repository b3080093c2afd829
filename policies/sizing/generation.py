"""What a trainer takes that generates by itself, by transformers' `generate`: in a run without rollout nodes
(`rollout.replicas: 0`), or while none is to be had. And which trainers cannot."""

from __future__ import annotations

from policies.model.spec import RunSpec
from policies.sizing.shapes import Shape
from policies.sizing.training import Training, divides_weights

# Of each word for each completion where the next one is drawn: logits, shaped and as log-probabilities, in
# float32, and their sum in float64 (`tasks/trl/own_generation.py`).
DRAW_BYTES = 3 * 4 + 2 * 8


def why_not_itself(spec: RunSpec) -> str:
    """Why the trainer of a run with rollout nodes does not generate while there is none; empty where it does."""
    if spec.rollout.recovery == "exact":
        return "with recovery: exact no completion may differ from what a rollout node would make"
    if spec.rollout.max_staleness:
        return "with max_staleness the completions of a step are an older policy's, whose weights it has not"
    if divides_weights(spec):
        return "no process of the trainer has the whole model"
    for key in ("generation_kwargs", "vllm_structured_outputs_regex"):
        if spec.grpo.get(key):
            return f"grpo.{key} is vLLM's"
    return ""


def generating(shape: Shape, training: Training) -> dict[str, int]:
    """Return the parts of a batch's generation, at its last token.

    A cache grows by a copy: for a moment one layer's is there twice, and repeated for each head (transformers
    5.19, `DynamicLayer.update`, `repeat_kv`). Under autocast all weights are cast once, and kept to the end.
    """
    length, count = training.prompt_tokens + training.completion_tokens, training.generation_sequences
    one = count * length * training.compute_bytes
    of_layer = 2 * shape.kv_heads * shape.head_dim
    if shape.latent is not None:  # transformers keeps keys and values as they are computed with
        of_layer = shape.heads * (shape.head_dim + shape.latent.value_dim)
    casts = (shape.text_params - shape.embedding_params) * training.compute_bytes
    return {
        "KV cache": one * (shape.layers * of_layer + of_layer + 2 * shape.heads * shape.head_dim),
        "logits": count * shape.vocab * DRAW_BYTES,
        "weights cast": casts if training.is_mixed and training.lora is None else 0,
    }
