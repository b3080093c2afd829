"""What single keys cannot tell: rules between keys, most of them TRL's own, found here and not on a paid machine.

Each check is one function over an `EffectiveRun`. Where a value that it needs was reported already it is skipped:
it could only say the same again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.config import effective
from orchestrator.config.datasets import each_dataset
from orchestrator.config.effective import Doubtful, EffectiveRun, check_bounds
from orchestrator.config.problems import Findings, KeyPath
from orchestrator.config.rules import gpus
from orchestrator.config.rules.processes import check_processes, one_generates
from orchestrator.config.rules.secrets import check_secrets
from orchestrator.config.rules.trl_features import check_reference_model, check_vespo
from orchestrator.config.user_code import is_model

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")  # it becomes part of machine names
LOGGING_STEPS = 1
EVAL_STEPS = 50


def name_problem(name: str) -> str:
    """What is wrong with a run's name; empty where nothing is."""
    if NAME.fullmatch(name):
        return ""
    expected = "expected 1 to 40 lower-case letters, digits and dashes, no dash at either end"
    return f"{name!r} cannot be part of a machine's name; {expected}"


def _name(run: EffectiveRun, findings: Findings) -> None:
    name = run.at("name")
    if name is not None and (problem := name_problem(name)):
        findings.add(("name",), problem)


def _variables(run: EffectiveRun, findings: Findings) -> None:
    """What no process could be started with."""
    for section in ("trainer", "rollout"):
        for name in run.at(section, "env") or {}:
            if not name or "=" in name:
                findings.add((section, "env", name), "expected the name of an environment variable, without any =")


def _replicas(run: EffectiveRun, findings: Findings) -> None:
    found = [run.at("rollout", "replicas", key) for key in ("min", "max")]
    least, most = (1 if one is None else one for one in found)
    if least > most:
        findings.add(("rollout", "replicas", "min"), f"{least} is more than max, {most}; expected min <= max")
    elif least == 0 < most:
        message = "a run with rollout nodes needs one at least; expected 1 or more, or replicas: 0"
        findings.add(("rollout", "replicas", "min"), message)


def _length_of_training(run: EffectiveRun, findings: Findings) -> None:
    steps, epochs = run.grpo("max_steps"), run.grpo("num_train_epochs")
    if steps != -1 and steps < 1:
        findings.add(("grpo", "max_steps"), f"expected at least 1, or -1 to train num_train_epochs; got {steps}")
    elif steps == -1 and epochs <= 0:
        findings.add(("grpo", "num_train_epochs"), f"expected more than 0, or max_steps; got {epochs:g}")


def _limit_needs_beta(run: EffectiveRun, findings: Findings) -> None:
    if run.at("policies", "kl", "limit") is None or run.grpo("beta") > 0:
        return
    if run.at("grpo", "beta") is None:
        message = "needs grpo.beta above 0: at TRL's default of 0.0 no kl is computed; set e.g. grpo.beta: 0.02"
        findings.add(("policies", "kl", "limit"), message)
    else:
        message = "expected more than 0, as policies.kl.limit is set and TRL computes no kl at 0"
        findings.add(("grpo", "beta"), f"{message}; remove one of the two")


def _max_behind_steps(run: EffectiveRun, findings: Findings) -> None:
    behind = run.at("checkpoints", "max_behind_steps")
    save_steps = effective.save_steps_of(run)
    if behind is not None and behind < save_steps:
        message = f"less than grpo.save_steps, {save_steps}: training would wait for what is not due yet"
        findings.add(("checkpoints", "max_behind_steps"), f"{message}; expected at least that, got {behind}")


def _spool(run: EffectiveRun, findings: Findings) -> None:
    spool = run.at("checkpoints", "spool")
    if spool and not spool.startswith("/"):
        message = f"expected a whole path, for it is a folder of the trainer's machine; got {spool!r}"
        findings.add(("checkpoints", "spool"), message)


def _paths_are_shipped(run: EffectiveRun, findings: Findings) -> None:
    """Machines of a cloud get a copy of the folder of run.yaml, and of nothing beside it."""
    if run.at("cloud") != "sky":
        return
    data = [((*path, "path"), one.get("path")) for path, one in each_dataset(run.at("trainer") or {})]
    rewards = enumerate(run.at("trainer", "reward_funcs") or ())
    models = [(("trainer", "reward_funcs", index), one) for index, one in rewards if is_model(one)]
    for path, named in [(("trainer", "model"), run.at("trainer", "model")), *data, *models]:
        if named and os.path.normpath(named).startswith("../"):
            message = f"{named} is outside the folder of this file, and machines get a copy of no other"
            findings.add(path, f"{message}; expected a path below it")


def _streaming(run: EffectiveRun, findings: Findings) -> None:
    if run.grpo("max_steps") != -1:
        return
    for path, one in each_dataset(run.at("trainer") or {}):
        if one.get("streaming"):
            message = "as many rows are read as the run can use, and num_train_epochs does not tell how many"
            findings.add((*path, "streaming"), f"{message}; set grpo.max_steps")


