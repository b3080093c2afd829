"""Memory by purpose, at the moment of its maximum; and the memory of training, on each GPU and of the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import assert_never

from grpo_orch.policies.sizing.shapes import Shape
from grpo_orch.policies.sizing.training import (
    FLOAT32,
    Training,
    adapted,
    adapter_params,
    copied_params,
    generating,
    trained_params,
)

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one GPU, or of one machine.

    Attributes:
        parts: bytes by purpose; none is 0.
        moment: a short name of the moment.
    """

    parts: Mapping[str, int] = field(default_factory=dict)
    moment: str = ""

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())


def memory_of(parts: Mapping[str, int], moment: str = "") -> Memory:
    """Return the memory without empty parts."""
    return Memory({name: size_bytes for name, size_bytes in parts.items() if size_bytes}, moment)


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """The memory of a vLLM engine.

    Attributes:
        gpu: of each of its GPUs, the KV cache included.
        token_bytes: of a token in one GPU's KV cache.
        tokens: that the engine's KV cache holds; 0 if the model leaves no room.
        sequences: of maximum length that it holds at once; below 1 vLLM refuses to start.
    """

    gpu: Memory
    token_bytes: int
    tokens: int
    sequences: float


# Persistent memory of a GPU and of the machine, by sharding.
#
# Bytes for each parameter; w is the width of the model as loaded, s that of the optimizer's states (8 for AdamW in
# float32), n the number of processes:
#
# | | weights | gradients | optimizer | source |
# |---|---|---|---|---|
# | one process | w | w | s | torch 2.13, `AdamW` |
# | DDP | w | 2 w | s | its buckets are a copy (`gradient_as_bucket_view` is off in accelerate 1.15) |
# | ZeRO-1 | 2 | 2 | (4 + s) / n | DeepSpeed 0.19, `stage_1_and_2.py`; arXiv 1910.02054 |
# | ZeRO-2 | 2 | 2 / n | (4 + s) / n | the same |
# | ZeRO-3 | 2 / n | 2 / n | (4 + s) / n | `stage3.py` |
# | FSDP2 | 4 / n | 4 / n | s / n | accelerate 1.15, `fsdp2_prepare_model` |
#
# AdamW takes 16 bytes in one process (4 + 4 + 8), 8 if the model is loaded in bfloat16 (2 + 2 + 4), and 16 under
# ZeRO (2 + 2 + 12), whose stage defines the sharded part.

