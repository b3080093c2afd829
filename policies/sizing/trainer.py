"""The memory of training by part: on each GPU, and of the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_orch.policies.sizing.memory import CUDA_BYTES, Memory, TrainerMemory, held_by, host_memory, memory_of
from grpo_orch.policies.sizing.shapes import Shape
from grpo_orch.policies.sizing.training import FLOAT32, Training, adapted, generating


def trainer_memory(shape: Shape, training: Training) -> TrainerMemory:
    """Return the memory of each GPU at its maximum in a step, and that of the host."""
    highest = max(moments(shape, training), key=lambda memory: memory.total_bytes)
    gpu = memory_of({**highest.parts, "CUDA": CUDA_BYTES}, highest.moment)
    return TrainerMemory(gpu=gpu, host=host_memory(shape, training))


def moments(shape: Shape, training: Training) -> Iterator[Memory]:
    """Yield the memory of a GPU's tensors at each moment of a step that may be its maximum."""
    layer, head = layer_pass(shape, training), head_pass(shape, training)
    held = held_by(shape, training)
    stay, gradients = held.stay, held.gradients
    accumulated = gradients if training.accumulates else 0
    last = shape.layers * (layer.input if training.checkpointing else layer.input + layer.saved)
    kept = last + 2 * layer.input  # with the outputs of the last layer and of its norm
    casts = layer.casts * shape.layers if training.checkpointing and held.keeps_casts else 0
    backward = layer.saved + layer.backward if training.checkpointing else layer.backward
    forward = layer.forward if training.checkpointing else 0
    mask = 0 if training.attention == "flash" else training.sequences * training.length**2  # of booleans
    before = gradients if training.accumulates else gradients - held.embedding_gradient
    yield memory_of(
        {
            **stay,
            "gradients": accumulated,
            "weights cast": casts,
            "activations": kept + mask + max(head.hidden, forward),
            "logits": head.tile,
        },
        "forward pass",
    )
    yield memory_of(
        {
            **stay,
            "gradients": accumulated,
            "activations": kept + mask + head.hidden,
            "logits": head.tile + head.gradient,
        },
        "head's backward pass",
    )
    head_gradient = head.kept_gradient or (held.head_gradient if not training.accumulates else 0)
    yield memory_of(
        {**stay, "gradients": accumulated + head_gradient, "activations": last + layer.input + mask + backward},
        "last layer's backward pass",
    )
    yield memory_of(
        {**stay, "gradients": before + head.kept_gradient, "activations": 2 * layer.input + mask + backward},
        "first layer's backward pass",
    )
    yield memory_of(
        {**stay, "gradients": before + head.kept_gradient + head.embedding, "activations": layer.input + mask},
        "embedding's backward pass",
    )
    yield memory_of({**stay, "gradients": gradients, **held.updating}, "optimizer's step")
    if training.generation_sequences:
        yield memory_of({**stay, **generating(shape, training)}, "generation")


# Activations of one layer, and of the head, between forward and backward pass.
# Counted from the tensors that autograd saves in transformers 5.19's decoders under sdpa (`modeling_qwen2.py` and
# similar), PEFT 0.21's layers and TRL 1.16's head. The textbook's 34 bytes x hidden a token and layer (arXiv
# 2205.05198) are for another MLP, with dropouts and without grouped heads. Saved tensors depend on three settings:
# - *mixed precision* (float32 weights under autocast): norms stay in float32, each linear layer keeps its own cast
#   of its input, and the cast weights are kept too.
# - *weights in bfloat16*: norms compute in a float32 copy; linear layers share their input.
# - *adapters*: a frozen layer keeps no input, an adapted one a copy of its own.

# TRL 1.16 computes logits in tiles of this many tokens and words (`kernels/chunked_logprob.py`).
TILE_TOKENS = 4096
TILE_VOCAB = 32_768


@dataclass(frozen=True, slots=True)
class Layer:
    """Bytes of one layer's pass.

    Attributes:
        input: kept by a checkpoint.
        saved: kept by autograd, without the input.
        forward: temporary in the forward pass, if nothing is saved.
        backward: temporary in the backward pass, in addition to saved tensors.
        casts: of its weights, if they are cast for computations.
    """

    input: int
    saved: int
    forward: int
    backward: int
    casts: int


@dataclass(frozen=True, slots=True)
class Head:
    """Bytes of the head's pass, and of the embedding's at the end of a step.

    Attributes:
        hidden: scored hidden states, with their gradients.
        tile: of logits, with its slices of the weight.
        gradient: in float32 while it is added up, and a copy in the weights' type.
        kept_gradient: of a tied head, kept until the embedding's gradient.
        embedding: the embedding's gradient at the end of the backward pass.
    """

    hidden: int
    tile: int
    gradient: int
    kept_gradient: int
    embedding: int


