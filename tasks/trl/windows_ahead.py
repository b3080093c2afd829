"""Which windows are requested together, and from which policies: streaming, and `rollout.max_staleness`.

A window is what TRL generates in one go (`steps_per_generation` batches). The windows that begin in one step are a
round. They are requested together as soon as their policy is published, and are trained on in order. With a
staleness of s, round r is sampled from the policy that the trainer has when it begins round r - s; the first
rounds of a timeline from the policy it starts with. So the content of a window follows from seed, data and
policies, and never from timing: a restarted trainer requests the same windows or reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.tasks.completions.rollout_source import Call
from grpo_orch.tasks.trl.skipped_prompts import Walk


class WindowsAhead:
    """The windows of one trainer.

    Args:
        trainer: a `tasks.trl.trl_grpo.FleetGRPOTrainer`.
        timeline: the trained timeline.
        since_step: of its first policy.
        staleness: by how many rounds a window's policy is older than the trained one.
        prompts_of: converts rows of the dataset to prompts; by default to token ids.
    """

    def __init__(
        self,
        trainer: Any,
        timeline: int,
        since_step: int,
        staleness: int,
        prompts_of: Callable[[list[dict[str, Any]]], list[Any]] | None = None,
    ) -> None:
        self._trainer, self._timeline = trainer, timeline
        self._since_step, self._staleness = since_step, staleness
        self._prompts_of = prompts_of or self._token_ids
        self._walk: Walk = trainer.walk
        self._first, self._first_step = 0, 0  # this trainer's first window, and the steps before it

    def start(self) -> None:
        """Note the first window, which is about to be generated.

        A timeline that begins in the middle of a window generates that window again: it belongs to the present
        step then, and the windows before it are over.
        """
        self._first, self._first_step = self.present, self._trainer.state.global_step

    @property
    def present(self) -> int:
        """The trainer's present window, counted from the start of the run."""
        return self._walk.window_of_batch(self._trainer.place.batches)

    @property
    def helps(self) -> bool:
        """Whether any window is requested before the trainer waits for it."""
        return self._staleness > 0 or self._walk.batches_per_window < self._walk.batches_per_step

    def policy_of(self, window: int) -> PolicyVersion:
        """Return the policy that a window is sampled from: the same after any restart."""
        steps_before = self._walk.steps_before
        first = _round_of(window, steps_before).start
        for _ in range(self._staleness):
            first = _round_of(max(0, first - 1), steps_before).start
        return PolicyVersion(self._timeline, max(self._since_step, steps_before(first)))

    def number_of(self, window: int, turn: int = 0) -> int:
        """Return the number, from 0, of a window's generate call among all calls of its step."""
        windows = self._round_of(window)
        return len(windows) * turn + window - windows.start

    def begins_round(self, window: int) -> bool:
        """Whether a window is the first of its step."""
        return self._round_of(window).start == window

    def calls(self, samples: int, sampling: dict[str, Any]) -> Iterator[Call]:
        """Yield the first generate call of each window whose policy exists, in the order of training.

        These are the present round's and those of the next `staleness` rounds, up to the last step.
        """
        window = self._round_of(self.present).start
        for _ in range(self._staleness + 1):
            windows = self._round_of(window)
            at = self._steps_before(window)
            if at >= self._trainer.state.max_steps:
                return
            for window in windows:
                version, number = PolicyVersion(self._timeline, at), self.number_of(window)
                yield Call(version, number, self.policy_of(window), self._prompts(window), samples, sampling)
            window = windows.stop

    def _round_of(self, window: int) -> range:
        """Return the windows that begin in the same step."""
        return _round_of(window, self._steps_before)

    def _steps_before(self, window: int) -> int:
        """Return how many steps are done when a window is generated."""
        steps = self._walk.steps_before(window)
        return steps if window < self._first else max(steps, self._first_step)

    def _prompts(self, window: int) -> list[Any]:
        """Return the prompts that TRL will ask for in a window."""
        trainer, replaced = self._trainer, self._trainer.replaced.at(self._walk.steps_before(window) + 1)
        rows = [replaced.get(row, row) for row in self._walk.rows_of(window)]
        return self._prompts_of([trainer.train_dataset[row] for row in rows])

    def _token_ids(self, rows: list[dict[str, Any]]) -> list[Any]:
        ids: list[Any] = self._trainer.tokenized([row["prompt"] for row in rows])
        return ids


def _round_of(window: int, steps_before: Callable[[int], int]) -> range:
    first = end = window
    while first > 0 and steps_before(first - 1) == steps_before(window):
        first -= 1
    while steps_before(end) == steps_before(window):
        end += 1
    return range(first, end)
