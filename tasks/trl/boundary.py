"""The state of this process between two optimizer steps, as far as a step in progress changes it.

Weights, optimizer and scheduler change in the optimizer's step alone. What else a checkpoint holds is kept here,
so that a trainer which has to leave in the middle of a step can save the end of the one before.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy
import torch


@dataclass(frozen=True, slots=True)
class Boundary:
    """`step` and `buffered` are TRL's: its count of batches, and what is left of the generation window."""

    step: int
    buffered: list[dict[str, Any]] | None
    random: RandomState


@dataclass(frozen=True, slots=True)
class RandomState:
    """Every generator that transformers saves with a checkpoint, on CPU and CUDA."""

    python: tuple[Any, ...]
    numpy: dict[str, Any] | tuple[Any, ...]
    cpu: torch.Tensor
    cuda: list[torch.Tensor]

    @classmethod
    def now(cls) -> RandomState:
        """As it is in this process."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return cls(random.getstate(), numpy.random.get_state(), torch.random.get_rng_state(), cuda)

    def put_back(self) -> None:
        """Make it so again."""
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        torch.random.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
