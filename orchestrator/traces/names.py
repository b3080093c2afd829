"""The names of metrics, steps and runs in trainers' logs, and how to read a row by them.

The names come from TRL (all versions of its GRPO, and its PPO), verl, OpenRLHF, NeMo-RL, prime-rl, open-instruct,
slime and MiniMind. Axolotl, Unsloth, ms-swift and LLaMA-Factory log TRL's names. Common names of custom loops are
last.

Some names are omitted on purpose, because they do not measure the distance to the reference: `actor/ppo_kl`
(verl), `policy/approxkl_avg` (TRL), `ppo_kl` and `train/ppo_kl` (OpenRLHF, slime) compare the policy with itself a
few updates ago, `mismatch_kl` (prime-rl) and `gen_kl_error` (NeMo-RL) the trainer with the inference engine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from grpo_orch.checkpoint.records.metrics import NONFINITE

Row = Mapping[str, Any]  # of a file, by the file's names
Values = dict[str, float | None]  # metrics by TRL's names

KL, KL_SEQUENCE = "kl", "kl_sequence"  # to the reference: per token, and summed over the completion

# TRL's names and their aliases; the first that a row has is used.
_ALIASES = {
    KL: (
        "actor/kl_loss",
        "actor/reward_kl_penalty",
        "critic/kl",
        "objective/kl3_avg",
        "objective/kl_avg",
        "kl_loss",
        "kl_penalty",  # NeMo-RL's, without its coefficient
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

# A prefix or suffix of names of means.
_MEAN = re.compile(r"^(?:avg|average|mean)_|[_/](?:avg|average|mean)$")

# Aliases of a name's last part, used if the whole name is unknown: SkyRL, AReaL, ROLL, PipelineRL and others
# prefix names with their own groups.
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
# Groups of metrics that are not of the policy in training.
_OTHER_GROUPS = frozenset(
    ("eval", "val", "valid", "validation", "test", "critic", "value", "ref", "rollout_corr", "mismatch", "rewards")
)

# A row of metrics has at least one of these. Others are, for example, a printed configuration.
TRAINING = frozenset((KL, KL_SEQUENCE, "loss", "grad_norm", "reward", "entropy", "completions/mean_length"))

# In order of preference: `_step` only counts calls to Weights & Biases.
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
EPOCH, SUMMARY, TIMELINE = "epoch", "train_runtime", "timeline"  # a Trainer logs a summary at its end
_NESTED = ("values", "data", "metrics")  # keys under which some writers nest a row's metrics
_STEP_MAX = 1e12  # larger numbers are not steps
_WRAPPED = re.compile(r"[\w.]+\(([^,()]+)[^()]*\)")  # np.float64(0.1)


@cache
def metric(key: str) -> tuple[str, int]:
    """Return TRL's name of the metric, else its own, and a rank: 0 for TRL's names, higher for weaker matches."""
    plain = key.strip().strip('"').removeprefix("train/")
    if plain.startswith("eval/"):
        plain = f"eval_{plain.removeprefix('eval/')}"
    found = _NAMES.get(plain) or _NAMES.get(normalize(plain))
    if found is not None:
        return found
    without_mean = _MEAN.sub("", normalize(plain))
    if of_mean := _NAMES.get(without_mean):
        return of_mean[0], of_mean[1] + len(_NAMES)
    *groups, last = without_mean.split("/")
    if _OTHER_GROUPS.isdisjoint(groups) and not last.startswith("eval_") and groups[:1] != ["orch"]:
        last = _MEAN.sub("", last)
        if name := _LAST_PARTS.get(last) or _NAMES.get(last, ("", 0))[0]:
            return name, 2 * len(_NAMES)
    return plain, 0


def normalize(key: str) -> str:
    """Return the key as spelled in the tables: `Avg Reward` as `avg_reward`, `kl / mean` as `kl/mean`."""
    return key.strip().strip('"').lower().replace(". ", "_").replace(" / ", "/").replace(" ", "_")


def metrics(row: Row) -> Values | None:
    """Return the row's metrics, with None for nulls and non-finite numbers; None if it is not a row of metrics."""
    if SUMMARY in row:
        return None
    values: Values = {}
    empty: Values = {}
    ranks: dict[str, int] = {}
    for key, value in _logged(row).items():
        name, rank = metric(key)
        if _is_no_metric(key, name) or ranks.get(name, rank) < rank:
            continue
        if name.startswith(NONFINITE):
            values[name.removeprefix(NONFINITE)] = math.nan
        elif value in (None, "None", "null"):
            empty[name] = None
        else:
            with suppress(ValueError, TypeError):
                values[name] = number(value)
                ranks[name] = rank
    evaluated = {name: value for name, value in values.items() if name.startswith("eval_")}
    trained = TRAINING & values.keys()
    # Some writers fill the columns of training with NaN in rows of evaluation.
    if trained and any(values[name] is not None for name in trained):
        return {**empty, **values}
    if any(value is not None for value in evaluated.values()):
        return evaluated
    return {**empty, **values} if trained else None


def columns(row: Row) -> dict[str, str]:
    """Return the names of the row's metrics by column."""
    named = {key: metric(key)[0] for key in _logged(row)}
    return {key: name for key, name in named.items() if not _is_no_metric(key, name)}


def _logged(row: Row) -> Row:
    return next((row[name] for name in _NESTED if isinstance(row.get(name), dict)), row)


def _is_no_metric(key: str, name: str) -> bool:
    return normalize(key) in STEPS or name in (EPOCH, TIMELINE, *RUNS)


def number(value: Any) -> float | None:
    """Return a float, for a list its mean; None if it is not finite. Raises ValueError or TypeError."""
    if isinstance(value, list | tuple) and value:
        numbers = [found for part in value if (found := number(part)) is not None]
        return sum(numbers) / len(numbers) if numbers else None
    if isinstance(value, str):
        wrapped = _WRAPPED.fullmatch(value.strip())
        value = float(wrapped.group(1) if wrapped else value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(value)
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def step(row: Row) -> int | None:
    """Return the row's step, or None."""
    named = {normalize(key): value for key, value in row.items() if normalize(key) in STEPS}
    for name in STEPS:
        value = named.get(name)
        with suppress(ValueError, TypeError):
            found = number(value.partition("/")[0] if isinstance(value, str) else value)
            if found is not None and abs(found) < _STEP_MAX:
                return int(found)
    return None


def run(row: Row) -> str:
    """Return the name of the row's run, or ""."""
    return next((str(row[name]) for name in RUNS if row.get(name) not in (None, "")), "")
