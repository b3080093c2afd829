"""Replaces the prompts that diverged steps were trained on.

They are replaced, not removed, so that epochs keep their length and a restart finds its place.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
import torch

from grpo_orch.policies.model.timelines import Fork, Skipped

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Walk:
    """A trainer's way through its dataset: epoch by epoch, in windows of prompts that one generate call completes.

    A batch is the input of one backward pass. An epoch's prompts that do not fill a window are left out; its last
    step takes the remaining batches.
    """

    prompts: int  # in the dataset
    prompts_per_window: int
    batches_per_window: int
    batches_per_step: int
    order: Callable[[int], Sequence[int]]  # of the dataset's prompts, by the epoch's number

    @property
    def windows_per_epoch(self) -> int:
        return self.prompts // self.prompts_per_window

    @property
    def batches_per_epoch(self) -> int:
        return self.windows_per_epoch * self.batches_per_window

    @property
    def steps_per_epoch(self) -> int:
        return max(1, -(-self.batches_per_epoch // self.batches_per_step))

    def batches_before(self, steps: int) -> int:
        """Return how many batches the first `steps` steps take."""
        epochs, more = divmod(steps, self.steps_per_epoch)
        return epochs * self.batches_per_epoch + more * self.batches_per_step

    def window_of_batch(self, batch: int) -> int:
        """Return a batch's window, both counted from the start of the run."""
        return batch // self.batches_per_window

    def steps_before(self, window: int) -> int:
        """Return how many steps are done when a window, counted from the start of the run, begins."""
        return self.first_step_of(*divmod(window, self.windows_per_epoch)) - 1

    def rows_of(self, window: int) -> Sequence[int]:
        """Return the rows of a window's prompts in the dataset, in order."""
        epoch, number = divmod(window, self.windows_per_epoch)
        return self.order(epoch)[number * self.prompts_per_window :][: self.prompts_per_window]

    def first_step_of(self, epoch: int, window: int) -> int:
        """Return the step that takes the first batch of an epoch's window."""
        return epoch * self.steps_per_epoch + window * self.batches_per_window // self.batches_per_step + 1

    def windows_of(self, first_step: int, last_step: int) -> Iterator[tuple[int, int]]:
        """Yield `(first step of its window, row in the dataset)` for each prompt of these steps, both included.

        Steps count from 1. All prompts of a window count, since its batches are shuffled.
        """
        if self.batches_per_epoch == 0:
            return
        first, end = self.batches_before(first_step - 1), self.batches_before(last_step)
        windows: dict[int, set[int]] = {}  # by epoch
        for batch in range(first, end):
            epoch, batch_of_epoch = divmod(batch, self.batches_per_epoch)
            windows.setdefault(epoch, set()).add(batch_of_epoch // self.batches_per_window)
        for epoch, used in windows.items():
            order, size = self.order(epoch), self.prompts_per_window
            for window in used:
                step = self.first_step_of(epoch, window)
                yield from ((step, prompt) for prompt in order[window * size : (window + 1) * size])


@dataclass(frozen=True, slots=True)
class ReplacedPrompts:
    """Rows of the dataset and the rows that replace them, in windows that begin at `until_step` or before."""

    others: Mapping[int, int] = field(default_factory=dict)
    until_step: int = 0

    def at(self, step: int) -> Mapping[int, int]:
        """Return the replacements in a window that begins with `step`."""
        return self.others if step <= self.until_step else {}

    def seen(self, walk: Walk, first_step: int, last_step: int) -> set[int]:
        """Return the rows that these steps see, after replacement."""
        windows = walk.windows_of(first_step, last_step)
        return {self.at(step).get(prompt, prompt) for step, prompt in windows}


def walk_of(config: Any, prompts: int) -> Walk:
    """Return a trainer's walk through a dataset of `prompts` rows, as TRL's sampler walks with this GRPOConfig."""

    @functools.lru_cache(2)  # the present epoch, and the next one for windows that are requested ahead
    def order(epoch: int) -> Sequence[int]:
        if not config.shuffle_dataset:
            return range(prompts)
        generator = torch.Generator()
        draw_epochs_before(epoch, prompts, generator, config.seed)
        return array("q", torch.randperm(prompts, generator=generator).tolist())

    return Walk(
        prompts,
        prompts_per_window=config.generation_batch_size // config.num_generations,
        batches_per_window=config.steps_per_generation * config.num_iterations,
        batches_per_step=config.gradient_accumulation_steps,
        order=order,
    )


def draw_epochs_before(epoch: int, prompts: int, generator: torch.Generator, seed: int) -> None:
    """Advance a sampler's generator to the epoch's start."""
    generator.manual_seed(seed)
    for _ in range(epoch):
        torch.randperm(prompts, generator=generator)


def replacements(forks: Sequence[Fork], timeline: int, walk: Callable[[int], Walk]) -> ReplacedPrompts:
    """Return the replaced prompts of `timeline` until its probation ends. A timeline that passes it shows that the
    prompts were not the cause.

    Nothing is replaced if more than half of the dataset would have to be.

    Args:
        walk: returns the walk of a timeline's trainer.
    """
    fork = next((fork for fork in forks if fork.timeline == timeline), None)
    if fork is None or not fork.skipped:
        return ReplacedPrompts()
    prompts = walk(timeline).prompts
    skipped = sorted({prompt for part in fork.skipped for prompt in _trained_on(part, forks, walk)})
    if 2 * len(skipped) > prompts:
        log.warning(
            "prompts_not_replaced", reason="they are most of the dataset", skipped=len(skipped), of=prompts
        )
        return ReplacedPrompts()
    others = sorted(set(range(prompts)) - set(skipped))
    # Spread evenly over the others, so that no prompt is seen much more often than the rest.
    replaced = {prompt: others[number * len(others) // len(skipped)] for number, prompt in enumerate(skipped)}
    return ReplacedPrompts(replaced, fork.probation_until_step)


def _trained_on(part: Skipped, forks: Sequence[Fork], walk: Callable[[int], Walk]) -> set[int]:
    """Return the rows that these steps saw, including the replacements of their own timeline."""
    return replacements(forks, part.timeline, walk).seen(walk(part.timeline), part.first_step, part.last_step)
