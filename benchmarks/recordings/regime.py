"""What a run is: its settings, what is done to it, and what is expected of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Reward:
    """`scale` and `shift` change its units: scale x reward + shift.

    kind: `graded` (0 to 1), `exact` (0 or 1), `style` (an answer followed by four # or more), `signed` (an answer
    followed by just four #), `thrice` (how often the answer is given, up to three times), `lenient` (the form, and
    the share of characters in their places), `terse` (graded, a little less for each character), or what can be
    had without answering: `length` (mostly the share of the permitted length), `brief` (mostly what is left of
    it), `endless` (mostly that there is no end), `form` (what ends with >), `letters` (mostly one character),
    `digits` (mostly how many digits).
    breaks_at: the step from which it is `broken`: `random`, `inverted`, `constant`, `nan`, or `shuffled`, where
    the answers are those of other prompts.
    """

    kind: str = "graded"
    scale: float = 1.0
    shift: float = 0.0
    breaks_at: int | None = None
    broken: str | None = None


@dataclass(frozen=True, slots=True)
class Lesson:
    """A part of the data set: `share` of the steps about a task of these sizes."""

    share: float
    task: str
    sizes: range


@dataclass(frozen=True, slots=True)
class Sampler:
    """How what samples differs from what is trained.

    stale_steps: its weights are that many steps apart from one another; 0: always the trainer's.
    temperature: its own, where it is not the trainer's.
    """

    stale_steps: int = 0
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class Regime:
    """One run. `grpo` changes the settings that all have in common (`grpo.common`)."""

    name: str
    cause: str
    why: str
    diverges: bool
    task: str = "sort"
    model: str = "small"
    steps: int = 240
    grpo: Mapping[str, Any] = field(default_factory=dict)
    lora_rank: int = 0
    dtype: str = "float32"
    reward: Reward = Reward()
    lessons: tuple[Lesson, ...] = ()
    sampler: Sampler = Sampler()
    rate_doubles: tuple[int, int] | None = None
    """The step from which the learning rate rises, and in how many steps it doubles."""
    signed_kl: bool = False
    """Log the mean difference of log-probabilities, which may be negative, in the place of TRL's estimate."""
    witness: bool = False
    """Log the score of the true task, of weight 0, beside the reward."""
    seed: int = 17
