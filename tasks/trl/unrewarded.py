"""Stops a trainer whose completions have no reward, step after step: such steps teach nothing."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from policies.detect.pitfalls import UNREWARDED_MAX

log = structlog.get_logger()


class NothingToLearn(Exception):
    """Further steps would teach nothing."""


class Unrewarded:
    """Counts batches of completions without any reward, those in a row."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def note(self, completions: int, rewarded: int, functions: Sequence[str]) -> None:
        """Take note of one batch to train on. Raises NothingToLearn after UNREWARDED_MAX without a reward.

        Args:
            completions: in the batch, over all processes, without those of refused prompts.
            rewarded: of these, how many have a number as their reward.
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
            batch = f"none of {completions} completions had a reward, {self._in_a_row} steps in a row"
            raise NothingToLearn(f"{batch}: the run's rewards ({names}) were None or NaN for all of them")
