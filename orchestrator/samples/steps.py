"""Which steps have samples, how one of their completions is named, and their groups, read as they are asked for.

A step here is a person's, that a completion was trained in first: one after the policy's that made it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from checkpoint.records.samples import Group, Head, read_samples, stored_calls
from checkpoint.store import layout
from checkpoint.store.run_store import Store
from policies.model.vocabulary import PolicyVersion

NEAREST = 3  # steps that are named where one is missing
WANTED = "expected a step, or TIMELINE-STEP as in 0-121"
_STEP = re.compile(r"(?:([0-9]{1,9})-)?([0-9]{1,12})")
_LINK = re.compile(r"([0-9]{1,9})-([0-9]{1,12})/([0-9]{1,9})/([0-9]{1,9})")


class NoSamples(Exception):
    """What was asked for is not there; the message is one line and says what is."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step that has samples."""

    timeline: int
    step: int
    keys: tuple[str, ...]  # its scorings, in their order

    def __str__(self) -> str:
        return f"{self.timeline}-{self.step}"


@dataclass(frozen=True, slots=True)
class Link:
    """One completion, printed TIMELINE-STEP/GROUP/INDEX, both counted from 0. It means the same as long as the
    step's samples are kept."""

    step: str
    group: int
    index: int

    def __str__(self) -> str:
        return f"{self.step}/{self.group}/{self.index}"

    @classmethod
    def parse(cls, text: str) -> Link:
        """Read what `str()` printed. Raises NoSamples for anything else."""
        found = _LINK.fullmatch(text)
        if found is None:
            raise NoSamples(
                f"{text[:100]!r} names no completion: expected TIMELINE-STEP/GROUP/INDEX as in 0-121/3/0"
            )
        return cls(f"{int(found[1])}-{int(found[2])}", int(found[3]), int(found[4]))


def stored_steps(store: Store) -> list[Step]:
    """All steps with samples, by timeline and step. Raises StoreError."""
    calls = stored_calls(store)
    return [Step(policy.timeline, policy.step + 1, tuple(calls[policy])) for policy in sorted(calls)]


def find_step(steps: Sequence[Step], text: str = "") -> Step:
    """The step that `text` names, of the newest timeline that has it; else the newest. Raises NoSamples."""
    if not text and steps:
        return steps[-1]
    named = _STEP.fullmatch(text)
    if named is None or not steps:
        raise NoSamples(f"{text[:100]!r} names no step: {WANTED}" if named is None else "no step has samples")
    timeline, step = named[1], int(named[2])
    for one in reversed(steps):
        if one.step == step and (timeline is None or one.timeline == int(timeline)):
            return one
    near = sorted(
        steps, key=lambda one: (timeline is not None and one.timeline != int(timeline), abs(one.step - step))
    )
    named_near = ", ".join(map(str, sorted(near[:NEAREST], key=lambda one: (one.timeline, one.step))))
    raise NoSamples(f"no samples of step {text}; the nearest are {named_near}")


def why_none(store: Store) -> str:
    """Why a run whose steps have no samples has none. Raises StoreError."""
    if next(iter(store.entries(layout.ROLLOUTS)), None) is None:
        return "no step has been scored yet"
    return "the run has no samples: its steps have not been scored yet, or their samples could not be stored"


def groups_of(store: Store, step: Step) -> Iterator[tuple[int, Head, Group]]:
    """The step's groups with their numbers, decoded one at a time. Raises NotFound, Corrupt."""
    number = 0
    for key in step.keys:
        head, groups = read_samples(store, key)
        for group in groups:
            yield number, head, group
            number += 1


def policy_of(step: Step) -> PolicyVersion:
    """Whose completions the step's are."""
    return PolicyVersion(step.timeline, step.step - 1)
