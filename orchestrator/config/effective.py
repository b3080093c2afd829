"""Effective values of a run (the file's, else defaults), TRL's batch arithmetic on them, and bounds of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from grpo_orch.orchestrator.config.foreign_keys import grpo_table
from grpo_orch.orchestrator.config.problems import Findings, KeyPath
from grpo_orch.policies.model.spec import processes_in
from grpo_orch.policies.serving.wire import TURNS_MAX


class AlreadyReported(Exception):
    """A value that a check needs was reported already."""


class EffectiveRun:
    """Values of a run.yaml, with TRL's defaults. Every accessor raises AlreadyReported."""

    def __init__(self, data: Mapping[str, Any], findings: Findings) -> None:
        self._data = data
        self._findings = findings

    def at(self, *path: str | int) -> Any:
        """Return the value in the file, or None."""
        if self._findings.is_reported(path):
            raise AlreadyReported
        value: Any = self._data
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def grpo(self, key: str) -> Any:
        """Return a GRPOConfig key: the file's value or TRL's default, before `grpo_defaults` applies."""
        value = self.at("grpo", key)
        return grpo_table().default(key) if value is None else value

    @property
    def processes(self) -> int:
        """Number of training processes."""
        return processes_in(self.at("trainer", "accelerate") or {}, self.at("trainer", "resources") or {})

    @property
    def generation_batch(self) -> int:
        """Completions per generation, as `GRPOConfig.__post_init__` computes it."""
        explicit = self.grpo("generation_batch_size")
        if explicit is not None:
            return int(explicit)
        return int(self.grpo("per_device_train_batch_size")) * self.processes * self.steps_per_generation

    @property
    def steps_per_generation(self) -> int:
        """Batches per generation, as `GRPOConfig.__post_init__` computes it."""
        explicit = self.grpo("generation_batch_size")
        if explicit is not None:
            return int(explicit) // (int(self.grpo("per_device_train_batch_size")) * self.processes)
        return int(self.grpo("steps_per_generation") or self.grpo("gradient_accumulation_steps"))

    @property
    def window(self) -> int:
        """Optimizer steps that share one generation. Only between two windows is a resume exact."""
        micro_batches = max(1, self.steps_per_generation * int(self.grpo("num_iterations")))
        return micro_batches // math.gcd(micro_batches, int(self.grpo("gradient_accumulation_steps")))


# Divisibility of batches, groups and saves.

SAVE_STEPS = 50


def check_batch_keys(run: EffectiveRun, findings: Findings) -> None:
    if run.at("grpo", "generation_batch_size") and run.at("grpo", "steps_per_generation"):
        message = "TRL accepts this or generation_batch_size, not both; remove one"
        findings.add(("grpo", "steps_per_generation"), message)


def check_batch_size(run: EffectiveRun, findings: Findings) -> None:
    group = run.grpo("num_generations")
    explicit = run.at("grpo", "generation_batch_size")
    global_batch = run.grpo("per_device_train_batch_size") * run.processes
    if explicit and explicit % global_batch:
        message = f"{explicit} is not divisible by per_device_train_batch_size x processes ({global_batch})"
        findings.add(("grpo", "generation_batch_size"), f"{message}; expected a multiple of {global_batch}")
    elif run.generation_batch % group:
        reported_key = next(
            key
            for key in ("generation_batch_size", "num_generations", "per_device_train_batch_size", "")
            if not key or run.at("grpo", key)
        )
        product = "" if explicit else f" = {global_batch} x {run.steps_per_generation}"
        findings.add(
            ("grpo", reported_key) if reported_key else ("grpo",),
            f"the generation batch ({run.generation_batch}{product}) is not divisible by num_generations ({group})"
            "; expected per_device_train_batch_size x steps_per_generation (default gradient_accumulation_steps) "
            f"to be a multiple of {group}",
        )


def check_eval_batch_size(run: EffectiveRun, findings: Findings) -> None:
    if run.at("trainer", "eval_dataset") is None or run.at("grpo", "eval_strategy") == "no":
        return
    group = run.grpo("num_generations_eval") or run.grpo("num_generations")
    batch = run.grpo("per_device_eval_batch_size") * run.processes
    if batch % group:
        key = "per_device_eval_batch_size" if run.at("grpo", "per_device_eval_batch_size") else ""
        group_key = "num_generations_eval" if run.grpo("num_generations_eval") else "num_generations"
        findings.add(
            ("grpo", key) if key else ("trainer", "eval_dataset"),
            f"the evaluation batch ({batch}, grpo.per_device_eval_batch_size x processes) is not divisible by "
            f"{group_key} ({group}); expected a multiple of {group}",
        )


def check_save_steps(run: EffectiveRun, findings: Findings) -> None:
    steps = run.at("grpo", "save_steps")
    if steps is not None and steps % run.window:
        findings.add(
            ("grpo", "save_steps"),
            f"{steps:g} is not a multiple of {run.window}, the optimizer steps that share one generation; "
            f"checkpoints in between cannot resume exactly; expected e.g. {_next_multiple(steps, run.window)}",
        )


