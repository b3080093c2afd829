"""What single keys cannot tell: rules between keys, most of them TRL's own, found here and not on a paid machine.

Each check is one function. It reads values through `Given`; where a value it needs was reported already it is
skipped, for it could only say the same again.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.config.reading.problems import Findings, KeyPath
from orchestrator.config.rules.bounds import check_bounds
from orchestrator.config.rules.effective import Doubtful, Given
from orchestrator.config.rules.secrets import check_secrets

NAME = re.compile(r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")  # it becomes part of machine names
SAVE_STEPS = 50
LOGGING_STEPS = 1
EVAL_STEPS = 50


def _name(given: Given, findings: Findings) -> None:
    name = given.at("name")
    if name is not None and not NAME.match(name):
        expected = "expected 1 to 40 lower-case letters, digits and dashes, no dash at either end"
        findings.add(("name",), f"{name!r} cannot be part of a machine's name; {expected}")


def _replicas(given: Given, findings: Findings) -> None:
    least, most = (given.at("rollout", "replicas", key) or 1 for key in ("min", "max"))
    if least > most:
        findings.add(("rollout", "replicas", "min"), f"{least} is more than max, {most}; expected min <= max")


def _both_batch_keys(given: Given, findings: Findings) -> None:
    if given.at("grpo", "generation_batch_size") and given.at("grpo", "steps_per_generation"):
        message = "TRL takes this or generation_batch_size, not both; remove one"
        findings.add(("grpo", "steps_per_generation"), message)


def _batch_holds_groups(given: Given, findings: Findings) -> None:
    group = given.grpo("num_generations")
    explicit = given.at("grpo", "generation_batch_size")
    each = given.grpo("per_device_train_batch_size") * given.processes
    if explicit and explicit % each:
        message = f"{explicit} is not divisible by per_device_train_batch_size x processes, {each}"
        findings.add(("grpo", "generation_batch_size"), f"{message}; expected a multiple of {each}")
    elif given.generation_batch % group:
        here = next(
            key
            for key in ("generation_batch_size", "num_generations", "per_device_train_batch_size", "")
            if not key or given.at("grpo", key)
        )
        sum_up = "" if explicit else f" = {each} x {given.steps_per_generation}"
        findings.add(
            ("grpo", here) if here else ("grpo",),
            f"the generation batch, {given.generation_batch}{sum_up}, is not divisible by num_generations, {group}"
            "; expected per_device_train_batch_size x steps_per_generation (default gradient_accumulation_steps) "
            f"to be a multiple of {group}",
        )


def _length_of_training(given: Given, findings: Findings) -> None:
    steps, epochs = given.grpo("max_steps"), given.grpo("num_train_epochs")
    if steps != -1 and steps < 1:
        findings.add(("grpo", "max_steps"), f"expected at least 1, or -1 to train num_train_epochs; got {steps}")
    elif steps == -1 and epochs <= 0:
        findings.add(("grpo", "num_train_epochs"), f"expected more than 0, or max_steps; got {epochs:g}")


def _limit_needs_beta(given: Given, findings: Findings) -> None:
    if given.at("policies", "kl", "limit") is None or given.grpo("beta") > 0:
        return
    if given.at("grpo", "beta") is None:
        message = "needs grpo.beta above 0: at TRL's default of 0.0 no kl is computed; set e.g. grpo.beta: 0.02"
        findings.add(("policies", "kl", "limit"), message)
    else:
        message = "expected more than 0, as policies.kl.limit is set and TRL computes no kl at 0"
        findings.add(("grpo", "beta"), f"{message}; remove one of the two")


def _save_steps(given: Given, findings: Findings) -> None:
    steps = given.at("grpo", "save_steps")
    if steps is None:
        return
    if steps != int(steps):
        findings.add(("grpo", "save_steps"), f"expected a whole number of steps, got {steps:g}")
    elif steps % given.window:
        findings.add(
            ("grpo", "save_steps"),
            f"{steps:g} is no multiple of {given.window}, the optimizer steps that share one generation: between "
            f"them no checkpoint resumes exactly; expected e.g. {_next_multiple(steps, given.window)}",
        )


def _waits_end(given: Given, findings: Findings) -> None:
    behind = given.at("checkpoints", "max_behind_steps")
    save_steps = _save_steps_of(given)
    if behind is not None and behind < save_steps:
        message = f"less than grpo.save_steps, {save_steps}: training would wait for what is not due yet"
        findings.add(("checkpoints", "max_behind_steps"), f"{message}; expected at least that, got {behind}")


def _spool(given: Given, findings: Findings) -> None:
    spool = given.at("checkpoints", "spool")
    if spool and not spool.startswith("/"):
        message = f"expected a whole path, for it is a folder of the trainer's machine; got {spool!r}"
        findings.add(("checkpoints", "spool"), message)


def _paths_are_shipped(given: Given, findings: Findings) -> None:
    """Machines of a cloud get a copy of the folder of run.yaml, and of nothing beside it."""
    if given.at("cloud") != "sky":
        return
    for path in (("trainer", "model"), ("trainer", "dataset", "path"), ("trainer", "eval_dataset", "path")):
        named = given.at(*path)
        if named and os.path.normpath(named).startswith("../"):
            message = f"{named} is outside the folder of this file, and machines get a copy of no other"
            findings.add(path, f"{message}; expected a path below it")


def _logging_steps(given: Given, findings: Findings) -> None:
    steps = given.at("grpo", "logging_steps")
    if steps is not None and steps != int(steps):
        findings.add(("grpo", "logging_steps"), f"expected a whole number of steps, got {steps:g}")


def _evaluation(given: Given, findings: Findings) -> None:
    has_data = given.at("trainer", "eval_dataset") is not None
    strategy = given.at("grpo", "eval_strategy")
    asked = [key for key in ("eval_steps", "eval_strategy", "eval_on_start", "do_eval") if given.at("grpo", key)]
    asked = [key for key in asked if key != "eval_strategy" or strategy != "no"]
    if asked and not has_data:
        message = "set, but there is nothing to score; set trainer.eval_dataset or remove this key"
        findings.add(("grpo", asked[0]), message)


def _eval_batch_holds_groups(given: Given, findings: Findings) -> None:
    if given.at("trainer", "eval_dataset") is None or given.at("grpo", "eval_strategy") == "no":
        return
    group = given.grpo("num_generations_eval") or given.grpo("num_generations")
    batch = given.grpo("per_device_eval_batch_size") * given.processes
    if batch % group:
        key = "per_device_eval_batch_size" if given.at("grpo", "per_device_eval_batch_size") else ""
        named = "num_generations_eval" if given.grpo("num_generations_eval") else "num_generations"
        findings.add(
            ("grpo", key) if key else ("trainer", "eval_dataset"),
            f"the evaluation batch, {batch} (grpo.per_device_eval_batch_size), is not divisible by {named}, "
            f"{group}; expected a multiple of {group}",
        )


def _reward_weights(given: Given, findings: Findings) -> None:
    weights, functions = given.at("grpo", "reward_weights"), given.at("trainer", "reward_funcs")
    if functions == []:
        findings.add(("trainer", "reward_funcs"), "expected at least one import path, as in rewards.my_reward")
    elif functions is not None and weights is not None and len(weights) != len(functions):
        message = f"expected one weight for each of {len(functions)} reward_funcs, got {len(weights)}"
        findings.add(("grpo", "reward_weights"), message)


def _room_for_completions(given: Given, findings: Findings) -> None:
    room, length = given.at("rollout", "vllm", "max-model-len"), given.grpo("max_completion_length")
    if isinstance(room, int) and 0 < room <= length:
        findings.add(
            ("rollout", "vllm", "max-model-len"),
            f"{room} leaves no room for a prompt: grpo.max_completion_length is {length}; expected more than that",
        )


def _no_guesses_where_completions_go_on(given: Given, findings: Findings) -> None:
    if given.at("rollout", "recovery") == "exact":
        return
    for flag in ("speculative-config", "spec-method", "spec-model", "spec-tokens"):
        if given.at("rollout", "vllm", flag) is not None:
            message = "speculative decoding draws by what it guessed, so no completion can go on at another node"
            findings.add(("rollout", "vllm", flag), f"{message}; expected rollout.recovery: exact with it")


def _no_seed_for_all(given: Given, findings: Findings) -> None:
    extra = given.at("grpo", "generation_kwargs")
    if isinstance(extra, dict) and "seed" in extra:
        message = "each completion has a seed of its own, derived from grpo.seed; remove this one"
        findings.add(("grpo", "generation_kwargs", "seed"), message)


def _precision(given: Given, findings: Findings) -> None:
    if given.at("grpo", "fp16") and given.at("grpo", "bf16"):
        findings.add(("grpo", "fp16"), "TRL takes fp16 or bf16, not both; remove one")


def _reference_that_moves(given: Given, findings: Findings) -> None:
    """A reference model that is synchronised is part of the run, and has to come through a restart with it."""
    if not given.at("grpo", "sync_ref_model"):
        return
    if given.grpo("beta") == 0:
        findings.add(("grpo", "sync_ref_model"), "needs grpo.beta above 0: without it there is no reference model")
    if given.at("trainer", "peft") is not None:
        message = "adapters are their own reference when they are taken off; remove this one, or trainer.peft"
        findings.add(("grpo", "sync_ref_model"), message)
    if where := _shards_the_reference(given):
        message = (
            f"a reference model in shards ({where}) does not survive a restart; expected ZeRO stage 0 to 2, or DDP"
        )
        findings.add(("grpo", "sync_ref_model"), message)


def _shards_the_reference(given: Given) -> str:
    """What spreads the reference model over the processes, or may; empty where each has all of it."""
    if given.at("grpo", "fsdp") or given.at("trainer", "accelerate", "distributed_type") == "FSDP":
        return "FSDP"
    for path in (("grpo", "deepspeed"), ("trainer", "accelerate", "deepspeed_config")):
        if (config := given.at(*path)) and _zero_stage(config) not in (0, 1, 2):
            return f"{'.'.join(path)}, ZeRO stage {_zero_stage(config)}"
    return ""


def _zero_stage(config: Any) -> int | str:
    """Of a DeepSpeed configuration, DeepSpeed's own or accelerate's; a text where it stands elsewhere."""
    if not isinstance(config, Mapping):
        return "in a file"
    if "deepspeed_config_file" in config:
        return "in a file"
    zero = config.get("zero_optimization")
    stage = config.get("zero_stage", zero.get("stage", 0) if isinstance(zero, Mapping) else 0)
    return stage if isinstance(stage, int) else str(stage)


def _faults_come_in_time(given: Given, findings: Findings) -> None:
    steps = given.grpo("max_steps")
    for index, fault in enumerate(given.at("rehearse", "faults") or ()):
        here: KeyPath = ("rehearse", "faults", index)
        for key in ("at_step", "notice_s", "for_s"):
            if fault.get(key, 0) < 0:
                findings.add((*here, key), f"expected at least 0, got {fault[key]:g}")
        if 0 < steps <= fault.get("at_step", 0):
            message = f"never comes: the run ends with step {steps} (grpo.max_steps); expected at most {steps - 1}"
            findings.add((*here, "at_step"), message)


CHECKS: tuple[Callable[[Given, Findings], None], ...] = (
    check_secrets,
    _name,
    _replicas,
    _both_batch_keys,
    _batch_holds_groups,
    _length_of_training,
    _limit_needs_beta,
    _save_steps,
    _waits_end,
    _spool,
    _paths_are_shipped,
    _logging_steps,
    _evaluation,
    _eval_batch_holds_groups,
    _reward_weights,
    _room_for_completions,
    _no_guesses_where_completions_go_on,
    _no_seed_for_all,
    _precision,
    _reference_that_moves,
    _faults_come_in_time,
)


def cross_check(data: Mapping[str, Any], findings: Findings) -> None:
    """Run every check on data whose structure was checked."""
    given = Given(data, findings)
    check_bounds(given, findings)
    for check in CHECKS:
        try:
            check(given, findings)
        except Doubtful:
            continue


def grpo_defaults(data: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """GRPOConfig keys that a run sets where the file does not. To be asked for once nothing is wrong."""
    given = Given(data, findings)
    defaults: dict[str, Any] = {
        "save_steps": _save_steps_of(given),
        "logging_steps": LOGGING_STEPS,
    }
    if given.at("trainer", "eval_dataset") is not None:
        defaults["eval_strategy"] = "steps"
        if given.at("grpo", "eval_strategy") in (None, "steps"):
            defaults["eval_steps"] = EVAL_STEPS
    return {key: value for key, value in defaults.items() if given.at("grpo", key) is None}


def _save_steps_of(given: Given) -> int:
    """The file's, or the default. Raises Doubtful."""
    return int(given.at("grpo", "save_steps") or _next_multiple(SAVE_STEPS, given.window))


def _next_multiple(steps: float, window: int) -> int:
    return math.ceil(steps / window) * window
