"""How batches, groups and saves must divide one another: TRL's arithmetic, done before a machine is paid for."""

from __future__ import annotations

import math

from orchestrator.config.problems import Findings
from orchestrator.config.rules.effective import EffectiveRun

SAVE_STEPS = 50


def one_batch_key(run: EffectiveRun, findings: Findings) -> None:
    if run.at("grpo", "generation_batch_size") and run.at("grpo", "steps_per_generation"):
        message = "TRL takes this or generation_batch_size, not both; remove one"
        findings.add(("grpo", "steps_per_generation"), message)


def batch_holds_groups(run: EffectiveRun, findings: Findings) -> None:
    group = run.grpo("num_generations")
    explicit = run.at("grpo", "generation_batch_size")
    each = run.grpo("per_device_train_batch_size") * run.processes
    if explicit and explicit % each:
        message = f"{explicit} is not divisible by per_device_train_batch_size x processes, {each}"
        findings.add(("grpo", "generation_batch_size"), f"{message}; expected a multiple of {each}")
    elif run.generation_batch % group:
        here = next(
            key
            for key in ("generation_batch_size", "num_generations", "per_device_train_batch_size", "")
            if not key or run.at("grpo", key)
        )
        sum_up = "" if explicit else f" = {each} x {run.steps_per_generation}"
        findings.add(
            ("grpo", here) if here else ("grpo",),
            f"the generation batch, {run.generation_batch}{sum_up}, is not divisible by num_generations, {group}"
            "; expected per_device_train_batch_size x steps_per_generation (default gradient_accumulation_steps) "
            f"to be a multiple of {group}",
        )


def eval_batch_holds_groups(run: EffectiveRun, findings: Findings) -> None:
    if run.at("trainer", "eval_dataset") is None or run.at("grpo", "eval_strategy") == "no":
        return
    group = run.grpo("num_generations_eval") or run.grpo("num_generations")
    batch = run.grpo("per_device_eval_batch_size") * run.processes
    if batch % group:
        key = "per_device_eval_batch_size" if run.at("grpo", "per_device_eval_batch_size") else ""
        named = "num_generations_eval" if run.grpo("num_generations_eval") else "num_generations"
        findings.add(
            ("grpo", key) if key else ("trainer", "eval_dataset"),
            f"the evaluation batch, {batch} (grpo.per_device_eval_batch_size), is not divisible by {named}, "
            f"{group}; expected a multiple of {group}",
        )


def save_steps(run: EffectiveRun, findings: Findings) -> None:
    steps = run.at("grpo", "save_steps")
    if steps is None:
        return
    if steps != int(steps):
        findings.add(("grpo", "save_steps"), f"expected a whole number of steps, got {steps:g}")
    elif steps % run.window:
        findings.add(
            ("grpo", "save_steps"),
            f"{steps:g} is no multiple of {run.window}, the optimizer steps that share one generation: between "
            f"them no checkpoint resumes exactly; expected e.g. {_next_multiple(steps, run.window)}",
        )


def save_steps_of(run: EffectiveRun) -> int:
    """The file's, or the default. Raises Doubtful."""
    return int(run.at("grpo", "save_steps") or _next_multiple(SAVE_STEPS, run.window))


def _next_multiple(steps: float, window: int) -> int:
    return math.ceil(steps / window) * window
