"""Which checkpoints of a run may go.

Every rule names what stays; only what no rule names is retired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.divergence import Verdict
from policies.timelines import Fork, lineage, on_lineage
from policies.vocabulary import PolicyVersion

# A divergence is noticed some logged points after it began: so far back checkpoints are kept in calm, too.
NOTICED_POINTS = 20


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint that the store holds. A pinned one stays until it is unpinned."""

    version: PolicyVersion
    pinned: bool = False


def retired(
    checkpoints: Sequence[Kept],
    keep_last: int,
    keep_every_steps: int | None,
    keep_before_step: int | None,
    forks: Sequence[Fork],
    keep_since_step: int | None = None,
) -> tuple[PolicyVersion, ...]:
    """Return the versions that may go, oldest first. With `keep_last` >= 1 one always stays.

    What stays: what is pinned; and on the line of the newest timeline, which reaches back over the checkpoint that
    it began from, the newest `keep_last`, what lies on a multiple of `keep_every_steps`, the newest one from
    before `keep_before_step`, and all since `keep_since_step`. What was abandoned by a fork goes.

    A timeline exists from its fork on. Until its line has a checkpoint nothing goes: the run is not left with
    nothing. Nor does one of a timeline that `forks` does not know: whoever asks has not seen its fork yet.
    """
    newest = max((fork.timeline for fork in forks), default=0)
    stretches = lineage(forks, newest)
    versions = sorted(one.version for one in checkpoints)
    line = [version for version in versions if on_lineage(version, stretches)]
    if not line:
        return ()
    stays = {one.version for one in checkpoints if one.pinned or one.version.timeline > newest}
    stays.update(line[-keep_last:])
    if keep_every_steps is not None:
        stays.update(version for version in line if version.step % keep_every_steps == 0)
    if keep_before_step is not None:
        stays.update([version for version in line if version.step < keep_before_step][-1:])
    if keep_since_step is not None:
        stays.update(version for version in line if version.step >= keep_since_step)
    return tuple(version for version in versions if version not in stays)


def keep_before(step: int, verdict: Verdict, logging_steps: int) -> int:
    """Return the step before which the newest checkpoint must stay, as of `step`.

    That is where the excursion under way began; in calm, where one that is not noticed yet may have.
    """
    return keep_since(step, logging_steps) if verdict.onset_step is None else verdict.onset_step


def keep_since(step: int, logging_steps: int) -> int:
    """Return the step since which all checkpoints must stay, as of `step`.

    Behind any of them a divergence may have begun that will be noticed later: then that one is wanted.
    """
    return max(0, step - NOTICED_POINTS * logging_steps)
