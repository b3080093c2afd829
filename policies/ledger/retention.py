"""Decide which checkpoints of a run are retired: those that no rule keeps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from grpo_orch.policies.detect.divergence import Verdict
from grpo_orch.policies.model.spec import CheckpointsSpec
from grpo_orch.policies.model.timelines import Fork, lineage, on_lineage
from grpo_orch.policies.model.vocabulary import PolicyVersion

# Logged points within which a divergence is detected: all checkpoints of that span are kept.
NOTICED_POINTS = 20
# For each width, a checkpoint is kept in each of the newest STRETCHES stretches. With fewer, a rollback target
# could be twice as old as a retired checkpoint.
STRETCHES = 3


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint in the store. A pinned checkpoint is kept until it is unpinned."""

    version: PolicyVersion
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """Which checkpoints of the newest timeline and its ancestors are kept, besides those for rollbacks."""

    keep_last: int  # the newest N
    keep_every_steps: int | None = None  # those at multiples of it
    keep_before_step: int | None = None  # the newest before this step; see `keep_before`
    keep_since_step: int | None = None  # all since this step; see `keep_since`


def versions_to_retire(
    checkpoints: Sequence[StoredCheckpoint], forks: Sequence[Fork], rules: RetentionRules
) -> tuple[PolicyVersion, ...]:
    """Return the versions that no rule keeps, oldest first. With `keep_last` >= 1 at least one is kept."""
    return tuple(version for version, names in rules_keeping(checkpoints, forks, rules).items() if not names)


def rules_keeping(
    checkpoints: Sequence[StoredCheckpoint], forks: Sequence[Fork], rules: RetentionRules
) -> dict[PolicyVersion, tuple[str, ...]]:
    """Return the names of the rules that keep each version, oldest version first.

    Pinned checkpoints are kept. Of the newest timeline and its ancestors, the checkpoints named by `rules` are
    kept, some at doubling ages, and during a rollback's probation its start and the checkpoint before it.
    Abandoned checkpoints are retired after probation.

    Nothing is retired until the newest timeline or an ancestor has a checkpoint. Checkpoints of a timeline that is
    not in `forks` are kept, because the caller has not seen its fork yet.
    """
    newest = max((fork.timeline for fork in forks), default=0)
    stretches = lineage(forks, newest)
    versions = sorted(checkpoint.version for checkpoint in checkpoints)
    line = [version for version in versions if on_lineage(version, stretches)]
    waiting = on_probation(line, forks)
    every, before, since = rules.keep_every_steps, rules.keep_before_step, rules.keep_since_step
    found: dict[str, Iterable[PolicyVersion]] = {
        "pinned": [checkpoint.version for checkpoint in checkpoints if checkpoint.pinned],
        "newer timeline": [version for version in versions if version.timeline > newest],
        f"newest {rules.keep_last}": line[-rules.keep_last :],
        f"every {every} steps": [version for version in line if every is not None and version.step % every == 0],
        "before a possible divergence": [
            version for version in line if before is not None and version.step < before
        ][-1:],
        "recent": [version for version in line if since is not None and version.step >= since],
        "doubling ages": at_doubling_ages(line),
        "rollback on probation": {
            version for start in waiting for version in [old for old in line if old.step <= start][-2:]
        },
        "abandoned, until probation has passed": [
            version for version in versions if version not in line and (waiting or not line)
        ],
    }
    kept = {name: frozenset(group) for name, group in found.items()}
    return {version: tuple(name for name, group in kept.items() if version in group) for version in versions}


