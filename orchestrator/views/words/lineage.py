"""A run's timelines in words: how far a rollback is, and what it changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import assert_never

from policies.control.objective import TRL_DEFAULTS
from policies.model.state import Rollback
from policies.model.timelines import Fork, Skipped
from policies.model.vocabulary import RollbackStage


@dataclass(frozen=True, slots=True)
class Change:
    """A key of `grpo`: its value before, None where that is a default of TRL's not known here, and after."""

    before: float | None
    after: float


def start_words(start: str | None) -> str:
    """What a timeline goes on from."""
    return "the run's start" if start is None else f"checkpoint {start}"


def stage_words(rollback: Rollback) -> str:
    """What a rollback waits for, or that it has passed."""
    if rollback.passed:
        return "has passed its probation"
    match rollback.stage:
        case RollbackStage.BEGUN:
            return "is decided, and not yet in the store"
        case RollbackStage.FORKED:
            return "waits for the old trainer to end"
        case RollbackStage.FENCED:
            return "waits for its trainer"
        case RollbackStage.RESUMED:
            return "is trained, and waits for the fleet"
        case RollbackStage.PROBATION:
            return f"is on probation until step {rollback.probation_until_step}"
        case _:
            assert_never(rollback.stage)


def changes_of(fork: Fork, before: Fork | None, grpo: Mapping[str, object]) -> dict[str, Change]:
    """What this fork changed in `grpo`; its own `changes` hold those of its predecessors, too."""
    known = {**TRL_DEFAULTS, **{key: value for key, value in grpo.items() if isinstance(value, int | float)}}
    known.update({} if before is None else before.changes)
    return {key: Change(known.get(key), value) for key, value in fork.changes.items() if known.get(key) != value}


def change_words(changes: Mapping[str, Change]) -> str:
    """`beta 0.02 → 0.04, learning_rate 1e-06 → 5e-07`"""
    return ", ".join(
        f"{key} {one.after:g}" if one.before is None else f"{key} {one.before:g} → {one.after:g}"
        for key, one in changes.items()
    )


def effect_words(effects: Mapping[str, str]) -> str:
    """`learning_rate: updates of half the size; beta: ...`; keys with the same effect are told together."""
    by_text: dict[str, list[str]] = {}
    for key, text in effects.items():
        by_text.setdefault(text, []).append(key)
    return "; ".join(f"{', '.join(keys)}: {text}" for text, keys in by_text.items())


def skipped_of(fork: Fork, before: Fork | None) -> tuple[Skipped, ...]:
    """The steps whose prompts this fork leaves out, and the one before it did not."""
    known = () if before is None else before.skipped
    return tuple(one for one in fork.skipped if one not in known)


def skipped_words(skipped: Iterable[Skipped]) -> str:
    """`other prompts for those of steps 41 to 57 of timeline 0`"""
    told = [f"steps {one.first_step} to {one.last_step} of timeline {one.timeline}" for one in skipped]
    return f"other prompts for those of {', '.join(told)}" if told else ""
