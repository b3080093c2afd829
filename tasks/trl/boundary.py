"""The state of this process at the end of an optimizer step, without weights, optimizer and scheduler.

Those change only in the optimizer's step. The rest of a checkpoint's content is kept here, so that a trainer that
must leave within a step can save the end of the step before.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy
import torch


@dataclass(frozen=True, slots=True)
class Boundary:
    """`step` and `buffered` are TRL's: its count of batches, and the rest of the generation window."""

    step: int
    buffered: list[dict[str, Any]] | None
    random: RandomState


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
