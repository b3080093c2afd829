"""What an engine takes, and what its cache holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpo_orch.policies.model.spec import Dataset, RolloutSpec, RunSpec, TrainerSpec
from grpo_orch.policies.sizing.engine import Engine, engine_memory, engine_of, whole_number
from grpo_orch.policies.sizing.memory import GIB
from grpo_orch.policies.sizing.shapes import shape_of
from grpo_orch.policies.sizing.training import Lora, adapter_params
from tests.generators import model_configs as known

SEVEN, LARGE = shape_of(known.QWEN_2_5_7B), shape_of(known.QWEN_2_5_32B)


def of(vllm: dict[str, Any], **trainer: Any) -> Engine:
    made = TrainerSpec(model="m", dataset=Dataset(path="d"), reward_funcs=(), **trainer)
    spec = RunSpec(name="r", storage="file:///s", trainer=made, grpo={}, rollout=RolloutSpec(vllm=vllm))
    return engine_of(spec, SEVEN, known.QWEN_2_5_7B)


def test_remaining_memory_is_the_caches() -> None:
    engine = Engine(utilization=0.85, max_tokens=4096)
    got = engine_memory(LARGE, engine, 141 * GIB)
    assert got.gpu.total_bytes == int(0.85 * 141 * GIB)
    assert got.gpu.parts["weights"] == 2 * LARGE.params
    assert got.sequences * 4096 * got.token_bytes == pytest.approx(got.gpu.parts["KV cache"])
    assert got.tokens == int(got.sequences * 4096)


def test_lack_of_memory_is_reported_and_not_negative() -> None:
    got = engine_memory(LARGE, Engine(), 48 * GIB)
    assert (got.tokens, got.sequences) == (0, 0)
    assert got.gpu.total_bytes > 48 * GIB


def test_window_bounds_the_cache_of_its_layers() -> None:
    windowed = replace(LARGE, window=1024, windowed_layers=LARGE.layers // 2)
    engine = Engine(max_tokens=32_768)
    longer, all_ = (engine_memory(one, engine, 141 * GIB).sequences for one in (windowed, LARGE))
    assert longer / all_ == pytest.approx(1 / (0.5 + 0.5 * 1040 / 32_768))


def test_flags_as_run_yaml_has_them() -> None:
    got = of(
        {
            "tensor-parallel-size": 2,
            "gpu-memory-utilization": 0.8,
            "max-model-len": 2048,
            "kv-cache-dtype": "fp8",
            "max-num-seqs": 64,
            "max-num-batched-tokens": 4096,
            "enforce-eager": True,
        }
    )
    assert (got.gpus, got.utilization, got.max_tokens, got.cache_bytes) == (2, 0.8, 2048, 1)
    assert (got.batch_sequences, got.batch_tokens, got.graphs) == (64, 4096, False)
    assert of({"dtype": "float32"}).weight_bytes == 4
    assert of({}).max_tokens == 32_768


@pytest.mark.parametrize(
    ("flags", "width"),
    [
        ({}, 2),
        ({"dtype": "float32"}, 4),
        ({"dtype": "float32", "kv-cache-dtype": "bfloat16"}, 2),
        ({"dtype": "float32", "kv-cache-dtype": "fp8_e5m2"}, 1),
        ({"kv-cache-dtype": "auto"}, 2),
    ],
)
def test_how_wide_the_cache_is(flags: dict[str, Any], width: int) -> None:
    assert of(flags).cache_bytes == width


@pytest.mark.parametrize(
    ("said", "number"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("25.6k", 25_600),
        ("2G", 2**31),
        ("auto", 0),
        (-1, 0),
        (None, 0),
        ("4.5K", 0),
    ],
)
def test_numbers_as_vllm_reads_them(said: object, number: int) -> None:
    assert whole_number(said) == number
    assert of({"max-model-len": said}).max_tokens == (number or 32_768)


def test_a_cache_that_run_yaml_names_is_that_large() -> None:
    got = engine_memory(SEVEN, of({"kv-cache-memory-bytes": 64 << 20, "max-model-len": 256}), 24 * GIB)
    assert got.gpu.parts["KV cache"] == 64 << 20
    assert got.tokens == (64 << 20) // 57_344


def test_room_for_an_adapter_is_of_the_rank_that_vllm_has() -> None:
    named = ["q_proj", "v_proj"]
    room = of({}, peft={"r": 20, "target_modules": named}).adapter_params
    assert room == adapter_params(SEVEN, Lora(32, frozenset(named)))
    assert of({}).adapter_params == 0
    assert of({"enable-lora": False}, peft={"r": 20, "target_modules": named}).adapter_params == 0