def save_steps_of(run: EffectiveRun) -> int:
    """Return grpo.save_steps or its default. Raises AlreadyReported."""
    return int(run.at("grpo", "save_steps") or _next_multiple(SAVE_STEPS, run.window))


def _next_multiple(steps: float, window: int) -> int:
    return math.ceil(steps / window) * window


# Bounds of single numbers.

# Minimum of each number; True makes it exclusive.
MINIMUM: dict[KeyPath, tuple[float, bool]] = {
    ("rollout", "replicas", "min"): (0, False),
    ("rollout", "replicas", "max"): (0, False),
    ("rollout", "deadline_s"): (0, True),
    ("rollout", "max_staleness"): (0, False),
    ("rollout", "vllm", "gpu-memory-utilization"): (0, True),  # vLLM's own bounds (0.32, `config/cache.py`)
    ("policies", "kl", "limit"): (0, True),
    ("policies", "kl", "on_rollback", "beta_factor"): (1, False),
    ("policies", "kl", "on_rollback", "epsilon_factor"): (0, True),
    ("policies", "kl", "on_rollback", "learning_rate_factor"): (0, True),
    ("policies", "kl", "budget", "total"): (0, False),
    ("policies", "kl", "budget", "recent"): (1, False),
    ("policies", "kl", "budget", "recent_steps"): (1, False),
    ("policies", "fleet", "dead_man_min"): (0, False),
    ("policies", "boot_timeout_s"): (0, True),
    ("policies", "reward_timeout_s"): (0, True),
    ("policies", "trainer_restarts"): (0, False),
    ("metrics_port",): (1, False),
    ("budget", "usd"): (0, True),
    ("budget", "usd_per_h"): (0, True),
    ("checkpoints", "keep_last"): (1, False),
    ("checkpoints", "keep_every_steps"): (1, False),
    ("checkpoints", "keep_rollouts_every_steps"): (1, False),
    ("checkpoints", "spool_gib"): (0, True),
    ("checkpoints", "max_behind_steps"): (1, False),
    ("rehearse", "prices", "trainer", "on_demand_usd_per_h"): (0, False),
    ("rehearse", "prices", "trainer", "spot_usd_per_h"): (0, False),
    ("rehearse", "prices", "rollout", "on_demand_usd_per_h"): (0, False),
    ("rehearse", "prices", "rollout", "spot_usd_per_h"): (0, False),
    ("grpo", "per_device_train_batch_size"): (1, False),
    ("grpo", "per_device_eval_batch_size"): (1, False),
    ("grpo", "gradient_accumulation_steps"): (1, False),
    ("grpo", "generation_batch_size"): (1, False),
    ("grpo", "steps_per_generation"): (1, False),
    ("grpo", "num_iterations"): (1, False),
    ("grpo", "num_generations"): (2, False),
    ("grpo", "num_generations_eval"): (1, False),
    ("grpo", "max_completion_length"): (1, False),
    ("grpo", "temperature"): (0, True),
    ("grpo", "beta"): (0, False),
    ("grpo", "save_steps"): (1, False),
    ("grpo", "logging_steps"): (0, True),
    ("grpo", "eval_steps"): (0, True),
    ("trainer", "peft", "r"): (1, False),
    ("trainer", "agent", "time_s"): (0, True),
    ("trainer", "agent", "turns"): (1, False),
    ("trainer", "agent", "tokens"): (1, False),
    ("trainer", "agent", "memory_gb"): (0, True),
}
# Maximum, inclusive.
MAXIMUM: dict[KeyPath, float] = {
    ("metrics_port",): 65535,
    ("trainer", "agent", "turns"): TURNS_MAX,
    ("rollout", "max_staleness"): 2,
    ("rollout", "vllm", "gpu-memory-utilization"): 1,
    ("policies", "reward_timeout_s"): 1e9,  # Python's clocks overflow at nine times that
    ("policies", "kl", "on_rollback", "epsilon_factor"): 1,  # a rollback may only make steps smaller
    ("policies", "kl", "on_rollback", "learning_rate_factor"): 1,
}


# TRL also accepts shares of the run.
WHOLE_STEPS: tuple[KeyPath, ...] = (("grpo", "save_steps"), ("grpo", "logging_steps"))


def check_bounds(run: EffectiveRun, findings: Findings) -> None:
    """Report each number that is out of bounds, and numbers of steps that are not whole."""
    for path in WHOLE_STEPS:
        value = _value(run, path)
        if value is not None and value != int(value):
            findings.add(path, f"expected a whole number of steps, got {value:g}")
    for path, (minimum, is_exclusive) in MINIMUM.items():
        value = _value(run, path)
        if value is not None and (value <= minimum if is_exclusive else value < minimum):
            bound = "more than" if is_exclusive else "at least"
            findings.add(path, f"expected {bound} {minimum:g}, got {value:g}")
    for path, maximum in MAXIMUM.items():
        value = _value(run, path)
        if value is not None and value > maximum:
            findings.add(path, f"expected at most {maximum:g}, got {value:g}")


def _value(run: EffectiveRun, path: KeyPath) -> Any:
    """Return the number in the file; None if it is absent or was reported already."""
    try:
        return run.at(*path)
    except AlreadyReported:
        return None
