"""Leaves a machine in time: between two steps, or within one step with the state from before it."""

from __future__ import annotations

from typing import Any

from accelerate.utils import broadcast_object_list

from grpo_orch.tasks.machine.leaving import LeaveNow, Leaving
from grpo_orch.tasks.storing.saving import CheckpointSaver
from grpo_orch.tasks.storing.step_costs import StepCosts
from grpo_orch.tasks.trl.boundary import Boundary, RandomState


class LeavesInTime:
    """Mixed in before SavesIntoSpool and TRL's trainer."""

    _boundary: Boundary | None = None  # the end of the last step that this process has taken
    _checkpoints: CheckpointSaver | None
    _leaving: Leaving | None
    _leaves: bool
    _costs: StepCosts
    _step: int
    _buffered_inputs: Any
    _rest_of_window: Any
    _save_checkpoint: Any
    accelerator: Any
    args: Any
    model: Any
    state: Any

    def leave_if_due(self, *, in_step: bool) -> None:
        """Raise LeaveNow in every process if the first one has to leave."""
        due = self._leaving is not None and self._leaving.is_due(in_step=in_step)
        if self._agree(due):
            raise LeaveNow

    def save_before_leaving(self) -> int | None:
        """Save the end of the last step, unless it is stored already or not worth it. Call it in every process.

        Returns, in the first process, the step of the newest checkpoint that is stored or on its way to the store,
        if any.
        """
        checkpoints, leaving, step = self._checkpoints, self._leaving, self.state.global_step
        wanted = (
            checkpoints is not None
            and leaving is not None
            and step > checkpoints.sealed_step
            and leaving.is_worth_storing()
        )
        if self._agree(wanted) and self._boundary is not None:
            self._boundary.random.put_back()
            self._step, self._buffered_inputs = self._boundary.step, self._boundary.buffered
            self._leaves = True
            self._save_checkpoint(self.model, trial=None)
        return None if checkpoints is None else checkpoints.sealed_step or None

    def _agree(self, value: bool) -> bool:
        """Return the first process's value."""
        return bool(broadcast_object_list([value])[0]) if self.accelerator.num_processes > 1 else value

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """End a step, and leave if there may be no time for another."""
        self._boundary = Boundary(self._step, self._rest_of_window(), RandomState.now())
        if self._leaving is not None:
            self._leaving.step_ended(self._costs.generated_s)
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]  # the trainer's
        if self.state.global_step < self.state.max_steps:
            self.leave_if_due(in_step=False)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as TRL does, and restore the random state: an evaluation, complete or not, must not change the
        steps after it."""
        state = RandomState.now()
        try:
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]  # the trainer's
        finally:
            state.put_back()
