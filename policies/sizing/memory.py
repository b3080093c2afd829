"""Memory by purpose, at the moment of its maximum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

from grpo_orch.policies.sizing.shapes import Shape
from grpo_orch.policies.sizing.training import FLOAT32, Training, adapter_params, copied_params, trained_params

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
class TrainerMemory:
    """The memory of training.

    Attributes:
        gpu: of each GPU, at the moment of its maximum in a step.
        host: of the machine, all its processes together.
    """

    gpu: Memory
    host: Memory


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
