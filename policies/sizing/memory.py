"""Memory by what it is for, at the moment when all of it together is the most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

from policies.sizing.shapes import Shape
from policies.sizing.training import FLOAT32, Training, adapter_params, copied_params, trained_params

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one GPU, or of one machine.

    Attributes:
        parts: bytes by what they are; none is 0.
        moment: when that is, in a few words.
    """

    parts: Mapping[str, int] = field(default_factory=dict)
    moment: str = ""

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())


def memory_of(parts: Mapping[str, int], moment: str = "") -> Memory:
    """The memory, without what is nothing."""
    return Memory({name: size_bytes for name, size_bytes in parts.items() if size_bytes}, moment)


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """What training takes.

    Attributes:
        gpu: of each GPU, at the highest of a step's moments.
        host: of the machine, of all its processes together.
    """

    gpu: Memory
    host: Memory


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """What a vLLM engine takes.

    Attributes:
        gpu: of each of its GPUs; what is left for the KV cache is in it.
        host: of the machine, of all its engines together.
        token_bytes: that one GPU's KV cache holds of a token.
        tokens: that the engine's KV cache holds; 0 where the model leaves no room.
        sequences: of the longest kind, that it holds at once; fewer than 1: vLLM refuses to start.
    """

    gpu: Memory
    host: Memory
    token_bytes: int
    tokens: int
    sequences: float


# What stays on a GPU from pass to pass, and in the machine's memory, by how it is divided over processes.
#
# Bytes for each parameter; w is the type that the model is loaded in, s the optimizer's states (8 of AdamW in
# float32), n the processes:
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
# AdamW takes 16 bytes in one process (4 + 4 + 8) and 8 where the model is loaded in bfloat16 (2 + 2 + 4); under
# ZeRO 16 (2 + 2 + 12), of which the stage says what is divided.

# DeepSpeed 0.19's `reduce_bucket_size`, allocated whatever the model's size, twice in stage 3 (`overlap_comm`),
# and `stage3_max_live_parameters`; elements.
BUCKET = 500_000_000
LIVE = 1_000_000_000
# Stage 3 updates the weights in parts of so many of a process's own elements (`sub_group_size`), and makes the
# copies of one part's gradients at a time.
SUB_GROUP = 1_000_000_000
# CUDA's context and libraries, with cuBLAS's workspaces: an assumption, of 0.4 to 0.8 GB on Hopper.
CUDA_BYTES = 600 << 20
# Python, torch, transformers and their imports in one process, with CUDA's host side: an assumption.
PROCESS_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one GPU.

    Attributes:
        stay: by part, in every moment.
        gradients: of all that is trained, once they are there.
        head_gradient: of a head of its own.
        embedding_gradient: of the embedding, which comes last.
        updating: by part, what the optimizer's step takes over all that.
        casts_once: whether weights that are cast stay so until the forward pass ends.
    """

    stay: dict[str, int]
    gradients: int
    head_gradient: int
    embedding_gradient: int
    updating: dict[str, int]
    casts_once: bool

    def before_embedding(self, accumulates: bool) -> int:
        """Gradients when all but the embedding's are there."""
        return self.gradients if accumulates else self.gradients - self.embedding_gradient

    def casts(self, all_bytes: int) -> int:
        return all_bytes if self.casts_once else 0


def held_by(shape: Shape, training: Training) -> Held:
    """Return what one GPU holds."""
    stage, count, lora = training.sharding, training.processes, training.lora
    zero, whole_on_each = stage.startswith("zero"), stage not in ("zero3", "fsdp")
    width = training.stored_bytes if lora is None or zero else FLOAT32
    trained = shape.params
    if lora is not None:  # PEFT leaves the type of what is trained whole
        trained = adapter_params(shape, lora) + copied_params(shape, lora) * training.stored_bytes // width
    by_weights = 1 if whole_on_each else count
    by_states = 1 if stage == "none" else count
    by_gradients = 1 if stage in ("none", "zero1") else count
    weights = shape.params * training.stored_bytes // by_weights
    states = int(trained * (training.state_bytes + (FLOAT32 if zero else 0))) // by_states
    away = training.offloads_optimizer
    gradients = 0 if away and stage in ("zero2", "zero3") else trained * width // by_gradients
    share = gradients / max(1, trained)
    head = shape.embedding_params if lora is None else 0
    updated = min(trained // count, SUB_GROUP) if stage == "zero3" else trained // count
    return Held(
        stay={
            "weights": 0 if training.offloads_weights else weights,
            "weights gathered": _gathered(shape, training),
            "adapter": trained * width // by_weights if lora is not None else 0,
            "optimizer": 0 if away else states,
            "reference": weights if training.reference else 0,
            "gradients sent": _sent(training, trained * width),
        },
        gradients=gradients,
        head_gradient=0 if shape.tied else int(head * share),
        embedding_gradient=int(head * share),
        # DeepSpeed's copy of its part of the gradients in float32, flat.
        updating={"gradients copied": updated * (2 + FLOAT32) if zero and not away else 0},
        casts_once=training.is_mixed and lora is None,
    )


def host_memory(shape: Shape, training: Training) -> Memory:
    """Return what the trainer's machine holds in its own memory, for all processes.

    DeepSpeed keeps an offloaded optimizer's copy of the weights, its states and gradients there, in float32, and
    what is added up before a step in two bytes. Checkpoints on their way lie in memory only where it has room.
    """
    trained = trained_params(shape, training)
    each = training.state_bytes
    if training.sharding.startswith("zero"):
        each += 2 * FLOAT32 + (2 if training.accumulates else 0)
    return memory_of(
        {
            "processes": training.processes * PROCESS_BYTES,
            "optimizer": int(trained * each) if training.offloads_optimizer else 0,
            "weights": shape.params * training.stored_bytes if training.offloads_weights else 0,
        }
    )


def _gathered(shape: Shape, training: Training) -> int:
    """Weights that are whole for a while: under ZeRO-3 up to DeepSpeed's default limit; under FSDP2 a layer and
    the next one, embedding and head, and the head once more as TRL gathers it (1.16, `full_tensor`)."""
    heads = shape.embedding_params * (1 if shape.tied else 2)
    if training.sharding == "zero3":
        return min(shape.params, LIVE) * training.weight_bytes
    if training.sharding == "fsdp":
        once = (2 * shape.layer_params + heads) * training.compute_bytes
        return once + shape.embedding_params * training.stored_bytes
    return 0


def _sent(training: Training, gradients: int) -> int:
    """Buckets of gradients on their way to other processes."""
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
