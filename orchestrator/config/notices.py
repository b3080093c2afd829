"""Notices about a valid run.yaml that may not do what the user meant. `validate` and `up` print them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_orch.orchestrator.config.foreign_keys import grpo_value
from grpo_orch.orchestrator.config.problems import Findings
from grpo_orch.orchestrator.config.rules import note_idle_gpus, note_processes, note_secrets
from grpo_orch.policies.detect.divergence import TYPICAL_DELAY_POINTS
from grpo_orch.policies.model.spec import (
    RolloutSpec,
    RunSpec,
    alternatives_of,
    clouds_of,
    generates_itself,
    place_of,
)
from grpo_orch.policies.weights.adapters import adapter_obstacle


def find_notices(spec: RunSpec, config: Mapping[str, Any], findings: Findings) -> None:
    """Add notices about a valid spec. `config` is the model's config.json; empty: unknown."""
    _note_no_kl(spec, findings)
    _note_detection_delay(spec, findings)
    _note_merged_adapter(spec, config, findings)
    note_idle_gpus(spec, findings)
    _note_unused_rollout_keys(spec, findings)
    note_processes(spec, findings)
    note_secrets(spec, findings)
    _note_several_regions(spec, findings)
    _note_azure_networks(spec, findings)


def _note_no_kl(spec: RunSpec, findings: Findings) -> None:
    if grpo_value(spec.grpo, "beta") > 0:
        return
    detection = "divergence is detected by gradient norm, entropy and reward only"
    findings.notice(("grpo", "beta"), f"no KL is logged, so {detection}; set e.g. grpo.beta: 0.02")


def _note_detection_delay(spec: RunSpec, findings: Findings) -> None:
    logging_steps = int(grpo_value(spec.grpo, "logging_steps"))
    if logging_steps > 1:
        message = f"a divergence is detected about {TYPICAL_DELAY_POINTS} logged points after it begins"
        steps = TYPICAL_DELAY_POINTS * logging_steps
        findings.notice(
            ("grpo", "logging_steps"), f"{message}, here {steps} steps; lower logging_steps to lose less"
        )


def _note_merged_adapter(spec: RunSpec, config: Mapping[str, Any], findings: Findings) -> None:
    """Add a notice if whole weights are published. If config.json is unknown, the trainer logs it."""
    if generates_itself(spec) or spec.trainer.peft is None:
        return
    if why := adapter_obstacle(spec, config):
        message = "each step publishes the merged weights, not only the adapter"
        findings.notice(("trainer", "peft"), f"{message}: {why}")


def _note_unused_rollout_keys(spec: RunSpec, findings: Findings) -> None:
    if not generates_itself(spec):
        return
    for key in ("resources", "setup", "vllm", "env", "recovery"):
        if getattr(spec.rollout, key) != getattr(RolloutSpec(), key):
            findings.notice(("rollout", key), "not used: with replicas: 0 the trainer generates, without vLLM")


def _note_several_regions(spec: RunSpec, findings: Findings) -> None:
    machines = [*alternatives_of(spec.trainer.resources), *alternatives_of(spec.rollout.resources)]
    regions = {"/".join(place) for machine in machines if "*" not in (place := place_of(machine))}
    if spec.cloud != "sky" or len(regions) < 2 or generates_itself(spec):
        return
    why = "nodes use private addresses, which do not reach other regions"
    message = f"of {', '.join(sorted(regions))}, the run uses only the trainer's region: {why}"
    findings.notice(("rollout", "resources"), message)


def _note_azure_networks(spec: RunSpec, findings: Findings) -> None:
    clouds = clouds_of(spec.trainer.resources) | clouds_of(spec.rollout.resources)
    if spec.cloud != "sky" or "azure" not in clouds or generates_itself(spec):
        return
    why = "SkyPilot makes a network for each machine, so nodes cannot reach the trainer"
    message = f"azure: {why}; set one network for all in ~/.sky/config.yaml: azure.vpc_name"
    findings.notice(("rollout", "resources"), message)
