"""How small and how large single numbers may be."""

from __future__ import annotations

from typing import cast

from orchestrator.config.problems import Findings, KeyPath
from orchestrator.config.rules.effective import Doubtful, EffectiveRun

# The least that a number may be; strictly more where the flag is set.
_LEAST: dict[KeyPath, tuple[float, bool]] = {
    ("rollout", "replicas", "min"): (0, False),
    ("rollout", "replicas", "max"): (0, False),
    ("rollout", "deadline_s"): (0, True),
    ("rollout", "own_generation_after_s"): (0, False),
    ("rollout", "vllm", "gpu-memory-utilization"): (0, True),  # vLLM's own bounds (0.32, `config/cache.py`)
    ("policies", "kl", "limit"): (0, True),
    ("policies", "kl", "on_rollback", "beta_factor"): (1, False),
    ("policies", "kl", "on_rollback", "epsilon_factor"): (0, True),
    ("policies", "kl", "on_rollback", "learning_rate_factor"): (0, True),
    ("policies", "kl", "budget", "total"): (0, False),
    ("policies", "kl", "budget", "recent"): (1, False),
    ("policies", "kl", "budget", "recent_steps"): (1, False),
    ("policies", "fleet", "dead_man_min"): (0, False),
    ("policies", "fleet", "loss_half_life_h"): (0, True),
    ("policies", "fleet", "launch_half_life_h"): (0, True),
    ("policies", "resume_state_steps"): (1, False),
    ("policies", "boot_timeout_s"): (0, True),
    ("policies", "reward_timeout_s"): (0, True),
    ("policies", "trainer_restarts"): (0, False),
    ("policies", "min_completion_length"): (1, False),
    ("metrics_port",): (1, False),
    ("budget", "usd"): (0, True),
    ("budget", "usd_per_h"): (0, True),
    ("checkpoints", "keep_last"): (1, False),
    ("checkpoints", "keep_every_steps"): (1, False),
    ("checkpoints", "keep_rollouts_every_steps"): (1, False),
    ("checkpoints", "spool_gib"): (0, True),
    ("checkpoints", "max_behind_steps"): (1, False),
    ("rehearse", "trainer_prices", "on_demand_usd_per_h"): (0, False),
    ("rehearse", "trainer_prices", "spot_usd_per_h"): (0, False),
    ("rehearse", "rollout_prices", "on_demand_usd_per_h"): (0, False),
    ("rehearse", "rollout_prices", "spot_usd_per_h"): (0, False),
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
}
# The most, both included.
_MOST: dict[KeyPath, float] = {
    ("metrics_port",): 65535,
    ("rollout", "vllm", "gpu-memory-utilization"): 1,
    ("policies", "reward_timeout_s"): 1e9,  # Python's own clocks end at nine times that
    ("policies", "kl", "on_rollback", "epsilon_factor"): 1,  # what diverged is to take smaller steps
    ("policies", "kl", "on_rollback", "learning_rate_factor"): 1,
}


def check_bounds(run: EffectiveRun, findings: Findings) -> None:
    """Report each number that is out of its bounds."""
    for path, (least, strictly) in _LEAST.items():
        value = _value(run, path)
        if value is not None and (value <= least if strictly else value < least):
            findings.add(path, f"expected {'more than' if strictly else 'at least'} {least:g}, got {value:g}")
    for path, most in _MOST.items():
        value = _value(run, path)
        if value is not None and value > most:
            findings.add(path, f"expected at most {most:g}, got {value:g}")


def _value(run: EffectiveRun, path: KeyPath) -> float | None:
    """None where the file has none, or one that was reported already."""
    try:
        return cast("float | None", run.at(*cast("tuple[str, ...]", path)))
    except Doubtful:
        return None
