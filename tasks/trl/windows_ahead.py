"""Which generation windows are requested while the trainer works, and of which policies (`rollout.max_staleness`).

A window is what TRL generates for at once. With a staleness of s, window w is sampled from the policy that the
trainer has when it begins window w - s; the first windows of a timeline from the policy it starts with. So the
content of a window follows from seed, data and policies, and never from timing: a restarted trainer requests the
same, or reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from policies.model.vocabulary import PolicyVersion
from tasks.completions.rollout_source import Call
from tasks.trl.skipped_prompts import walk_of


class WindowsAhead:
    """The windows of one trainer.

    Args:
        trainer: TRL's.
        timeline: that it trains.
        since_step: of its first policy on this timeline.
        staleness: how many windows a policy may be older than the one that is trained on it.
    """

    def __init__(self, trainer: Any, timeline: int, since_step: int, staleness: int) -> None:
        self._trainer, self._timeline = trainer, timeline
        self._since_step, self._staleness = since_step, staleness
        self._walk = walk_of(trainer.args, len(trainer.train_dataset))
        self._rows_of = functools.lru_cache(4 * (staleness + 1))(self._walk.rows_of)

    @property
    def present(self) -> int:
        """The window that the trainer is in, counted from the start of the run."""
        return self._walk.window_of_batch(self._trainer._step)

    def policy_of(self, window: int) -> PolicyVersion:
        """The policy that a window is sampled from."""
        before = window - self._staleness
        step = self._walk.steps_before(before) if before > 0 else 0
        return PolicyVersion(self._timeline, max(self._since_step, step))

    def calls(self, samples: int, sampling: dict[str, Any]) -> Iterator[Call]:
        """The first generate call of the present window, and of those whose policies are there by now.

        Those that begin after the last step are left out.
        """
        present, state = self.present, self._trainer.state
        for window in range(present, present + self._staleness + 1):
            step = max(state.global_step, self._walk.steps_before(window))
            number = self._begun_in(step, window)
            if step >= state.max_steps:
                return
            if number and self._trainer.tools:
                continue  # how many calls the window before it makes is not known yet
            at = PolicyVersion(self._timeline, step)
            yield Call(at, number, self.policy_of(window), self._prompts(window), samples, sampling)

    def _begun_in(self, step: int, window: int) -> int:
        """How many windows before this one begin in the same step."""
        first = window
        while first > 0 and self._walk.steps_before(first - 1) == step:
            first -= 1
        return window - first

    def _prompts(self, window: int) -> list[list[int]]:
        """The prompts of a window as TRL will ask for them: token ids, one list a prompt."""
        trainer, other = self._trainer, self._trainer._replaced.at(self._walk.steps_before(window) + 1)
        rows = [other.get(row, row) for row in self._rows_of(window)]
        prompts = [trainer.train_dataset[row]["prompt"] for row in rows]
        return [list(ids) for ids in trainer._tokenize_prompts(prompts)[0]]
