"""The table of names: what each trainer calls its metrics, and what is no KL to the reference."""

from __future__ import annotations

import pytest

from orchestrator.traces.names import metric, metrics, run, step


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("train/kl", "kl"),
        ("actor/kl_loss", "kl"),
        ("actor/reward_kl_penalty", "kl"),
        ("critic/kl", "kl"),
        ("train/kl_penalty", "kl"),
        ("train/kl_loss", "kl"),
        ("objective/kl3_avg", "kl"),
        ("kl_div", "kl"),
        ("kl_divergence", "kl"),
        ("objective/kl", "kl_sequence"),
        ("kl_avg", "kl"),
        ("rewards_avg", "reward"),
        ("train_reward", "reward"),
        ("policy_entropy", "entropy"),
        ("completion_tokens", "completions/mean_length"),
        ("truncation_rate", "completions/clipped_ratio"),
        ("mean_reward", "reward"),
        ("reward_mean", "reward"),
        ("rewards/mean", "reward"),
        ("Avg Reward", "reward"),
        ("critic/score/mean", "reward"),
        ("Training Loss", "loss"),
        ("Grad. Norm", "grad_norm"),
        ("actor/grad_norm", "grad_norm"),
        ("train/optim/grad_norm", "grad_norm"),
        ("completion_length", "completions/mean_length"),
        ("policy/entropy", "entropy"),
        ("avg_kl", "kl"),
        ("train/avg_response_length", "completions/mean_length"),
        ("completion_length_mean", "completions/mean_length"),
        ("policy_entropy_mean", "entropy"),
        ("completions / mean_length", "completions/mean_length"),
        ("completions / clipped_ratio", "completions/clipped_ratio"),
        ("eval/reward", "eval_reward"),
        ("eval/reward/mean", "eval_reward/mean"),
        ("rewards/format/mean", "rewards/format/mean"),
    ],
)
def test_names_become_trls(key: str, name: str) -> None:
    assert metric(key)[0] == name


@pytest.mark.parametrize(
    "key",
    [
        "actor/ppo_kl",
        "policy/approxkl_avg",
        "train/ppo_kl",
        "ppo_kl",
        "mismatch_kl",
        "Mismatch KL",
        "mismatch_kl/mean",
        "gen_kl_error",
        "actor/kl_coef",
        "actor/reward_kl_penalty_coeff",
        "objective/kl_coef",
    ],
)
def test_a_kl_to_something_else_than_the_reference_is_none(key: str) -> None:
    assert metric(key)[0] not in ("kl", "kl_sequence")


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        ("loss", "policy_loss", "loss"),
        ("objective/scores", "objective/rlhf_reward", "reward"),
        ("critic/score/mean", "critic/rewards/mean", "reward"),
        ("objective/kl3_avg", "objective/kl_avg", "kl"),
    ],
)
def test_of_two_that_resemble_it_the_nearer_is_taken(first: str, second: str, name: str) -> None:
    for row in ({first: 0.1, second: 0.2}, {second: 0.2, first: 0.1}, {first: 0.1, second: None}):
        assert metrics(row) == {name: 0.1}


def test_steps_and_runs_have_names_too() -> None:
    assert step({"_step": 70, "train/global_step": 9}) == 9
    assert step({"global_step/max_steps": "12/500"}) == 12
    assert step({"current_steps": 15, "total_steps": 93}) == 15
    assert step({"Step": "4"}) == 4
    assert step({"kl": 4}) is None
    assert run({"run": 7}) == "7"
    assert run({"run_id": "x1", "run_name": "first"}) == "first"
    assert metrics({"kl": 0.1, "run": 7, "step": 3, "epoch": 1}) == {"kl": 0.1}
