"""Which checkpoints of a run may go.

Every rule names what stays; only what no rule names is retired.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from policies.detect.divergence import Verdict
from policies.model.timelines import Fork, lineage, on_lineage
from policies.model.vocabulary import PolicyVersion

# A divergence is noticed some logged points after it began: so far back checkpoints are kept in calm, too.
NOTICED_POINTS = 20
# Of so many stretches of each width one checkpoint stays: the least with which a target is less than twice as old
# as one that has gone.
STRETCHES = 3


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
    """Return the versions that may go, oldest first: those that no rule keeps. With `keep_last` >= 1 one always
    stays."""
    rules = kept_by(checkpoints, keep_last, keep_every_steps, keep_before_step, forks, keep_since_step)
    return tuple(version for version, names in rules.items() if not names)


def kept_by(
    checkpoints: Sequence[Kept],
    keep_last: int,
    keep_every_steps: int | None,
    keep_before_step: int | None,
    forks: Sequence[Fork],
    keep_since_step: int | None = None,
) -> dict[PolicyVersion, tuple[str, ...]]:
    """Return the rules that keep each version, in a few words each, oldest version first.

    What stays: what is pinned; and on the line of the newest timeline, which reaches back over the checkpoint that
    it began from, the newest `keep_last`, what lies on a multiple of `keep_every_steps`, the newest one from
    before `keep_before_step`, all since `keep_since_step`, some at doubling ages, and of a rollback on probation
    the start and the one before it. What was abandoned by a fork goes once probation has passed.

    A timeline exists from its fork on. Until its line has a checkpoint nothing goes: the run is not left with
    nothing. Nor does one of a timeline that `forks` does not know: whoever asks has not seen its fork yet.
    """
    newest = max((fork.timeline for fork in forks), default=0)
    stretches = lineage(forks, newest)
    versions = sorted(one.version for one in checkpoints)
    line = [version for version in versions if on_lineage(version, stretches)]
    waiting = on_probation(line, forks)
    before, since, every = keep_before_step, keep_since_step, keep_every_steps
    rules: dict[str, Iterable[PolicyVersion]] = {
        "pinned": [one.version for one in checkpoints if one.pinned],
        "newer timeline": [version for version in versions if version.timeline > newest],
        f"newest {keep_last}": line[-keep_last:],
        f"every {every} steps": [one for one in line if every is not None and one.step % every == 0],
        "before a possible divergence": [one for one in line if before is not None and one.step < before][-1:],
        "recent": [one for one in line if since is not None and one.step >= since],
        "doubling ages": at_doubling_ages(line),
        "rollback on probation": {
            one for start in waiting for one in [two for two in line if two.step <= start][-2:]
        },
        "abandoned, until probation has passed": [
            one for one in versions if one not in line and (waiting or not line)
        ],
    }
    kept = {name: frozenset(found) for name, found in rules.items()}
    return {version: tuple(name for name, found in kept.items() if version in found) for version in versions}


def at_doubling_ages(line: Sequence[PolicyVersion]) -> set[PolicyVersion]:
    """Return those of a line, oldest first, that stay lest some step have none from before it.

    Cut into stretches of 1, 2, 4, 8, ... steps, the line keeps the oldest checkpoint of each of the newest
    STRETCHES of every width, about 1.5 for each doubling of the run's length. Whatever was saved `age` steps
    before the newest one, there stays one that is as old or older, but less than `2 * age`. What is the oldest of
    a stretch was so of each narrower one within it: so it makes no difference how often this was asked, and going
    back to an earlier checkpoint calls for none that has gone.
    """
    if not line:
        return set()
    newest, width = line[-1].step, 1
    stays = {line[0]}
    while width <= newest:
        oldest = {version.step // width: version for version in reversed(line)}
        stays.update(version for place, version in oldest.items() if place > newest // width - STRETCHES)
        width *= 2
    return stays


def on_probation(line: Sequence[PolicyVersion], forks: Sequence[Fork]) -> list[int]:
    """The steps from which rollbacks went on that `line` has not yet come far enough beyond."""
    reached = line[-1].step if line else 0
    waiting = [
        one for one in forks if one.probation_until_step is not None and reached <= one.probation_until_step
    ]
    return [0 if one.start_at is None else one.start_at.step for one in waiting]


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
