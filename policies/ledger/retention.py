"""Which checkpoints of a run may go.

Every rule names what stays; only what no rule names is retired.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from policies.detect.divergence import Verdict
from policies.model.spec import CheckpointsSpec
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


# Which stored completions of a run may go: all but those that a restart may need again, and a sample.
#
# They are large: a token takes 26 bytes, so a step of 1,024 completions of 4,000 tokens takes 108 MB, and 5,000
# such steps 540 GB.

# The newest checkpoint may turn out damaged; a restart from the one before needs its completions, too.
RESTARTS_FROM = 2


def versions_to_delete(
    stored: Sequence[PolicyVersion],
    checkpoints: Sequence[PolicyVersion],
    keep_last: int,
    sample_steps: int,
    forks: Sequence[Fork],
) -> tuple[PolicyVersion, ...]:
    """Return the policy versions whose stored completions no restart needs, in order.

    What stays: on the newest timeline, all since the oldest of the newest `keep_last` checkpoints (at least two)
    of its line; on earlier ones, whose seeds differ so that nothing of them is ever replayed, all until every
    rollback has passed its probation; on the line, multiples of `sample_steps` for good; and everything of a
    timeline that `forks` does not know.
    """
    newest = max((fork.timeline for fork in forks), default=0)
    stretches = lineage(forks, newest)
    line = [version for version in sorted(checkpoints) if on_lineage(version, stretches)]
    oldest = line[-max(keep_last, RESTARTS_FROM) :][:1]
    since_step = oldest[0].step if oldest else 0
    waiting = bool(on_probation(line, forks)) or not line

    def stays(version: PolicyVersion) -> bool:
        if version.timeline > newest or (version.step % sample_steps == 0 and on_lineage(version, stretches)):
            return True
        return version.step >= since_step if version.timeline == newest else waiting

    return tuple(version for version in sorted(set(stored)) if not stays(version))


# How many of a run's checkpoints stay in its store at a time, before it is started.

# What a store may take of one machine, slow and fast: what a `down` waits for reckons with the same two
# (policies.control.stopping), and Ceph's gateway took 200 MB/s (docs/benchmarks.md).
STORE_BYTES_PER_S = (100 * 10**6, 1000 * 10**6)
# Of the newest saves, beside those that stay as recent: their number grows with the logarithm of the run's length.
FOLLOWED = 300


def most_kept(rules: CheckpointsSpec, save_steps: int, logging_steps: int, steps: int) -> int:
    """Return how many checkpoints of a healthy run of so many steps stay at most, by the rules of retention."""
    saves = steps // save_steps
    first, most = max(0, saves - FOLLOWED - NOTICED_POINTS * logging_steps // save_steps), 0
    line = [
        StoredCheckpoint(PolicyVersion(0, step))
        for step in _steps_at_doubling_ages(save_steps, save_steps * first)
    ]
    for step in range(save_steps * (first + 1), save_steps * saves + 1, save_steps):
        line.append(StoredCheckpoint(PolicyVersion(0, step)))
        before, since = keep_before(step, Verdict(), logging_steps), keep_since(step, logging_steps)
        gone = set(versions_to_retire(line, (), RetentionRules(rules.keep_last, None, before, since)))
        line = [one for one in line if one.version not in gone]
        most = max(most, len(line))
    if rules.keep_every_steps is None:
        return most
    return min(saves, most + steps // math.lcm(rules.keep_every_steps, save_steps))


def _steps_at_doubling_ages(save_steps: int, newest: int) -> list[int]:
    """Steps among which are all that the rule of doubling ages keeps at that step: what it keeps has no memory."""
    found, width = {save_steps} if newest else set(), 1
    while width <= newest:
        places = range(max(0, newest // width - STRETCHES), newest // width + 1)
        oldest = (save_steps * max(1, math.ceil(place * width / save_steps)) for place in places)
        found.update(step for step in oldest if step <= newest)
        width *= 2
    return sorted(found)
