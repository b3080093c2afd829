"""Weights as bytes, of whatever types, and a publisher's file of them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from grpo_orch.checkpoint.weights import safetensors, scratch
from grpo_orch.checkpoint.weights.safetensors import Bytes
from grpo_orch.checkpoint.weights.scratch import Tensor, Written

ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I8": 1}
Weights = dict[str, tuple[str, bytes]]  # type and bytes of one dimension, by name

POOL = ThreadPoolExecutor(3, thread_name_prefix="weights")


def tensor(dtype: str, content: bytes) -> Tensor:
    shape = (len(content) // ITEM_BYTES[dtype],)
    return Tensor(dtype, shape, len(content), lambda: np.frombuffer(content, np.uint8))


def rewrite(path: Path, weights: Weights, base: str, delta: Path) -> Written:
    return scratch.rewrite(path, {name: tensor(*one) for name, one in weights.items()}, base, delta, POOL)


def content(path: Path) -> dict[str, bytes]:
    """Each tensor's bytes."""
    data = path.read_bytes()
    layout = safetensors.layout_of(path)
    return {name: data[one.begin : one.begin + one.size_bytes] for name, one in layout.items()}


def bytes_of(weights: Mapping[str, tuple[str, bytes]]) -> dict[str, bytes]:
    return {name: data for name, (_, data) in weights.items()}


def digest_of(path: Path) -> str:
    return safetensors.content_of(path, POOL)


def array(*values: float, dtype: str = "<f4") -> Bytes:
    return np.array(values, dtype).view(np.uint8)