# DeepSpeed 0.19's `reduce_bucket_size`, allocated for any size of model, twice in stage 3 (`overlap_comm`), and
# `stage3_max_live_parameters`; in elements.
BUCKET = 500_000_000
LIVE = 1_000_000_000
# Stage 3 updates the weights in parts of this many of a process's elements (`sub_group_size`), and copies the
# gradients of one part at a time.
SUB_GROUP = 1_000_000_000
# CUDA's context and libraries, with cuBLAS's workspaces: an assumption; 0.4 to 0.8 GB on Hopper.
CUDA_BYTES = 600 << 20
# Python, torch, transformers and their imports in one process, with CUDA's host side: an assumption.
PROCESS_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one GPU.

    Attributes:
        stay: at every moment, by part.
        gradients: of all trained parameters.
        head_gradient: of an untied head.
        embedding_gradient: of the embedding, which is computed last.
        updating: additional in the optimizer's step, by part.
        keeps_casts: whether cast weights are kept until the forward pass ends.
    """

    stay: dict[str, int]
    gradients: int
    head_gradient: int
    embedding_gradient: int
    updating: dict[str, int]
    keeps_casts: bool


def held_by(shape: Shape, training: Training) -> Held:
    """Return the bytes of one GPU."""
    stage, count, lora = training.sharding, training.processes, training.lora
    is_zero, shards_weights = stage.startswith("zero"), stage in ("zero3", "fsdp")
    width = training.stored_bytes if lora is None or is_zero else FLOAT32
    trained = shape.params
    if lora is not None:  # PEFT keeps the type of modules that are trained whole
        trained = adapter_params(shape, lora) + copied_params(shape, lora) * training.stored_bytes // width
    weight_shards = count if shards_weights else 1
    state_shards = 1 if stage == "none" else count
    gradient_shards = 1 if stage in ("none", "zero1") else count
    weights = shape.params * training.stored_bytes // weight_shards
    states = int(trained * (training.state_bytes + (FLOAT32 if is_zero else 0))) // state_shards
    is_offloaded = training.offloads_optimizer
    gradients = 0 if is_offloaded and stage in ("zero2", "zero3") else trained * width // gradient_shards
    share = gradients / max(1, trained)
    head = shape.embedding_params if lora is None else 0
    updated = min(trained // count, SUB_GROUP) if stage == "zero3" else trained // count
    return Held(
        stay={
            "weights": 0 if training.offloads_weights else weights,
            "weights gathered": _gathered(shape, training),
            "adapter": trained * width // weight_shards if lora is not None else 0,
            "optimizer": 0 if is_offloaded else states,
            "reference": weights if training.reference else 0,
            "gradients sent": _sent(training, trained * width),
        },
        gradients=gradients,
        head_gradient=0 if shape.tied else int(head * share),
        embedding_gradient=int(head * share),
        # DeepSpeed's flat float32 copy of its part of the gradients.
        updating={"gradients copied": updated * (2 + FLOAT32) if is_zero and not is_offloaded else 0},
        keeps_casts=training.is_mixed and lora is None,
    )


def host_memory(shape: Shape, training: Training) -> Memory:
    """Return the host memory of the trainer's machine, for all processes.

    DeepSpeed keeps an offloaded optimizer's copy of the weights, its states and gradients there, in float32, and
    accumulated gradients in two bytes. Checkpoint uploads are kept in memory only if it has room.
    """
    trained = trained_params(shape, training)
    param_bytes = training.state_bytes
    if training.sharding.startswith("zero"):
        param_bytes += 2 * FLOAT32 + (2 if training.accumulates else 0)
    return memory_of(
        {
            "processes": training.processes * PROCESS_BYTES,
            "optimizer": int(trained * param_bytes) if training.offloads_optimizer else 0,
            "weights": shape.params * training.stored_bytes if training.offloads_weights else 0,
        }
    )


def _gathered(shape: Shape, training: Training) -> int:
    """Return the bytes of gathered weights.

    Under ZeRO-3 up to DeepSpeed's default limit. Under FSDP2 a layer and the next one, embedding and head, and the
    head once more as TRL gathers it (1.16, `full_tensor`).
    """
    heads = shape.embedding_params * (1 if shape.tied else 2)
    if training.sharding == "zero3":
        return min(shape.params, LIVE) * training.weight_bytes
    if training.sharding == "fsdp":
        layers_and_heads = (2 * shape.layer_params + heads) * training.compute_bytes
        return layers_and_heads + shape.embedding_params * training.stored_bytes
    return 0


def _sent(training: Training, gradients: int) -> int:
    """Return the bytes of gradient buckets that are sent to other processes."""
    match training.sharding:
        case "none":
            return gradients if training.processes > 1 else 0
        case "zero1":
            return BUCKET * FLOAT32
        case "zero2":
            return BUCKET * 2
        case "zero3":
            return 2 * BUCKET * 2
        case "fsdp":
            return 0
        case never:
            assert_never(never)


# The memory of training at each moment of a step.


def trainer_memory(shape: Shape, training: Training) -> Memory:
    """Return the memory of each GPU at its maximum in a step."""
    highest = max(moments(shape, training), key=lambda memory: memory.total_bytes)
    return memory_of({**highest.parts, "CUDA": CUDA_BYTES}, highest.moment)


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
    is_dense_too = shape.experts.layers < shape.layers
    return max(shape.experts.chosen * shape.experts.width, shape.mlp_width * is_dense_too)


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
