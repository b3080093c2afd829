"""Converts weights to the names and pieces of a model's own checkpoint, where transformers' differ."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from grpo_orch.tasks.storing.tensors import LazyTensor

Named = Mapping[str, torch.Tensor]
LAYER = re.compile(r"^(.*?\.\d+)\.")


def as_in_checkpoint(model: Any, named: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return weights under the names and in the pieces of the model's own checkpoint.

    Some are other tensors there, as experts that the model holds as one tensor. They are converted a layer at a
    time, and kept until a tensor of another layer is read. A conversion of empty tensors shows which they are.
    """
    empty = {name: torch.empty(weight.shape, dtype=weight.dtype, device="meta") for name, weight in named.items()}
    stored = revert_weight_conversion(model, dict(empty))
    names = {id(tensor): name for name, tensor in empty.items()}
    found = {name: named[names[id(tensor)]] for name, tensor in stored.items() if id(tensor) in names}
    converted = {name: tensor for name, tensor in stored.items() if name not in found}
    kept = {names[id(stored[name])] for name in found}
    sources, reader = {name: tensor for name, tensor in empty.items() if name not in kept}, _Reader(model)
    for group, result in _groups(model, sources, converted):
        lazy = {name: named[name] for name in group}
        for name, tensor in result.items():
            found[name] = LazyTensor(tensor.dtype, tuple(tensor.shape), functools.partial(reader.read, lazy, name))
    return found


def _groups(model: Any, empty: Named, converted: Named) -> list[tuple[Named, Named]]:
    """Return which tensors are converted together, and the results: by layer, or all if layers give others."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in empty.items():
        layer = LAYER.match(name)
        layers.setdefault(layer[1] if layer else "", {})[name] = tensor
    results: list[tuple[Named, Named]] = [
        (layer, revert_weight_conversion(model, dict(layer))) for layer in layers.values()
    ]
    shapes = {name: tensor.shape for _, result in results for name, tensor in result.items()}
    if shapes == {name: tensor.shape for name, tensor in converted.items()}:
        return results
    return [(empty, converted)]


class _Reader:
    """Converts a group's tensors at the first read of any result, and keeps them until another group is read."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._group: Mapping[str, LazyTensor] = {}
        self._held: dict[str, torch.Tensor] = {}

    def read(self, group: Mapping[str, LazyTensor], name: str) -> torch.Tensor:
        if group is not self._group:
            self._held = {}  # free memory before the next group is read
            self._group = group
            whole = {source: weight.read() for source, weight in group.items()}
            self._held = revert_weight_conversion(self._model, whole)
        return self._held[name]
