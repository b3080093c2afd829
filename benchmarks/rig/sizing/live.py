"""Counts the bytes of the tensors that are alive, each storage once, whether they are real or fake."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class LiveBytes(TorchDispatchMode):
    """Counts within its context.

    What an operator allocates and frees by itself is not seen, nor is what an allocator rounds up.

    Attributes:
        phase: named by whoever uses it.
        now: bytes at present.
        peaks: the most, by phase.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.now = 0
        self.peaks: Counter[str] = Counter()
        self._alive: dict[int, weakref.ref[Any]] = {}

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._see, found)
        return found

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size_bytes = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def gone(_: Any) -> None:
            del self._alive[key]
            self.now -= size_bytes

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size_bytes
        self.peaks[self.phase] = max(self.peaks[self.phase], self.now)
