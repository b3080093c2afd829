"""What training takes, part by part: how much of each GPU, and of the machine's own memory."""

from __future__ import annotations

from policies.sizing.activations import Passing, passing
from policies.sizing.adapter import adapter_params
from policies.sizing.memory import Memory, TrainerMemory, memory_of
from policies.sizing.shapes import Shape
from policies.sizing.training import FLOAT32, Training


def trainer_memory(shape: Shape, training: Training) -> TrainerMemory:
    """Return what each GPU and the machine hold at the highest of a step's moments."""
    held = _held(shape, training)
    flowing = passing(shape, training)
    moments = [_at(held, flowing), _updating(held)]
    gpu = max(moments, key=lambda one: one.total_bytes)
    return TrainerMemory(gpu=gpu, host=_host(shape, training))


def trained_params(shape: Shape, training: Training) -> int:
    """How many parameters the optimizer changes."""
    return shape.params if training.lora is None else adapter_params(shape, training.lora)


def _held(shape: Shape, training: Training) -> dict[str, int]:
    """What stays from step to step, of one GPU."""
    whole, trained = shape.params * training.weight_bytes, trained_params(shape, training)
    shards = training.processes
    in_shards = shards if training.sharding in ("zero3", "fsdp") else 1
    states = 0 if training.offloads_optimizer else int(trained * training.state_bytes)
    return {
        "weights": 0 if training.offloads_weights else whole // in_shards,
        "adapter": trained * FLOAT32 // in_shards if training.lora is not None else 0,
        "gradients": trained * _gradient_bytes(training) // (shards if training.sharding != "none" else 1),
        "optimizer": states // (shards if training.sharding != "none" else 1),
        "reference": whole // in_shards if training.reference else 0,
    }


def _gradient_bytes(training: Training) -> int:
    return FLOAT32 if training.lora is not None else training.weight_bytes


def _at(held: dict[str, int], flowing: Passing) -> Memory:
    return memory_of({**held, "activations": flowing.activations, "logits": flowing.logits}, "backward pass")


def _updating(held: dict[str, int]) -> Memory:
    return memory_of(held, "optimizer's step")


def _host(shape: Shape, training: Training) -> Memory:
    trained = trained_params(shape, training)
    states = int(trained * (training.state_bytes + FLOAT32)) if training.offloads_optimizer else 0
    weights = shape.params * training.weight_bytes if training.offloads_weights else 0
    return memory_of({"optimizer": states, "weights": weights})
