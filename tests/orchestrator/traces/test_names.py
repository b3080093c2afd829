"""The table of names: what each trainer calls its metrics, and what is no KL to the reference."""

from __future__ import annotations

import pytest

from grpo_orch.orchestrator.traces.names import metric, metrics, run, step

# Trainers' names, by TRL's; with `·` for a blank.
NAMES = """
kl: train/kl actor/kl_loss actor/reward_kl_penalty critic/kl train/kl_penalty train/kl_loss objective/kl3_avg
kl: kl_div kl_divergence kl_avg avg_kl
kl_sequence: objective/kl
reward: rewards_avg train_reward mean_reward reward_mean rewards/mean Avg·Reward critic/score/mean
loss: Training·Loss
grad_norm: Grad.·Norm actor/grad_norm train/optim/grad_norm
entropy: policy_entropy policy/entropy policy_entropy_mean
completions/mean_length: completion_tokens completion_length train/avg_response_length completion_length_mean
completions/mean_length: completions·/·mean_length
completions/clipped_ratio: truncation_rate completions·/·clipped_ratio
eval_reward: eval/reward
eval_reward/mean: eval/reward/mean
rewards/format/mean: rewards/format/mean
"""
NOT_TO_THE_REFERENCE = """
actor/ppo_kl policy/approxkl_avg train/ppo_kl ppo_kl mismatch_kl Mismatch·KL mismatch_kl/mean gen_kl_error
actor/kl_coef actor/reward_kl_penalty_coeff objective/kl_coef
"""


def test_names_become_trls() -> None:
    for line in NAMES.strip().splitlines():
        name, _, keys = line.partition(": ")
        assert {key: metric(key.replace("·", " "))[0] for key in keys.split()} == dict.fromkeys(keys.split(), name)


def test_a_kl_to_something_else_than_the_reference_is_none() -> None:
    names = {metric(key.replace("·", " "))[0] for key in NOT_TO_THE_REFERENCE.split()}
    assert not names & {"kl", "kl_sequence"}


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
