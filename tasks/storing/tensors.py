"""Tensors on the trainer: names of their types, the types that nodes serve in, and lazily read tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch

from grpo_orch.policies.weights.tensors import ServedTypes, served_types
from grpo_orch.tasks.machine.base_model import tensors_in

log = structlog.get_logger()

# Names of torch's types in the header of a safetensors file (https://github.com/huggingface/safetensors).
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


class UnsupportedType(Exception):
    """A tensor of the model has a type that cannot be stored."""


def type_name(name: str, dtype: torch.dtype) -> str:
    """Return the safetensors name of a tensor's type. Raises UnsupportedType.

    Args:
        name: the tensor's name, for the error.
    """
    if dtype not in TYPES:
        known = ", ".join(str(supported).removeprefix("torch.") for supported in TYPES)
        raise UnsupportedType(f"trainer.model: {name} has type {dtype}; expected one of {known}")
    return TYPES[dtype]


# Weights that are sharded over processes, or that an adapter is merged into, are read one by one while they are
# stored, so that they are never all in memory.


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that `read` loads on demand. It must not change until all tensors are read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> LazyTensor:
        """Wrap a tensor that is in memory already."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda: tensor)


def read_served_types(vllm: Mapping[str, Any], base_model: Path | None) -> ServedTypes:
    """Return the types to publish in, which the nodes' engines hold weights in.

    If the base model's files are missing or unreadable, tensors are published in their own types.

    Args:
        vllm: the flags in run.yaml.
        base_model: the folder of the model that training started from.
    """
    if base_model is None:
        return ServedTypes()
    try:
        config = json.loads((base_model / "config.json").read_bytes())
        return served_types(vllm, config, tensors_in(base_model))
    except (OSError, ValueError) as error:
        log.warning("weights_published_as_trained", folder=str(base_model), reason=str(error))
        return ServedTypes()
