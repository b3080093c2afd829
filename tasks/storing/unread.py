"""Tensors that are read one by one while they are stored: weights that are divided over processes, or that an
adapter is merged into, are then never all in one memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Unread:
    """A tensor that is not at hand yet. `read` returns it, and nobody changes it until all are read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def at_hand(tensor: torch.Tensor) -> Unread:
    """A tensor that need not be read."""
    return Unread(tensor.dtype, tuple(tensor.shape), lambda: tensor)
