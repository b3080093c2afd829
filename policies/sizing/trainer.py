"""What training takes, part by part: how much of each GPU, and of the machine's own memory."""

from __future__ import annotations

from collections.abc import Iterator

from policies.sizing.activations import head_pass, layer_pass
from policies.sizing.generation import generating
from policies.sizing.held import CUDA_BYTES, held_by, host_memory
from policies.sizing.memory import Memory, TrainerMemory, memory_of
from policies.sizing.shapes import Shape
from policies.sizing.training import Training


def trainer_memory(shape: Shape, training: Training) -> TrainerMemory:
    """Return what each GPU and the machine hold at the highest of a step's moments."""
    highest = max(moments(shape, training), key=lambda one: one.total_bytes)
    gpu = memory_of({**highest.parts, "CUDA": CUDA_BYTES}, highest.moment)
    return TrainerMemory(gpu=gpu, host=host_memory(shape, training))


def moments(shape: Shape, training: Training) -> Iterator[Memory]:
    """What a GPU's tensors take at each moment of a step that may be its highest."""
    layer, head = layer_pass(shape, training), head_pass(shape, training)
    held = held_by(shape, training)
    stay, gradients = held.stay, held.gradients
    begun = gradients if training.accumulates else 0
    last = shape.layers * (layer.input if training.checkpointing else layer.input + layer.saved)
    kept = last + 2 * layer.input  # with what leaves the last layer, and its norm's
    casts = held.casts(layer.casts * shape.layers) if training.checkpointing else 0
    one = layer.saved + layer.backward if training.checkpointing else layer.backward
    passing = layer.forward if training.checkpointing else 0
    mask = _bool_mask(training)
    before = held.before_embedding(training.accumulates)
    yield memory_of(
        {
            **stay,
            "gradients": begun,
            "weights cast": casts,
            "activations": kept + mask + max(head.hidden, passing),
            "logits": head.tile,
        },
        "forward pass",
    )
    yield memory_of(
        {
            **stay,
            "gradients": begun,
            "activations": kept + mask + head.hidden,
            "logits": head.tile + head.gradient,
        },
        "head's backward pass",
    )
    of_head = head.kept_gradient or (held.head_gradient if not training.accumulates else 0)
    yield memory_of(
        {**stay, "gradients": begun + of_head, "activations": last + layer.input + mask + one},
        "last layer's backward pass",
    )
    yield memory_of(
        {**stay, "gradients": before + head.kept_gradient, "activations": 2 * layer.input + mask + one},
        "first layer's backward pass",
    )
    yield memory_of(
        {**stay, "gradients": before + head.kept_gradient + head.embedding, "activations": layer.input + mask},
        "embedding's backward pass",
    )
    yield memory_of({**stay, "gradients": gradients, **held.updating}, "optimizer's step")
    if training.generation_sequences:
        yield memory_of({**stay, **generating(shape, training)}, "generation")


def _bool_mask(training: Training) -> int:
    length = training.prompt_tokens + training.completion_tokens
    return 0 if training.attention == "flash" else training.sequences * length * length