def _logging_steps(run: EffectiveRun, findings: Findings) -> None:
    steps = run.at("grpo", "logging_steps")
    if steps is not None and steps != int(steps):
        findings.add(("grpo", "logging_steps"), f"expected a whole number of steps, got {steps:g}")


def _evaluation(run: EffectiveRun, findings: Findings) -> None:
    has_data = run.at("trainer", "eval_dataset") is not None
    strategy = run.at("grpo", "eval_strategy")
    asked = [key for key in ("eval_steps", "eval_strategy", "eval_on_start", "do_eval") if run.at("grpo", key)]
    asked = [key for key in asked if key != "eval_strategy" or strategy != "no"]
    if asked and not has_data:
        message = "set, but there is nothing to score; set trainer.eval_dataset or remove this key"
        findings.add(("grpo", asked[0]), message)


def _reward_weights(run: EffectiveRun, findings: Findings) -> None:
    weights, functions = run.at("grpo", "reward_weights"), run.at("trainer", "reward_funcs")
    if functions == [] and run.at("trainer", "environment_factory") is None:
        findings.add(("trainer", "reward_funcs"), "expected at least one import path, as in rewards.my_reward")
    elif functions is not None and weights is not None and len(weights) != len(functions):
        message = f"expected one weight for each of {len(functions)} reward_funcs, got {len(weights)}"
        findings.add(("grpo", "reward_weights"), message)


def _no_speculative_decoding(run: EffectiveRun, findings: Findings) -> None:
    if run.at("rollout", "recovery") == "exact":
        return
    for flag in ("speculative-config", "spec-method", "spec-model", "spec-tokens"):
        if run.at("rollout", "vllm", flag) is not None:
            message = "speculative decoding draws by what it guessed, so no completion can go on at another node"
            findings.add(("rollout", "vllm", flag), f"{message}; expected rollout.recovery: exact with it")


def _no_common_seed(run: EffectiveRun, findings: Findings) -> None:
    extra = run.at("grpo", "generation_kwargs")
    if isinstance(extra, dict) and "seed" in extra:
        message = "each completion has a seed of its own, derived from grpo.seed; remove this one"
        findings.add(("grpo", "generation_kwargs", "seed"), message)


def _precision(run: EffectiveRun, findings: Findings) -> None:
    if run.at("grpo", "fp16") and run.at("grpo", "bf16"):
        findings.add(("grpo", "fp16"), "TRL takes fp16 or bf16, not both; remove one")


def _rehearsed_faults(run: EffectiveRun, findings: Findings) -> None:
    steps = run.grpo("max_steps")
    for index, fault in enumerate(run.at("rehearse", "faults") or ()):
        here: KeyPath = ("rehearse", "faults", index)
        for key in ("at_step", "notice_s", "for_s"):
            if fault.get(key, 0) < 0:
                findings.add((*here, key), f"expected at least 0, got {fault[key]:g}")
        if 0 < steps <= fault.get("at_step", 0):
            message = f"never comes: the run ends with step {steps} (grpo.max_steps); expected at most {steps - 1}"
            findings.add((*here, "at_step"), message)


CHECKS: tuple[Callable[[EffectiveRun, Findings], None], ...] = (
    check_secrets,
    _name,
    _variables,
    _replicas,
    one_generates,
    effective.one_batch_key,
    effective.batch_holds_groups,
    _length_of_training,
    _limit_needs_beta,
    effective.save_steps,
    _max_behind_steps,
    _spool,
    _paths_are_shipped,
    _streaming,
    _logging_steps,
    _evaluation,
    effective.eval_batch_holds_groups,
    _reward_weights,
    _no_speculative_decoding,
    _no_common_seed,
    _precision,
    gpus.engine_fits,
    gpus.local_nodes_have_their_own,
    check_reference_model,
    check_vespo,
    check_processes,
    _rehearsed_faults,
)


def cross_check(data: Mapping[str, Any], findings: Findings) -> None:
    """Run every check on data whose structure was checked."""
    run = EffectiveRun(data, findings)
    check_bounds(run, findings)
    for check in CHECKS:
        try:
            check(run, findings)
        except Doubtful:
            continue


def grpo_defaults(data: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """GRPOConfig keys that a run sets where the file does not. To be asked for once nothing is wrong."""
    run = EffectiveRun(data, findings)
    defaults: dict[str, Any] = {
        "save_steps": effective.save_steps_of(run),
        "logging_steps": LOGGING_STEPS,
    }
    if run.at("trainer", "eval_dataset") is not None:
        defaults["eval_strategy"] = "steps"
        if run.at("grpo", "eval_strategy") in (None, "steps"):
            defaults["eval_steps"] = EVAL_STEPS
    return {key: value for key, value in defaults.items() if run.at("grpo", key) is None}
