"""Notices: what can be run, and perhaps not as it was meant. `validate` and `up` print them and refuse nothing."""

from __future__ import annotations

from pathlib import Path

from orchestrator.config.foreign_keys import grpo_table, named_clouds, named_regions
from orchestrator.config.model_size import config_in
from orchestrator.config.problems import Findings
from orchestrator.config.rules import note_idle, note_processes, note_secrets
from orchestrator.config.shorthand import DEADLINE
from policies.control.rollback.choice import changes_on_rollback
from policies.detect.divergence import TYPICAL_DELAY_POINTS
from policies.fleet.market import market_of, may_fall_back
from policies.model.spec import RolloutSpec, RunSpec, generates_itself, processes_of
from policies.model.vocabulary import Market, Role
from policies.sizing.training import why_not_itself
from policies.weights.adapters import why_whole

# More checkpoints than these between the beginning of a divergence and its notice are of no use to anyone.
CHECKPOINTS_LOST_MAX = 4


def find_notices(spec: RunSpec, findings: Findings) -> None:
    """Note what the user of a valid file should know before it is run."""
    _no_kl_is_logged(spec, findings)
    _rollback_changes_nothing(spec, findings)
    _late_to_notice(spec, findings)
    _adapter_is_merged(spec, findings)
    note_idle(spec, findings)
    _nodes_that_are_not_there(spec, findings)
    _own_generation(spec, findings)
    note_processes(spec, findings)
    note_secrets(spec, findings)
    _several_regions(spec, findings)
    _azure_networks(spec, findings)
    _deadline(spec, findings)


def _no_kl_is_logged(spec: RunSpec, findings: Findings) -> None:
    if _grpo(spec, "beta") > 0:
        return
    judged = "divergence is judged by gradient norm, entropy and reward alone"
    findings.notice(("grpo", "beta"), f"no KL is logged, so {judged}; set e.g. grpo.beta: 0.02")


def _rollback_changes_nothing(spec: RunSpec, findings: Findings) -> None:
    kl = spec.policies.kl
    if (
        kl.action != "rollback"
        or kl.on_rollback.skip_prompts
        or changes_on_rollback(spec.grpo, kl.on_rollback, processes_of(spec))
    ):
        return
    message = "a rollback changes the sampling seeds alone, and what diverged once may do so again"
    findings.notice(("policies", "kl", "on_rollback"), f"{message}; set a factor, or skip_prompts: true")


def _late_to_notice(spec: RunSpec, findings: Findings) -> None:
    logging_steps, save_steps = int(_grpo(spec, "logging_steps")), int(_grpo(spec, "save_steps"))
    steps = TYPICAL_DELAY_POINTS * logging_steps
    loses = steps > CHECKPOINTS_LOST_MAX * save_steps
    if logging_steps == 1 and not loses:
        return
    message = f"a divergence trips about {TYPICAL_DELAY_POINTS} logged points after its first bad update"
    lost = f" or {steps // save_steps} checkpoints, which a rollback throws away" if loses else ""
    lower = "; a lower one loses less" if logging_steps > 1 else ""
    findings.notice(("grpo", "logging_steps"), f"{message}, here {steps} steps{lost}{lower}")


def _adapter_is_merged(spec: RunSpec, findings: Findings) -> None:
    """Of a model that is on the hub alone nothing is known here: its trainer's log says so."""
    if (
        generates_itself(spec)
        or spec.trainer.peft is None
        or not (why := why_whole(spec, config_in(Path(spec.workdir, spec.trainer.model, "config.json"))))
    ):
        return
    message = "each step publishes whole merged weights, not the adapter alone"
    findings.notice(("trainer", "peft"), f"{message}: {why}")


def _nodes_that_are_not_there(spec: RunSpec, findings: Findings) -> None:
    if not generates_itself(spec):
        return
    for key in ("resources", "setup", "vllm", "env", "recovery"):
        if getattr(spec.rollout, key) != getattr(RolloutSpec(), key):
            findings.notice(("rollout", key), "not used: with replicas: 0 the trainer generates, without vLLM")


def _own_generation(spec: RunSpec, findings: Findings) -> None:
    key, after_s = "own_generation_after_s", spec.rollout.own_generation_after_s
    if generates_itself(spec) or after_s is None:
        return
    why = why_not_itself(spec)
    if why and after_s != getattr(RolloutSpec(), key):
        findings.notice(("rollout", key), f"not used: {why}")
    elif not why and after_s >= spec.rollout.deadline_s:
        message = f"without a node a request fails before the trainer generates ({key}: {after_s:g})"
        findings.notice(("rollout", "deadline_s"), message)


def _several_regions(spec: RunSpec, findings: Findings) -> None:
    named = {place for part in (spec.trainer, spec.rollout) for place in named_regions(part.resources)}
    if spec.cloud != "sky" or len(named) < 2 or generates_itself(spec):
        return
    why = "its nodes talk over private addresses, which do not reach another region"
    message = f"of {', '.join(sorted(named))} a run is in one, the trainer's: {why}"
    findings.notice(("rollout", "resources"), message)


def _azure_networks(spec: RunSpec, findings: Findings) -> None:
    clouds = {cloud for part in (spec.trainer, spec.rollout) for cloud in named_clouds(part.resources)}
    if spec.cloud != "sky" or "azure" not in clouds or generates_itself(spec):
        return
    why = "SkyPilot makes a network for each machine, and nodes do not reach the trainer in another"
    message = f"azure: {why}; name one for all in ~/.sky/config.yaml: azure.vpc_name"
    findings.notice(("rollout", "resources"), message)


def _deadline(spec: RunSpec, findings: Findings) -> None:
    """Note what stands in the way of keeping it."""
    if spec.policies.fleet.deadline is None:
        return
    if _grpo(spec, "max_steps") <= 0:
        why = "without grpo.max_steps nobody knows how many steps there are before the trainer has read its data"
        findings.notice(DEADLINE, f"cannot be judged before the run trains, nor be sure to be kept: {why}")
    if generates_itself(spec):
        findings.notice(DEADLINE, "cannot be kept by buying more: with replicas: 0 there are no rollout nodes")
    elif market_of(Role.ROLLOUT, spec) is Market.SPOT and not may_fall_back(spec):
        why = "rollout.resources names spot (`use_spot`), so no machine on demand is bought"
        findings.notice(DEADLINE, f"is kept only while spot can be had: {why}")


def _grpo(spec: RunSpec, key: str) -> float:
    value = spec.grpo.get(key)
    return float(grpo_table().default(key) if value is None else value)
