"""Decide whether a rollout node keeps trying to load the wanted policy, or reports that it is unfit.

A node that failed `TRIES` times with one policy stops and reports the reason, instead of repeating downloads and
server starts. It tries again with the next policy, because the last one may have been broken, and after
UNFIT_RETRY_S where the cause may be temporary. A node that was unfit before has one try with each policy.
"""

from __future__ import annotations

from dataclasses import dataclass

TRIES = 3
STARTS_MAX = 3  # of an engine, in a row without useful work: then it is abandoned
UNFIT_RETRY_S = 30.0  # for disk space to be freed, or a store to recover


@dataclass(frozen=True, slots=True)
class Fitness:
    """One node's tries. `unfit` is the reason why it is unfit; empty while it is fit."""

    wanted: str = ""  # the policy that was tried
    failed: int = 0  # in a row
    unfit: str = ""
    is_temporary: bool = False  # the cause of the last failure may be temporary

    def should_try(self, wanted: str) -> bool:
        """Whether to try that policy now."""
        return wanted != self.wanted or not self.unfit

    def after_failure(self, wanted: str, reason: str, *, is_temporary: bool) -> Fitness:
        """Return the state after a failed try. `is_temporary`: a later try with the same policy may succeed."""
        failed = self.failed + 1 if wanted == self.wanted else 1
        unfit = reason if self.unfit or failed >= TRIES else ""
        return Fitness(wanted, failed, unfit, is_temporary)

    def after_time(self) -> Fitness:
        """Return the state after UNFIT_RETRY_S without another policy."""
        return Fitness(unfit=self.unfit) if self.unfit and self.is_temporary else self


def was_worth_its_start(start_s: float, worked_s: float) -> bool:
    """Whether an engine that has ended had worked for as long as it took to start.

    An engine that dies at its first requests has not; one that is killed occasionally has.

    Args:
        start_s: from its start until it could serve.
        worked_s: time in which it generated tokens, idle time excluded.
    """
    return worked_s >= start_s
