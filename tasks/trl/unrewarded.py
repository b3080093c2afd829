"""Stops a trainer whose completions get no rewards for several steps: such steps teach nothing."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from grpo_orch.policies.detect.pitfalls import UNREWARDED_MAX

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
