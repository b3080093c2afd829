"""Account for the rewards of a step, and stop a trainer that gets none for several steps: they teach nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog
import torch

from grpo_orch.policies.detect.pitfalls import UNREWARDED_MAX
from grpo_orch.policies.detect.symptoms import WITNESS
from grpo_orch.tasks.storing.step_costs import StepCosts

log = structlog.get_logger()


class NothingToLearn(Exception):
    """Further steps would teach nothing."""


class Unrewarded:
    """Counts successive batches of completions without any reward."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def note(self, completions: int, rewarded: int, functions: Sequence[str]) -> None:
        """Count one training batch. Raises NothingToLearn after UNREWARDED_MAX batches without a reward.

        Args:
            completions: of the batch, over all processes, without refused ones.
            rewarded: how many of them have a number as reward.
            functions: the names of the reward functions.
        """
        if rewarded or not completions:
            self._in_a_row = 0 if rewarded else self._in_a_row
            return
        self._in_a_row += 1
        names = ", ".join(functions)
        if self._in_a_row == 1:
            log.warning("no_reward", completions=completions, functions=names, stops_after=UNREWARDED_MAX)
        if self._in_a_row >= UNREWARDED_MAX:
            batch = f"none of {completions} completions had a reward in {self._in_a_row} successive steps"
            raise NothingToLearn(f"{batch}: {names} returned None or NaN for all of them")


class RewardAccount:
    """Records rewards, of shape (completions of all processes, functions).

    Args:
        costs: takes each training step's rewards and the time that they took.
        functions: the names of the reward functions.
        weights: their weights.
        log_metric: logs a value in TRL's row.
    """

    def __init__(
        self,
        costs: StepCosts,
        functions: Sequence[str],
        weights: torch.Tensor,
        log_metric: Callable[[str, float], None],
    ) -> None:
        self._costs, self._functions, self._weights = costs, functions, weights
        self._log_metric = log_metric
        self._unrewarded = Unrewarded()

    def note_training(self, per_function: torch.Tensor, refused: int, took_s: float) -> None:
        """Record a training call, of which `refused` completions have no reward. Raises NothingToLearn."""
        self._costs.rewards_s += took_s
        rewards = (per_function * self._weights.to(per_function.device)).nansum(dim=1)
        scored = ~torch.isnan(per_function).all(dim=1)
        self._costs.rewards.extend(rewards[scored].tolist())
        self._unrewarded.note(len(per_function) - refused, int(scored.sum()), self._functions)

    def log_witnesses(self, per_function: torch.Tensor) -> None:
        """Log scores of reward functions with weight 0 under other names, since TRL does not log weights."""
        for at in (self._weights == 0).nonzero().flatten().tolist():
            self._log_metric(WITNESS + self._functions[at], torch.nanmean(per_function[:, at]).item())
