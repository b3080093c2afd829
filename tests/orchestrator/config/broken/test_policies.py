"""`policies` and `rehearse`: limits, what a rollback changes, faults and prices."""

# ruff: noqa: E501  # what is printed stands here whole, to be found by searching for it

from __future__ import annotations

from pathlib import Path

import pytest

from tests.orchestrator.config.broken.cases import Case, check, each

BROKEN: list[Case] = [
    (
        "no time for rewards",
        [("limit: 0.5}", "limit: 0.5}\n  reward_timeout_s: 0")],
        ["run.yaml:21: policies.reward_timeout_s: expected more than 0, got 0"],
    ),
    (
        "more time for rewards than a clock has",
        [("limit: 0.5}", "limit: 0.5}\n  reward_timeout_s: 1e12")],
        ["run.yaml:21: policies.reward_timeout_s: expected at most 1e+09, got 1e+12"],
    ),
    (
        "a bare number for the KL policy",
        [("{limit: 0.5}", "0.5")],
        [
            "run.yaml:20: policies.kl: expected a mapping with the keys limit, task_changes, action, on_rollback, budget, got 0.5"
        ],
    ),
    (
        "an action that there is not",
        [("{limit: 0.5}", "{action: roll_back}")],
        [
            "run.yaml:20: policies.kl.action: expected one of rollback, pause, alert, got 'roll_back'; did you mean \"rollback\"?"
        ],
    ),
    (
        "a rollback that would make it worse",
        [
            (
                "{limit: 0.5}",
                "{on_rollback: {beta_factor: 0.9, epsilon_factor: 1.1, learning_rate_factor: 2, skip_prompts: yes}}",
            )
        ],
        [
            "run.yaml:20: policies.kl.on_rollback.skip_prompts: expected true or false, got 'yes'; write true or false, without quotes",
            "run.yaml:20: policies.kl.on_rollback.beta_factor: expected at least 1, got 0.9",
            "run.yaml:20: policies.kl.on_rollback.epsilon_factor: expected at most 1, got 1.1",
            "run.yaml:20: policies.kl.on_rollback.learning_rate_factor: expected at most 1, got 2",
        ],
    ),
    (
        "factors of nothing",
        [("{limit: 0.5}", "{on_rollback: {epsilon_factor: 0, learning_rate_factor: 0.0}}")],
        [
            "run.yaml:20: policies.kl.on_rollback.epsilon_factor: expected more than 0, got 0",
            "run.yaml:20: policies.kl.on_rollback.learning_rate_factor: expected more than 0, got 0",
        ],
    ),
    (
        "a budget below nothing",
        [("{limit: 0.5}", "{budget: {total: -1, recent: 0, recent_steps: 0}}")],
        [
            "run.yaml:20: policies.kl.budget.total: expected at least 0, got -1",
            "run.yaml:20: policies.kl.budget.recent: expected at least 1, got 0",
            "run.yaml:20: policies.kl.budget.recent_steps: expected at least 1, got 0",
        ],
    ),
    (
        "faults",
        [
            ("{at_step: 5, kill: rollout-0}", "{at_step: 5, kil: rollout-0}"),
            ("kill: daemon, for_s: 3", "kill: deamon, for_s: 3"),
            ("preempt: rollout-1, notice_s: 5", "preempt: rollout-2, notice_s: 5"),
            ("{at_step: 14, no_capacity: rollouts", "{at_step: 40, no_capacity: rollouts"),
        ],
        [
            'run.yaml:23: rehearse.faults[0]: expected exactly one of kill, preempt, no_capacity in a fault; did you mean "kill"?',
            "run.yaml:24: rehearse.faults[1].preempt: there is no rollout-2; the last is rollout-1, by rollout.replicas.max",
            "run.yaml:25: rehearse.faults[2].for_s: unknown key; expected one of at_step, kill",
            "run.yaml:25: rehearse.faults[2].kill: expected one of rollout-N, rollouts, trainer, trainer-0, gateway, daemon, got 'deamon'; did you mean \"daemon\"?",
            "run.yaml:26: rehearse.faults[3].at_step: never comes: the run ends with step 40 (grpo.max_steps); expected at most 39",
        ],
    ),
    (
        "prices",
        [
            ("spot_usd_per_h: 0.4", "spot: 0.4"),
            ("usd_per_h: 4.1", "usd_per_h: -1"),
            ("at_step: 5,", "at_step: x,"),
        ],
        [
            "run.yaml:23: rehearse.faults[0].at_step: expected a whole number, got 'x'",
            "run.yaml:28: rehearse.prices.trainer.on_demand_usd_per_h: expected at least 0, got -1",
            "run.yaml:29: rehearse.prices.rollout.spot: unknown key; expected one of on_demand_usd_per_h, spot_usd_per_h",
        ],
    ),
]


@each(BROKEN)
def test_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[tuple[str, str]], lines: list[str]
) -> None:
    check(tmp_path, monkeypatch, changes, lines)
