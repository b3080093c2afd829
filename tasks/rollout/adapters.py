"""Adapters on a rollout node: whether they are what it gets, and a look at each one's files before vLLM's.

What vLLM is told of is small enough to be read whole here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from policies.model.spec import RunSpec
from policies.weights.adapters import (
    ADAPTER_BASE,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_mismatch,
    engine_rank,
)
from policies.weights.tensors import Tensor
from tasks.machine.base_model import identity_of, layout_of, tensors_of
from tasks.rollout.vllm.flags import base_folder

log = structlog.get_logger()

# By safetensors' names of types: as which integers numbers are read, and the bits that are all set in one that is
# infinite or NaN.
EXPONENTS = {
    "F64": (np.uint64, 0x7FF0 << 48),
    "F32": (np.uint32, 0x7F80 << 16),
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
}


class AdapterCheck:
    """Compares each adapter with the base model of the run."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._identity: str | None = None  # of the base model, once it is asked for

    def mismatch(self, folder: Path, base: Mapping[str, Tensor]) -> str:
        """Why the files in `folder` are no adapter for the base model, in a line; empty where they are.

        Args:
            base: the base model's tensors; empty where they are not known.

        Raises OSError, ValueError where they are not readable.
        """
        for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG, ADAPTER_BASE):
            if not (folder / name).is_file():
                return f"no adapter, which is what this run's nodes take: {name} is missing"
        config = _json_in(folder / ADAPTER_CONFIG)
        path = folder / ADAPTER_WEIGHTS
        theirs, ours = str(_json_in(folder / ADAPTER_BASE).get("identity", "")), self._base_identity()
        if theirs and ours and theirs != ours:
            return f"the adapter is for another base model, {theirs}; this node has {ours}"
        rank = engine_rank(self._spec.trainer.peft or {})
        if reason := adapter_mismatch(tensors_of(path), config, base, rank):
            return reason
        return next((f"not a number: {name} has such" for name in not_finite(path)), "")

    def _base_identity(self) -> str:
        """Empty where the model's files are not found."""
        if self._identity is None:
            folder = base_folder(self._spec)
            try:
                self._identity = "" if folder is None else identity_of(folder)
            except (OSError, ValueError) as error:
                log.warning("base_model_unreadable", folder=str(folder), why=str(error))
                self._identity = ""
        return self._identity


def not_finite(path: Path) -> list[str]:
    """The tensors of a safetensors file in which a number is infinite or NaN. Raises OSError, ValueError."""
    layout, content = layout_of(path), path.read_bytes()
    found = []
    for name, one in sorted(layout.items()):
        kind, exponent = EXPONENTS[one.dtype]
        numbers = np.frombuffer(content[one.begin : one.begin + one.size_bytes], kind)
        if np.any((numbers & kind(exponent)) == kind(exponent)):
            found.append(name)
    return found


def _json_in(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is no mapping")  # noqa: TRY004  # a damaged file, not a wrong argument
    return found
