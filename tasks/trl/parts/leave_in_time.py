"""Leave a machine in time: between two steps, or within one step with the state from before it.

Weights, optimizer and scheduler change only in the optimizer's step. The rest of a checkpoint's content is kept at
the end of each step, so that a trainer that must leave within a step can save the end of the step before.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from accelerate.utils import broadcast_object_list

from grpo_orch.tasks.machine.leaving import LeaveNow
from grpo_orch.tasks.storing.step_costs import StepCosts
from grpo_orch.tasks.trl.parts.checkpointing import Place, Saving


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of every random generator that transformers saves in a checkpoint, on CPU and CUDA."""

    python: tuple[Any, ...]
    numpy: dict[str, Any] | tuple[Any, ...]
    cpu: torch.Tensor
    cuda: list[torch.Tensor]

    @classmethod
    def now(cls) -> RandomState:
        """Return the present state of this process."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return cls(random.getstate(), numpy.random.get_state(), torch.random.get_rng_state(), cuda)

    def put_back(self) -> None:
        """Restore it."""
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        torch.random.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the random state at the end, also after an error."""
    state = RandomState.now()
    try:
        yield
    finally:
        state.put_back()


class Departure:
    """When the trainer leaves, and with which state. All processes leave together.

    Attributes:
        has_begun: whether the next save is the last.
    """

    def __init__(self, accelerator: Any, costs: StepCosts, saving: Saving) -> None:
        self._accelerator, self._costs, self._saving = accelerator, costs, saving
        self._boundary: tuple[Place, RandomState] | None = None  # at the end of this process's last step
        self.has_begun = False

    def check(self, *, in_step: bool) -> None:
        """Raise LeaveNow in every process if the first one has to leave."""
        leaving = self._saving.leaving
        if self._agree(leaving is not None and leaving.is_due(in_step=in_step)):
            raise LeaveNow

    def note_step(self, place: Place) -> None:
        """Keep the state at the end of a step."""
        self._boundary = place, RandomState.now()
        if self._saving.leaving is not None:
            self._saving.leaving.step_ended(self._costs.generated_s)

    def begin(self, step: int) -> Place | None:
        """Return to the end of the last step, and return its place if it has to be saved.

        None if the step is stored already or not worth it. Call it in every process.
        """
        checkpoints, leaving = self._saving.checkpoints, self._saving.leaving
        wanted = (
            checkpoints is not None
            and leaving is not None
            and step > checkpoints.sealed_step
            and leaving.is_worth_storing()
        )
        if not self._agree(wanted) or self._boundary is None:
            return None
        place, random_state = self._boundary
        random_state.put_back()
        self.has_begun = True
        return place

    def _agree(self, value: bool) -> bool:
        """Return the first process's value."""
        return bool(broadcast_object_list([value])[0]) if self._accelerator.num_processes > 1 else value
