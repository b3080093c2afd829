"""A run without rollout nodes, `rollout.replicas: 0`: what its trainer cannot do, and what nobody reads."""

from __future__ import annotations

from orchestrator.config.reading.problems import Findings
from orchestrator.config.rules.effective import EffectiveRun
from policies.model.spec import RolloutSpec, RunSpec

_FOR_NODES = ("resources", "setup", "vllm", "env", "recovery")
_OF_VLLM = ("generation_kwargs", "vllm_structured_outputs_regex")


def generates_itself(run: EffectiveRun, findings: Findings) -> None:
    """Report what only rollout nodes do, where there are none."""
    if run.at("rollout", "replicas", "max") != 0:
        return
    for key in _OF_VLLM:
        if run.at("grpo", key):
            message = "vLLM's, and with rollout.replicas: 0 the trainer generates without; remove it"
            findings.add(("grpo", key), message)
    if run.processes > 1:
        message = f"with rollout.replicas: 0 one process trains and generates; expected 1, got {run.processes}"
        findings.add(("trainer", "accelerate", "num_processes"), message)
    for key in ("deepspeed_config", "fsdp_config"):
        if run.at("trainer", "accelerate", key):
            message = "with rollout.replicas: 0 one process holds the whole model to generate; remove it"
            findings.add(("trainer", "accelerate", key), message)


def note_unused(spec: RunSpec, findings: Findings) -> None:
    """What is said about rollout nodes, where there are none."""
    if spec.rollout.replicas.max > 0:
        return
    for key in _FOR_NODES:
        if getattr(spec.rollout, key) != getattr(RolloutSpec(), key):
            findings.notice(("rollout", key), "not used: with replicas: 0 the trainer generates, without vLLM")
