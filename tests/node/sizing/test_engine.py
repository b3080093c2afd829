"""A token's KV cache against vLLM's own count of a block's bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from grpo_orch.policies.sizing.engine import BLOCK_TOKENS, Engine, engine_memory
from grpo_orch.policies.sizing.memory import GIB
from grpo_orch.policies.sizing.shapes import shape_of
from tests.generators import model_configs as known


@pytest.mark.parametrize("config", [known.QWEN_2_5_32B, known.LLAMA_3_2_1B, known.QWEN_3_30B_A3B])
@pytest.mark.parametrize("gpus", [1, 2, 8])  # more than heads: one head on each
def test_kv_block_size_is_vllms(config: dict[str, Any], gpus: int) -> None:
    shape = shape_of(config)
    block: dict[str, Any] = {"block_size": BLOCK_TOKENS, "dtype": torch.bfloat16}
    spec = FullAttentionSpec(**block, num_kv_heads=max(1, shape.kv_heads // gpus), head_size=shape.head_dim)
    planned = engine_memory(shape, Engine(gpus=gpus), 80 * GIB)
    assert planned.token_bytes * BLOCK_TOKENS == shape.layers * spec.page_size_bytes