def at_doubling_ages(line: Sequence[PolicyVersion]) -> set[PolicyVersion]:
    """Return the versions of `line`, oldest first, that are kept so that every step has an earlier checkpoint.

    For each width of 1, 2, 4, 8, ... steps, the oldest checkpoint in each of the newest STRETCHES stretches is
    kept: about 1.5 checkpoints for each doubling of the run's length. For every checkpoint saved `age` steps
    before the newest, one is kept that is at least as old, but less than `2 * age`. The oldest checkpoint of a
    stretch is also the oldest of each narrower stretch within it. So the result does not depend on how often the
    rule was applied, and rolling back needs no retired checkpoint.
    """
    if not line:
        return set()
    newest, width = line[-1].step, 1
    kept = {line[0]}
    while width <= newest:
        oldest = {version.step // width: version for version in reversed(line)}
        kept.update(version for stretch, version in oldest.items() if stretch > newest // width - STRETCHES)
        width *= 2
    return kept


def on_probation(line: Sequence[PolicyVersion], forks: Sequence[Fork]) -> list[int]:
    """Return the start steps of the rollbacks whose probation `line` has not passed."""
    reached = line[-1].step if line else 0
    waiting = [fork for fork in forks if reached <= fork.probation_until_step]
    return [0 if fork.start_at is None else fork.start_at.step for fork in waiting]


def keep_before(step: int, verdict: Verdict, logging_steps: int) -> int:
    """Return the step before which the newest checkpoint must be kept, as of `step`.

    That is the onset of the current excursion or, without one, the earliest onset of an undetected excursion.
    """
    return keep_since(step, logging_steps) if verdict.onset_step is None else verdict.onset_step


def keep_since(step: int, logging_steps: int) -> int:
    """Return the step since which all checkpoints must be kept, as of `step`.

    A divergence that is detected later may have begun after any of them, and would need that checkpoint.
    """
    return max(0, step - NOTICED_POINTS * logging_steps)


# Stored completions. They are deleted, except those that a restart may need, and a sample.
#
# They are large: a token takes 26 bytes, so a step of 1,024 completions of 4,000 tokens takes 108 MB, and 5,000
# such steps 540 GB.

# If the newest checkpoint is damaged, a restart from the one before needs the completions since that one.
RESTARTS_FROM = 2


def versions_to_delete(
    stored: Sequence[PolicyVersion],
    checkpoints: Sequence[PolicyVersion],
    keep_last: int,
    sample_steps: int,
    forks: Sequence[Fork],
) -> tuple[PolicyVersion, ...]:
    """Return the policy versions whose stored completions no restart needs, in order.

    Kept are: on the newest timeline, all since the oldest of the newest `keep_last` checkpoints (at least two); on
    earlier timelines, which are never replayed because their seeds differ, all until every rollback has passed its
    probation; multiples of `sample_steps` on the newest timeline and its ancestors, permanently; and everything of
    a timeline that is not in `forks`.
    """
    newest = max((fork.timeline for fork in forks), default=0)
    stretches = lineage(forks, newest)
    line = [version for version in sorted(checkpoints) if on_lineage(version, stretches)]
    oldest = line[-max(keep_last, RESTARTS_FROM) :][:1]
    since_step = oldest[0].step if oldest else 0
    waiting = bool(on_probation(line, forks)) or not line

    def is_kept(version: PolicyVersion) -> bool:
        if version.timeline > newest or (version.step % sample_steps == 0 and on_lineage(version, stretches)):
            return True
        return version.step >= since_step if version.timeline == newest else waiting

    return tuple(version for version in sorted(set(stored)) if not is_kept(version))


# The maximum number of checkpoints in the store, computed before a run starts.

# Upload speed from a single machine to a store, slow and fast. `down` assumes the same two
# (policies.control.lifecycle); Ceph's gateway reached 200 MB/s (docs/benchmarks.md).
STORE_BYTES_PER_S = (100 * 10**6, 1000 * 10**6)
# Newest saves that are simulated, in addition to the recent ones. Earlier saves only add a few at doubling ages.
SIMULATED_SAVES = 300


def max_checkpoints(rules: CheckpointsSpec, save_steps: int, logging_steps: int, steps: int) -> int:
    """Return the maximum number of checkpoints that a healthy run of `steps` steps keeps at a time."""
    saves = steps // save_steps
    first, most = max(0, saves - SIMULATED_SAVES - NOTICED_POINTS * logging_steps // save_steps), 0
    earlier = [PolicyVersion(0, save_steps * save) for save in range(1, first + 1)]
    line = [StoredCheckpoint(version) for version in sorted(at_doubling_ages(earlier))]
    for step in range(save_steps * (first + 1), save_steps * saves + 1, save_steps):
        line.append(StoredCheckpoint(PolicyVersion(0, step)))
        before, since = keep_before(step, Verdict(), logging_steps), keep_since(step, logging_steps)
        retired = set(versions_to_retire(line, (), RetentionRules(rules.keep_last, None, before, since)))
        line = [checkpoint for checkpoint in line if checkpoint.version not in retired]
        most = max(most, len(line))
    if rules.keep_every_steps is None:
        return most
    return min(saves, most + steps // math.lcm(rules.keep_every_steps, save_steps))
