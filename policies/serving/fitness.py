"""Whether a rollout node goes on trying to hold the policy that is wanted of it, or says that it is unfit.

A node that failed `TRIES` times with one policy stops and says why: going on would be a loop of downloads and
server starts. The next policy is a new chance, since the last one may have been broken itself; so is time, where
the cause may pass by itself. A node that was unfit before has one try with each.
"""

from __future__ import annotations

from dataclasses import dataclass

TRIES = 3
STARTS_MAX = 3  # of an engine, in a row that came to nothing: then it is given up
# Somebody may make room on a disk, a store may recover.
AGAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Fitness:
    """One node's tries. `unfit` says why it is; empty while it is not."""

    wanted: str = ""  # the policy that they are of
    failed: int = 0  # in a row
    unfit: str = ""
    passes: bool = False  # the cause of the last failure may pass by itself

    def tries(self, wanted: str) -> bool:
        """Whether that policy is to be tried now."""
        return wanted != self.wanted or not self._spent

    def after_failure(self, wanted: str, why: str, *, passes: bool) -> Fitness:
        """The next one, after a failed try; `passes`: a later one with the same policy may succeed."""
        failed = self.failed + 1 if wanted == self.wanted else 1
        unfit = why if self.unfit or failed >= TRIES else ""
        return Fitness(wanted, failed, unfit, passes)

    def after_time(self) -> Fitness:
        """The next one, after AGAIN_S without another policy."""
        return Fitness(unfit=self.unfit) if self._spent and self.passes else self

    @property
    def _spent(self) -> bool:
        return bool(self.unfit)


def was_worth_its_start(start_s: float, worked_s: float) -> bool:
    """Whether an engine that has ended had worked as long as its start took.

    One that dies at its first requests has not, however often; one that is killed now and then has.

    Args:
        start_s: until it could serve.
        worked_s: in which it made tokens for others; to wait for work is no work.
    """
    return worked_s >= start_s