def layer_pass(shape: Shape, training: Training) -> Layer:
    """Return the bytes of a batch in the largest layer."""
    tokens, compute, stored = training.tokens, training.compute_bytes, training.weight_bytes
    hidden, width = shape.hidden, _width(shape)
    casts = _linear_params(shape) * compute if training.is_mixed else 0
    saved = tokens * (_norms(shape, training) + _mlp(shape, training) + _attention(shape, training))
    saved += tokens * _inputs(shape, training) + _mask(shape, training)
    if training.lora is None:
        in_flight, residual = 2 * width * compute, hidden * stored
    else:
        adapts_down = any(layer.name == "down_proj" for layer in adapted(shape.mlp, training.lora))
        in_flight = width * ((compute + FLOAT32) if adapts_down else 3 * compute)
        residual = 5 * hidden * compute
    return Layer(
        input=tokens * hidden * stored,
        saved=saved + casts,
        forward=tokens * (3 * width * compute + hidden * (2 * compute + 2 * stored)) + _mask(shape, training),
        backward=tokens * (in_flight + residual),
        casts=casts,
    )


def head_pass(shape: Shape, training: Training) -> Head:
    """Return the bytes of head and embedding. The whole logits never exist at once.

    Only completions are scored; the head's gradient is added up in float32 (TRL 1.16, `ChunkedLogProbFunction`).
    """
    scored = training.sequences * training.completion_tokens
    rows, words = min(scored, TILE_TOKENS), min(TILE_VOCAB, shape.vocab)
    compute, stored = training.compute_bytes, training.weight_bytes
    slices = 2 * words * shape.hidden * compute if training.is_mixed else 0
    narrow = shape.embedding_params * stored if stored < FLOAT32 else 0
    trains = training.lora is None
    trains_head = training.lora is None or "lm_head" in training.lora.whole
    whole = shape.embedding_params * stored
    return Head(
        hidden=scored * shape.hidden * (stored + FLOAT32) + rows * shape.hidden * compute,
        tile=rows * TILE_VOCAB * compute + slices,
        gradient=shape.embedding_params * FLOAT32 + narrow if trains_head else 0,
        kept_gradient=whole if trains and shape.tied else 0,
        embedding=(2 if shape.tied else 1) * whole if trains else 0,
    )


def _width(shape: Shape) -> int:
    """Return the inner width of a token's MLP, all its experts included."""
    if shape.experts is None:
        return shape.mlp_width
    return max(
        shape.experts.chosen * shape.experts.width + shape.experts.shared_width, shape.mlp_width * _dense(shape)
    )


def _dense(shape: Shape) -> bool:
    return shape.experts is None or shape.experts.layers < shape.layers


def _linear_params(shape: Shape) -> int:
    return shape.layer_params - shape.norms


def _norms(shape: Shape, training: Training) -> int:
    """Return the bytes a token that a layer's norms keep, without the layer's input.

    In float32 a norm's input is the residual stream itself, of which the first is the layer's input.
    """
    wide = (shape.norms - _head_norms(shape)) // shape.hidden * shape.hidden
    heads = (shape.heads + shape.kv_heads) * shape.head_dim if _head_norms(shape) else 0
    trains, compute = training.lora is None, training.compute_bytes
    normalised = heads * (FLOAT32 + (compute if trains else 0))
    if training.weight_bytes == FLOAT32:
        return (wide - shape.hidden) * FLOAT32 + (wide * FLOAT32 if trains else 0) + normalised
    return wide * (FLOAT32 + (compute if trains else 0)) + normalised


def _head_norms(shape: Shape) -> int:
    """Return the elements of the norms of queries and keys; 0 without."""
    return shape.norms % shape.hidden


def _mlp(shape: Shape, training: Training) -> int:
    """Return the bytes a token of gate, its activation and up. Experts also keep their input tokens."""
    routed = 2 * shape.experts.chosen * shape.hidden if shape.experts is not None else 0
    return (3 * _width(shape) + routed) * training.compute_bytes


def _attention(shape: Shape, training: Training) -> int:
    """Return the bytes a token of queries, keys and values, which are repeated for each head, and the result."""
    return 4 * shape.heads * shape.head_dim * training.compute_bytes + shape.heads * FLOAT32


def _inputs(shape: Shape, training: Training) -> int:
    """Return the bytes a token that linear layers keep for their gradients."""
    compute = training.compute_bytes
    if training.lora is not None:
        layers = (*adapted(shape.attention, training.lora), *adapted(shape.mlp, training.lora))
        return sum(layer.inputs + training.lora.rank for layer in layers) * compute
    inner = _width(shape) * compute
    if training.is_mixed:
        return inner + _readers(shape) * shape.hidden * compute
    return inner + 2 * shape.hidden * compute


def _readers(shape: Shape) -> int:
    """Return how many linear layers read the hidden state."""
    layers = (*shape.attention, *shape.mlp)
    return sum(layer.inputs == shape.hidden and layer.name not in ("o_proj", "down_proj") for layer in layers)


def _mask(shape: Shape, training: Training) -> int:
    """Return the bytes of a batch's mask (sequences x 1 x tokens x tokens), which each layer's sdpa converts.

    With `eager` attention the scores of all heads and their softmax too.
    """
    if training.attention == "flash":
        return 0
    scores = 2 * shape.heads if training.attention == "eager" else 0
    return training.sequences * training.length**2 * training.compute_bytes * (1 + scores)
