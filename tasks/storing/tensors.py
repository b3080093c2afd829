"""Tensors on the trainer: their types by name, those that nodes serve in, and tensors that are read one by one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch

from policies.weights.tensors import ServedTypes, served_types
from tasks.machine.base_model import tensors_in

log = structlog.get_logger()

# What torch's types are called in the header of a safetensors file.

# https://github.com/huggingface/safetensors
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
    """A model has a tensor of a type that cannot be stored."""


def type_name(name: str, dtype: torch.dtype) -> str:
    """The type of the tensor of that name. Raises UnsupportedType."""
    if dtype not in TYPES:
        known = ", ".join(str(one).removeprefix("torch.") for one in TYPES)
        raise UnsupportedType(f"trainer.model: {name} is of {dtype}; expected one of {known}")
    return TYPES[dtype]


# Tensors that are read one by one while they are stored: weights that are divided over processes, or that an
# adapter is merged into, are then never all in one memory.


@dataclass(frozen=True, slots=True)
class Unread:
    """A tensor that is not at hand yet. `read` returns it, and nobody changes it until all are read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def at_hand(tensor: torch.Tensor) -> Unread:
    """A tensor that need not be read."""
    return Unread(tensor.dtype, tuple(tensor.shape), lambda: tensor)


# What the nodes' engines hold weights in, from run.yaml and the base model's files on the trainer's machine.


def read_served_types(vllm: Mapping[str, Any], base_model: Path | None) -> ServedTypes:
    """The types in which to publish; each tensor's own where the base model's files are not at hand or unreadable.

    Args:
        vllm: the flags in run.yaml.
        base_model: the folder that training began from.
    """
    if base_model is None:
        return ServedTypes()
    try:
        config = json.loads((base_model / "config.json").read_bytes())
        return served_types(vllm, config, tensors_in(base_model))
    except (OSError, ValueError) as error:
        log.warning("weights_published_as_trained", folder=str(base_model), why=str(error))
        return ServedTypes()
