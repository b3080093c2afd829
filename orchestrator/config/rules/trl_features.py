"""Features of TRL's trainer that hold only with others, or not with a fleet: said before a machine is paid for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.config.effective import EffectiveRun
from orchestrator.config.model_size import json_in
from orchestrator.config.problems import Findings, KeyPath
from orchestrator.config.user_code import function_problem
from policies.model.spec import RunSpec, generates_itself
from policies.weights.adapters import QUANTISED, QUANTISED_WORDS

# What `GRPOTrainer.__init__` asks of the correction where the loss is vespo.
OF_SINGLE_TOKENS = ("token_truncate", "token_mask")


def takes_turns(run: EffectiveRun) -> bool:
    """Whether completions are of several turns."""
    return bool(run.at("trainer", "tools") or run.at("trainer", "environment_factory"))


def check_turns(trainer: Mapping[str, Any], workdir: Path, findings: Findings) -> None:
    """Report each import path of a tool, an environment or a rollout function that leads nowhere."""
    named: list[tuple[KeyPath, str]] = [
        (("trainer", "tools", index), name) for index, name in enumerate(trainer.get("tools", ()))
    ]
    alone = ("environment_factory", "rollout_func")
    named += [(("trainer", key), trainer[key]) for key in alone if key in trainer]
    for path, name in named:
        has_setup = bool(trainer.get("setup"))
        if problem := function_problem(name, workdir, has_setup=has_setup, misfit=lambda *_: ""):
            findings.add(path, problem)


def check_vespo(run: EffectiveRun, findings: Findings) -> None:
    mode = run.grpo("vllm_importance_sampling_mode")
    if run.grpo("loss_type") != "vespo" or not run.grpo("vllm_importance_sampling_correction"):
        return
    if mode not in OF_SINGLE_TOKENS:
        needed = f"vespo needs vllm_importance_sampling_mode {' or '.join(OF_SINGLE_TOKENS)}, and it is {mode}"
        findings.add(("grpo", "loss_type"), f"{needed}; set one of them")


def check_reference_model(run: EffectiveRun, findings: Findings) -> None:
    """Check a reference model that moves: it is part of the run, and must come through a restart."""
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


def check_quantised(spec: RunSpec, findings: Findings) -> None:
    """Report a quantised model: rollout nodes take the weights that the trainer computes with, by name and type.

    Of a model that is on the hub alone nothing is known here; its trainer says so before it asks for nodes.
    """
    if generates_itself(spec):
        return
    message = f"{QUANTISED}; expected the model as it was before, with adapters (trainer.peft) to save memory"
    extra = spec.grpo.get("model_init_kwargs") or {}
    if any(extra.get(word) if isinstance(extra, dict) else word in str(extra) for word in QUANTISED_WORDS):
        findings.add(("grpo", "model_init_kwargs"), message)
    elif json_in(Path(spec.workdir, spec.trainer.model, "config.json")).get("quantization_config"):
        findings.add(("trainer", "model"), message)
