"""What trainers call their metrics, steps and runs: the one table of names.

A name is here because a trainer logs it so: TRL (its GRPO of all versions and its PPO), verl, OpenRLHF, NeMo-RL,
prime-rl, open-instruct, slime, MiniMind. Axolotl, Unsloth, ms-swift and LLaMA-Factory log TRL's. Names that
people give their own loops are last.

What is not here matters as much. `actor/ppo_kl` (verl), `policy/approxkl_avg` (TRL), `ppo_kl` and `train/ppo_kl`
(OpenRLHF, slime) compare the policy with itself a few updates ago, `mismatch_kl` (prime-rl) and `gen_kl_error`
(NeMo-RL) the trainer with the inference engine. None says how far the policy is from its reference.
"""

from __future__ import annotations

import re

KL, KL_SEQUENCE = "kl", "kl_sequence"  # to the reference: per token, and summed over the completion

# TRL's name, and what others call it; the first that a row has is taken.
_ALIASES = {
    KL: (
        "actor/kl_loss",
        "actor/reward_kl_penalty",
        "critic/kl",
        "objective/kl3_avg",
        "objective/kl_avg",
        "kl_loss",
        "kl_penalty",  # NeMo-RL's, with its coefficient taken out
        "kl_ref",  # MiniMind's
        "kl_div",
        "kl_divergence",
        "kl_mean",
        "kl/mean",
        "kl_avg",
        "mean_kl",
        "ref_kl",
    ),
    KL_SEQUENCE: ("objective/kl",),
    "reward": (
        "objective/scores",
        "objective/rlhf_reward",
        "critic/score/mean",
        "critic/rewards/mean",
        "rollout/raw_reward",
        "scores",
        "mean_reward",
        "reward_mean",
        "reward/mean",
        "reward/all/mean",
        "rewards/mean",
        "avg_reward",
        "reward_avg",
        "rewards_avg",
        "average_reward",
        "train_reward",
    ),
    "entropy": (
        "policy/entropy_avg",
        "objective/entropy",
        "objective/entropy_avg",
        "actor/entropy",
        "actor/entropy_loss",
        "entropy_loss",
        "entropy/mean",
        "entropy_avg",
        "policy_entropy",
        "policy/entropy",  # Tinker's
        "approx_entropy",
        "mean_entropy",
    ),
    "loss": (
        "actor/pg_loss",
        "policy_loss",
        "pg_loss",
        "loss/policy_avg",
        "loss/mean",
        "actor/loss",
        "actor_loss",
        "total_loss",
        "training_loss",
        "grpo_loss",
    ),
    "grad_norm": ("actor/grad_norm", "actor_grad_norm", "optim/grad_norm", "optim/grad_norm_avg", "gradient_norm"),
    "learning_rate": ("actor/lr", "actor_lr", "optim/lr", "lr"),
    "completions/mean_length": (
        "completion_length",
        "response_length/mean",
        "response_length",
        "avg_response_len",
        "completion_tokens",
        "mean_gen_tokens_per_sample",
        "rollout/response_len/mean",
        "val/sequence_lengths",
        "seq_len/mean",
        "seq_len/all/mean",
    ),
    "completions/clipped_ratio": (
        "response_length/clip_ratio",
        "is_truncated/mean",
        "is_truncated/all/mean",
        "truncation_rate",
        "truncated_completions_ratio",
    ),
    "clip_ratio/region_mean": ("clip_ratio", "actor/pg_clipfrac", "policy/clipfrac_avg"),
}
_NAMES = {
    alias: (name, rank)
    for name, aliases in _ALIASES.items()
    for rank, alias in enumerate((name, *aliases))
}  # fmt: skip

# People say of what they log that it is a mean in front of its name or behind it.
_MEAN = re.compile(r"^(?:avg|average|mean)_|[_/](?:avg|average|mean)$")

# A row that has none of these is no row of metrics: a configuration that was printed, say.
TRAINING = frozenset((KL, KL_SEQUENCE, "loss", "grad_norm", "reward", "entropy", "completions/mean_length"))

# The truest first: `_step` counts what was sent to Weights & Biases.
STEPS = (
    "train/global_step",
    "global_step",
    "training/global_step",
    "trainer/global_step",
    "global_step/max_steps",  # ms-swift's `12/500`
    "current_steps",  # LLaMA-Factory's
    "training_step",
    "train_step",
    "step",
    "_step",
)
RUNS = ("run_name", "run", "run_id")
EPOCH, SUMMARY, TIMELINE = "epoch", "train_runtime", "timeline"  # a summary is what a Trainer logs at its end


def metric(key: str) -> tuple[str, int]:
    """The metric's name, TRL's where we know it, and how much it resembles it: 0 for TRL's own."""
    plain = key.strip().strip('"').removeprefix("train/")
    if plain.startswith("eval/"):
        plain = f"eval_{plain.removeprefix('eval/')}"
    found = _NAMES.get(plain) or _NAMES.get(spelt(plain))
    if found is not None:
        return found
    of_mean = _NAMES.get(_MEAN.sub("", spelt(plain)))
    return (of_mean[0], of_mean[1] + len(_NAMES)) if of_mean else (plain, 0)


def spelt(key: str) -> str:
    """As in the tables: `Avg Reward` is `avg_reward`, and a notebook's `kl / mean` is `kl/mean`."""
    return key.strip().strip('"').lower().replace(". ", "_").replace(" / ", "/").replace(" ", "_")
