"""Timelines: which steps belong to a run's present lineage, and what a fork changes.

A run begins on timeline 0. A rollback forks a new one from a checkpoint. The old timeline's steps after that
checkpoint are abandoned: they stay on record and are never continued.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.vocabulary import PolicyVersion


@dataclass(frozen=True, slots=True)
class Skipped:
    """A range of steps, both ends included, whose prompts later timelines skip."""

    timeline: int
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class Fork:
    """The beginning of a timeline. `timelines/NNNN.json` in the store; timeline 0 has none.

    `start` is the checkpoint that it continues from, a PolicyVersion as text; None: the run's start. `changes` are
    all its differences from run.yaml, those of its predecessors included. `skipped` are the steps whose prompts it
    skips until it has passed its probation. `from_step` is the step that the timeline before had reached.
    """

    timeline: int
    start: str | None
    changes: Mapping[str, bool | int | float] = field(default_factory=dict)  # keys of `grpo`
    skipped: tuple[Skipped, ...] = ()
    reason: str = ""
    from_step: int = 0

    @property
    def start_at(self) -> PolicyVersion | None:
        return None if self.start is None else PolicyVersion.parse(self.start)

    @property
    def probation_until_step(self) -> int:
        """The last step of its probation."""
        return probation_until(self.from_step, self.start_at)


def probation_until(from_step: int, start: PolicyVersion | None) -> int:
    """Return the last step of a probation: as far after the trip as the trip was after the start."""
    return 2 * from_step - (0 if start is None else start.step)


def lineage(forks: Sequence[Fork], timeline: int) -> tuple[PolicyVersion | int, ...]:
    """Return the stretches of a timeline, newest first: its number, then the last version of each earlier stretch.

    For example (2, 1-150, 0-120).

    Raises KeyError for a timeline that is neither 0 nor in `forks`.
    """
    by_number = {fork.timeline: fork for fork in forks}
    stretches: list[PolicyVersion | int] = [timeline]
    while timeline != 0:
        start = by_number[timeline].start_at
        if start is None:
            break
        stretches.append(start)
        timeline = start.timeline
    return tuple(stretches)


def on_lineage(version: PolicyVersion, stretches: Sequence[PolicyVersion | int]) -> bool:
    """Whether a version lies on a lineage returned by `lineage`."""
    return any(
        version.timeline == stretch
        if isinstance(stretch, int)
        else version.timeline == stretch.timeline and version.step <= stretch.step
        for stretch in stretches
    )


def forked_spec(spec: RunSpec, fork: Fork | None) -> RunSpec:
    """Return the run's specification on the timeline that `fork` began."""
    return spec if fork is None or not fork.changes else replace(spec, grpo={**spec.grpo, **fork.changes})
