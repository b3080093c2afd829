"""What torch's types are called in the header of a safetensors file."""

from __future__ import annotations

import torch

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
