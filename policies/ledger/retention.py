"""Which checkpoints of a run may go.

Every rule names what stays; only what no rule names is retired.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from policies.detect.divergence import Verdict
from policies.model.timelines import Fork, lineage, on_lineage
from policies.model.vocabulary import PolicyVersion

# A divergence is noticed some logged points after it began: checkpoints are always kept so far back.
NOTICED_POINTS = 20
# One checkpoint stays in each of so many stretches of each width: the fewest with which a target is less than
# twice as old as one that has gone.
STRETCHES = 3


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint in the store. A pinned one stays until it is unpinned."""

    version: PolicyVersion
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """What stays on the line of the newest timeline, besides what a rollback may need."""

    keep_last: int  # so many of the newest
    keep_every_steps: int | None = None  # what lies on a multiple of it
    keep_before_step: int | None = None  # the newest one from before this step; see `keep_before`
    keep_since_step: int | None = None  # all since this step; see `keep_since`


def versions_to_retire(
    checkpoints: Sequence[StoredCheckpoint], forks: Sequence[Fork], rules: RetentionRules
) -> tuple[PolicyVersion, ...]:
    """Return the versions that no rule keeps, oldest first. With `keep_last` >= 1 one version always stays."""
    return tuple(version for version, names in rules_keeping(checkpoints, forks, rules).items() if not names)


def rules_keeping(
    checkpoints: Sequence[StoredCheckpoint], forks: Sequence[Fork], rules: RetentionRules
) -> dict[PolicyVersion, tuple[str, ...]]:
    """Return the rules that keep each version, in a few words each, oldest version first.

    Kept are pinned checkpoints and, on the line of the newest timeline, which reaches back past the checkpoint
    that it began from: what `rules` say, some at doubling ages, and during a rollback's probation its start and
    the one before that. What a fork abandoned goes once probation has passed.

    Until the newest timeline's line has a checkpoint nothing goes, so that the run is not left with nothing. Nor
    does one of a timeline that `forks` does not know: the caller has not seen its fork yet.
    """
    newest = max((fork.timeline for fork in forks), default=0)
    stretches = lineage(forks, newest)
    versions = sorted(one.version for one in checkpoints)
    line = [version for version in versions if on_lineage(version, stretches)]
    waiting = on_probation(line, forks)
    every, before, since = rules.keep_every_steps, rules.keep_before_step, rules.keep_since_step
    found: dict[str, Iterable[PolicyVersion]] = {
        "pinned": [one.version for one in checkpoints if one.pinned],
        "newer timeline": [version for version in versions if version.timeline > newest],
        f"newest {rules.keep_last}": line[-rules.keep_last :],
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
    kept = {name: frozenset(ones) for name, ones in found.items()}
    return {version: tuple(name for name, ones in kept.items() if version in ones) for version in versions}


def at_doubling_ages(line: Sequence[PolicyVersion]) -> set[PolicyVersion]:
    """Return those of a line, oldest first, that stay so that every step has one from before it.

    Cut into stretches of 1, 2, 4, 8, ... steps, the line keeps the oldest checkpoint of each of the newest
    STRETCHES of every width, about 1.5 for each doubling of the run's length. For whatever was saved `age` steps
    before the newest one, one stays that is as old or older, but less than `2 * age`. The oldest of a stretch was
    the oldest of each narrower one within it: so it does not matter how often this was applied, and going back to
    an earlier checkpoint needs none that has gone.
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
    """Return the start steps of rollbacks whose probation `line` has not passed yet."""
    reached = line[-1].step if line else 0
    waiting = [one for one in forks if reached <= one.probation_until_step]
    return [0 if one.start_at is None else one.start_at.step for one in waiting]


def keep_before(step: int, verdict: Verdict, logging_steps: int) -> int:
    """Return the step before which the newest checkpoint must stay, as of `step`.

    That is where the present excursion began, or, while there is none, where an unnoticed one may have.
    """
    return keep_since(step, logging_steps) if verdict.onset_step is None else verdict.onset_step


def keep_since(step: int, logging_steps: int) -> int:
    """Return the step since which all checkpoints must stay, as of `step`.

    A divergence that is noticed later may have begun after any of them, and then that one is needed.
    """
    return max(0, step - NOTICED_POINTS * logging_steps)
