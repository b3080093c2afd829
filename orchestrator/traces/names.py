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
from functools import cache

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

# Names of means: the mean is said in front of the name or behind it.
_MEAN = re.compile(r"^(?:avg|average|mean)_|[_/](?:avg|average|mean)$")

# What the last part of a name may also be, where no whole name fits: SkyRL, AReaL, ROLL, PipelineRL and others put
# their own groups in front.
_LAST_PARTS = {
    "exact_kl": KL,
    "kl_rewards": KL,
    "policy_kl": KL,
    "raw_reward": "reward",
    "task_reward": "reward",
    "score": "reward",
    "raw_grad_norm": "grad_norm",
    "num_tokens": "completions/mean_length",
    "response_len": "completions/mean_length",
    "seq_len": "completions/mean_length",
}
# Groups of other things than the policy in training.
_OTHER_GROUPS = frozenset(
    ("eval", "val", "valid", "validation", "test", "critic", "value", "ref", "rollout_corr", "mismatch", "rewards")
)

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
    "system/step",  # ROLL's
    "_step",
)
RUNS = ("run_name", "run", "run_id")
EPOCH, SUMMARY, TIMELINE = "epoch", "train_runtime", "timeline"  # a summary is what a Trainer logs at its end


@cache
def metric(key: str) -> tuple[str, int]:
    """Return the metric's name, TRL's where it is known, and a rank: 0 for TRL's own, higher for less alike."""
    plain = key.strip().strip('"').removeprefix("train/")
    if plain.startswith("eval/"):
        plain = f"eval_{plain.removeprefix('eval/')}"
    found = _NAMES.get(plain) or _NAMES.get(spelt(plain))
    if found is not None:
        return found
    without_mean = _MEAN.sub("", spelt(plain))
    if of_mean := _NAMES.get(without_mean):
        return of_mean[0], of_mean[1] + len(_NAMES)
    *groups, last = without_mean.split("/")
    if _OTHER_GROUPS.isdisjoint(groups) and not last.startswith("eval_") and groups[:1] != ["orch"]:
        last = _MEAN.sub("", last)
        if name := _LAST_PARTS.get(last) or _NAMES.get(last, ("", 0))[0]:
            return name, 2 * len(_NAMES)
    return plain, 0


def spelt(key: str) -> str:
    """As in the tables: `Avg Reward` is `avg_reward`, and a notebook's `kl / mean` is `kl/mean`."""
    return key.strip().strip('"').lower().replace(". ", "_").replace(" / ", "/").replace(" ", "_")
