"""Disk space of a run's machines, from its model's size. Upper bounds, because a full disk ends the work.

| on the trainer's machine | on a rollout node |
|---|---|
| system and environment | system and environment |
| the base model | the base model |
| three checkpoints: saved, on its way to the store, restored | |
| two policies: published, being published | two policies: served, fetched |

A checkpoint is the weights and AdamW's two states, in the type of training; with adapters only those of the
adapters, in float32 (PEFT), plus the base model where it is restored. DeepSpeed and FSDP store their own state in
addition to the whole weights. Bytes a parameter, where w is 2, or 4 if nothing is computed in half precision:

| | whole weights | weights once more | optimizer |
|---|---|---|---|
| one process, DDP, in float32 / bfloat16 | 4 / 2 | | 8 / 4 |
| ZeRO-1, ZeRO-2 | w | w | 4 + 8 |
| ZeRO-3 | w | | 4 + 8 |
| FSDP2 | 4 | 4 | 8 |
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_orch.policies.model.spec import (
    RunSpec,
    Sharding,
    computes_in_half,
    deepspeed_file,
    generates_itself,
    model_settings,
    sharding_of,
)
from grpo_orch.policies.model.vocabulary import Role
from grpo_orch.policies.weights.adapters import DEFAULT_RANK, adapter_obstacle
from grpo_orch.policies.weights.tensors import WIDTH, served_types

GB = 10**9
# An image with drivers and SkyPilot's runtime, and a log: an assumption. SkyPilot refuses less than its image.
SYSTEM_BYTES = 50 * GB
# With CUDA, unpacked, and vLLM's compile cache; 4 GB on a CPU machine.
ENVIRONMENT_BYTES = 10 * GB
# With rank 16 on every linear layer: 1.7 % of the parameters of Qwen3-0.6B, 0.4 % of those of Qwen2.5-32B.
ADAPTER_SHARE = 0.02 / 16  # for each rank
SLACK = 1.1  # file systems reserve a twentieth
STATES = 2  # of AdamW


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model's size in its files. `config` is its config.json; empty: unknown."""

    params: int
    stored_bytes: int
    config: Mapping[str, Any] = field(default_factory=dict)


def disk_parts(role: Role, spec: RunSpec, model: ModelSize) -> dict[str, int]:
    """Return the bytes that the disk of one such machine has to hold, by part."""
    parts = {"system and environment": SYSTEM_BYTES + ENVIRONMENT_BYTES, "base model": model.stored_bytes}
    if not generates_itself(spec):
        parts["two policies"] = 2 * _policy_bytes(spec, model)
    if role is Role.TRAINER:
        restored = model.stored_bytes if spec.trainer.peft is not None or (spec.grpo.get("beta") or 0) > 0 else 0
        # A spool on its own disk holds two of them.
        spooled = 0 if spec.checkpoints.spool else 2
        parts["checkpoints"] = (1 + spooled) * checkpoint_bytes(spec, model) + restored
    return parts


def disk_gb(role: Role, spec: RunSpec, model: ModelSize) -> int:
    """Return the required size of that disk in GB of SkyPilot's `disk_size`, in multiples of 10."""
    return 10 * math.ceil(SLACK * sum(disk_parts(role, spec, model).values()) / (10 * GB))


def checkpoint_bytes(spec: RunSpec, model: ModelSize) -> int:
    """Return the size of a checkpoint: trained weights and the optimizer's states."""
    params = model.params if spec.trainer.peft is None else _adapter_params(spec, model)
    return checkpoint_bytes_each(spec) * params


def checkpoint_bytes_each(spec: RunSpec) -> int:
    """Return the bytes of a checkpoint for each trained parameter."""
    settings, sharding = model_settings(spec.grpo), _sharding(spec)
    dtype = str(settings.get("dtype") or settings.get("torch_dtype") or "float32").removeprefix("torch.")
    is_half = spec.trainer.peft is None and dtype in ("bfloat16", "float16")  # TRL loads in float32 by default
    width = 2 if is_half else WIDTH["F32"]
    state_width = WIDTH["F32"] if sharding != "none" else width
    states = STATES if "8bit" in str(spec.grpo.get("optim")) else STATES * state_width
    match sharding:
        case "none":
            return width + states
        case "fsdp":
            return 2 * WIDTH["F32"] + states
    # DeepSpeed converts the weights it trains, and its optimizer keeps a copy in float32.
    width = 2 if computes_in_half(spec) else width
    return (width if sharding == "zero3" else 2 * width) + WIDTH["F32"] + states


def _sharding(spec: RunSpec) -> Sharding:
    """Return `sharding_of`, or for a DeepSpeed config file stage 2, which stores most."""
    return "zero2" if deepspeed_file(spec) else sharding_of(spec)[0]


def _policy_bytes(spec: RunSpec, model: ModelSize) -> int:
    if spec.trainer.peft is not None and model.config and not adapter_obstacle(spec, model.config):
        return WIDTH["F32"] * _adapter_params(spec, model)
    to = served_types(spec.rollout.vllm, model.config).to
    return model.params * WIDTH[to] if to is not None else max(model.stored_bytes, 2 * model.params)


def _adapter_params(spec: RunSpec, model: ModelSize) -> int:
    rank = int((spec.trainer.peft or {}).get("r") or DEFAULT_RANK)
    return int(model.params * min(1.0, ADAPTER_SHARE * rank))


# `disk_size` of `resources`, read as SkyPilot 0.14.1 does.
#
# Its schema (`MEMORY_SIZE_PATTERN` of `sky/skylet/constants.py`) takes whole numbers, or texts of digits and a
# unit; `parse_memory_resource` (`sky/utils/resources_utils.py`) then requires whole GB. Units are powers of 1024.

DISK_SIZE = "disk_size"
DISK_SIZE_EXPECTED = "expected whole GB, such as 500, 500GB or 2TB"
_UNITS = ("k", "m", "g", "t", "p")  # each 1024 times the previous
_SIZE = re.compile(
    "([0-9]+)(" + "|".join(form for unit in _UNITS for form in (f"{unit}[bi]", f"{unit.upper()}[BIbi]")) + ")?"
)


def gb_of(size: object) -> int | None:
    """Return the size in SkyPilot's GB of 1024^3 bytes; None if SkyPilot refuses it."""
    found = _SIZE.fullmatch(str(size)) if isinstance(size, str | int) and not isinstance(size, bool) else None
    if found is None:
        return None
    steps = _UNITS.index(found[2][0].lower()) - _UNITS.index("g") if found[2] else 0
    gb, rest = divmod(int(found[1]) * 1024 ** max(0, steps), 1024 ** max(0, -steps))
    return gb if gb > 0 and not rest else None
