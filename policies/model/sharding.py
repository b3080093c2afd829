"""How weights, gradients and the optimizer's states are divided over the processes that train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from policies.model.spec import RunSpec

# DeepSpeed's stages, or FSDP2, which divides all of them.
Sharding = Literal["none", "zero1", "zero2", "zero3", "fsdp"]


def divided(spec: RunSpec) -> tuple[Sharding, bool, bool]:
    """How a run divides, and whether its optimizer and its weights stay in the machine's own memory."""
    accelerate, grpo = spec.trainer.accelerate or {}, spec.grpo
    if not accelerate and not grpo.get("fsdp") and not grpo.get("deepspeed"):
        return "none", False, False
    kind = accelerate.get("distributed_type")
    if grpo.get("fsdp") or kind == "FSDP":
        config = {**_mapping(accelerate.get("fsdp_config")), **_mapping(grpo.get("fsdp_config"))}
        away = bool(config.get("fsdp_offload_params") or config.get("cpu_offload"))
        return "fsdp", away, away
    theirs, own = _mapping(grpo.get("deepspeed")), _mapping(accelerate.get("deepspeed_config"))
    zero = _mapping(theirs.get("zero_optimization"))
    stage = zero.get("stage", own.get("zero_stage", 0 if theirs else 2)) if theirs or kind == "DEEPSPEED" else 0
    optimizer = _device(zero.get("offload_optimizer"), own.get("offload_optimizer_device"))
    weights = _device(zero.get("offload_param"), own.get("offload_param_device"))
    stages: dict[str, Sharding] = {"1": "zero1", "2": "zero2", "3": "zero3"}
    return stages.get(str(stage), "none"), optimizer in ("cpu", "nvme"), weights in ("cpu", "nvme")


def computes_in_half(spec: RunSpec) -> bool:
    """Whether passes compute in two bytes an element: TRL's default (1.16)."""
    return bool(spec.grpo.get("fp16")) or bool(spec.grpo.get("bf16", True))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _device(theirs: Any, own: Any) -> str:
    return str(_mapping(theirs).get("device") or own or "none")
