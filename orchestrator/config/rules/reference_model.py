"""A reference model that moves, `grpo.sync_ref_model`: it is part of the run, and must come through a restart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.config.reading.problems import Findings
from orchestrator.config.rules.effective import EffectiveRun


def check_reference_model(run: EffectiveRun, findings: Findings) -> None:
    if not run.at("grpo", "sync_ref_model"):
        return
    if run.grpo("beta") == 0:
        findings.add(("grpo", "sync_ref_model"), "needs grpo.beta above 0: without it there is no reference model")
    if run.at("trainer", "peft") is not None:
        message = "adapters are their own reference when they are taken off; remove this one, or trainer.peft"
        findings.add(("grpo", "sync_ref_model"), message)
    if where := _shards_the_reference(run):
        message = (
            f"a reference model in shards ({where}) does not survive a restart; expected ZeRO stage 0 to 2, or DDP"
        )
        findings.add(("grpo", "sync_ref_model"), message)


def _shards_the_reference(run: EffectiveRun) -> str:
    """What spreads the reference model over the processes, or may; empty where each has all of it."""
    if run.at("grpo", "fsdp") or run.at("trainer", "accelerate", "distributed_type") == "FSDP":
        return "FSDP"
    for path in (("grpo", "deepspeed"), ("trainer", "accelerate", "deepspeed_config")):
        if (config := run.at(*path)) and _zero_stage(config) not in (0, 1, 2):
            return f"{'.'.join(path)}, ZeRO stage {_zero_stage(config)}"
    return ""


def _zero_stage(config: Any) -> int | str:
    """Of a DeepSpeed configuration, DeepSpeed's own or accelerate's; a text where that is elsewhere."""
    if not isinstance(config, Mapping) or "deepspeed_config_file" in config:
        return "in a file"
    zero = config.get("zero_optimization")
    stage = config.get("zero_stage", zero.get("stage", 0) if isinstance(zero, Mapping) else 0)
    return stage if isinstance(stage, int) else str(stage)
