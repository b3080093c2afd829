"""What the disks of a run's machines have to hold, from its model's size. Upper bounds: a full disk ends the work.

| on the trainer's machine | on a rollout node |
|---|---|
| system and environment | system and environment |
| the base model | the base model |
| three checkpoints: saved, on its way to the store, restored | |
| two policies: published, being published | two policies: served, fetched |

A checkpoint is the weights and AdamW's two states, in the type that they are trained in; with adapters those
of the adapters alone, in float32 (PEFT), and the base model once more where it is restored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from policies.model.spec import RunSpec, generates_itself, model_settings
from policies.model.vocabulary import Role
from policies.weights.adapters import DEFAULT_RANK, why_whole
from policies.weights.dtypes import WIDTH, served_types

GB = 10**9
# An image with drivers and SkyPilot's runtime, and a log: an assumption. SkyPilot refuses less than its image has.
SYSTEM_BYTES = 50 * GB
# With CUDA, unpacked, and what vLLM compiles; 4 GB on a CPU machine.
ENVIRONMENT_BYTES = 10 * GB
# Of rank 16 on every linear layer: 1.7 % of the parameters of Qwen3-0.6B, 0.4 % of those of Qwen2.5-32B.
ADAPTER_SHARE = 0.02 / 16  # for each of its ranks
SLACK = 1.1  # file systems keep a twentieth to themselves
STATES = 2  # of AdamW


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model as its files have it. `config` is its config.json, empty where that is not known."""

    params: int
    stored_bytes: int
    config: Mapping[str, Any] = field(default_factory=dict)


def disk_parts(role: Role, spec: RunSpec, model: ModelSize) -> dict[str, int]:
    """What the disk of one such machine has to hold, in bytes by what it is."""
    parts = {"system and environment": SYSTEM_BYTES + ENVIRONMENT_BYTES, "base model": model.stored_bytes}
    if not generates_itself(spec):
        parts["two policies"] = 2 * _policy_bytes(spec, model)
    if role is Role.TRAINER:
        restored = model.stored_bytes if spec.trainer.peft is not None or (spec.grpo.get("beta") or 0) > 0 else 0
        # The spool's own folder holds two of them, if it is on a disk of its own.
        spooled = 0 if spec.checkpoints.spool else 2
        parts["checkpoints"] = (1 + spooled) * checkpoint_bytes(spec, model) + restored
    return parts


def disk_gb(role: Role, spec: RunSpec, model: ModelSize) -> int:
    """How large that disk has to be, in GB as SkyPilot's `disk_size` counts them, in tens."""
    return 10 * math.ceil(SLACK * sum(disk_parts(role, spec, model).values()) / (10 * GB))


def checkpoint_bytes(spec: RunSpec, model: ModelSize) -> int:
    """Weights that are trained, and the optimizer's states."""
    if spec.trainer.peft is not None:
        return (1 + STATES) * WIDTH["F32"] * _adapter_params(spec, model)
    asked = model_settings(spec.grpo)
    dtype = str(asked.get("dtype") or asked.get("torch_dtype") or "float32").removeprefix("torch.")
    width = 2 if dtype in ("bfloat16", "float16") else WIDTH["F32"]  # TRL loads in float32 unless it is told
    states = 2 if "8bit" in str(spec.grpo.get("optim")) else STATES * width  # bytes for each parameter
    return (width + states) * model.params


def _policy_bytes(spec: RunSpec, model: ModelSize) -> int:
    if spec.trainer.peft is not None and model.config and not why_whole(spec, model.config):
        return WIDTH["F32"] * _adapter_params(spec, model)
    to = served_types(spec.rollout.vllm, model.config).to
    return model.params * WIDTH[to] if to is not None else max(model.stored_bytes, 2 * model.params)


def _adapter_params(spec: RunSpec, model: ModelSize) -> int:
    rank = int((spec.trainer.peft or {}).get("r") or DEFAULT_RANK)
    return int(model.params * min(1.0, ADAPTER_SHARE * rank))
