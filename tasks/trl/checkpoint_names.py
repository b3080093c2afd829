"""Weights as a model's own checkpoint has them: transformers holds some under other names or in other pieces."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from tasks.storing.tensors import Unread

Named = Mapping[str, torch.Tensor]
LAYER = re.compile(r"^(.*?\.\d+)\.")


def as_in_checkpoint(model: Any, named: Mapping[str, Unread]) -> dict[str, Unread]:
    """The weights under the names and in the pieces of the model's own checkpoint.

    Those that are another tensor there, as experts are that the model holds as one, are read a layer at a time and
    kept until one of another layer is read. Which they are is found out on tensors without content.
    """
    bare = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in named.items()}
    there = revert_weight_conversion(model, dict(bare))
    names = {id(one): name for name, one in bare.items()}
    found = {name: named[names[id(one)]] for name, one in there.items() if id(one) in names}
    made_anew = {name: one for name, one in there.items() if name not in found}
    used = {names[id(there[name])] for name in found}
    converted, reader = [name for name in bare if name not in used], _Reader(model)
    for sources, result in _together(model, {name: bare[name] for name in converted}, made_anew):
        group = {name: named[name] for name in sources}
        for name, one in result.items():
            found[name] = Unread(one.dtype, tuple(one.shape), functools.partial(reader.read, group, name))
    return found


def _together(model: Any, bare: Named, wanted: Named) -> list[tuple[Named, Named]]:
    """What has to be converted together, and what comes of it: by layers, or all if that gives something else."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, one in bare.items():
        layer = LAYER.match(name)
        layers.setdefault(layer[1] if layer else "", {})[name] = one
    results: list[tuple[Named, Named]] = [
        (layer, revert_weight_conversion(model, dict(layer))) for layer in layers.values()
    ]
    shapes = {name: one.shape for _, result in results for name, one in result.items()}
    if shapes == {name: one.shape for name, one in wanted.items()}:
        return results
    return [(bare, wanted)]


class _Reader:
    """Converts a group's tensors once, whichever of the results is asked for first."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._group: Mapping[str, Unread] = {}
        self._held: dict[str, torch.Tensor] = {}

    def read(self, group: Mapping[str, Unread], name: str) -> torch.Tensor:
        if group is not self._group:
            self._held = {}  # before the next ones are there
            self._group = group
            whole = {source: one.read() for source, one in group.items()}
            self._held = revert_weight_conversion(self._model, whole)
        return self._held[name]
