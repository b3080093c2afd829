"""What a rollout node's vLLM engine takes, and how many tokens its KV cache then holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from policies.model.spec import RunSpec
from policies.sizing.adapter import adapter_params
from policies.sizing.memory import EngineMemory, memory_of
from policies.sizing.shapes import Shape
from policies.sizing.training import lora_of
from policies.weights.adapters import engine_rank, why_whole
from policies.weights.dtypes import WIDTH, served_types

DEFAULT_UTILIZATION = 0.92  # vLLM 0.32's


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """How a run's engines serve.

    Attributes:
        gpus: of one engine, over which weights and KV cache are divided.
        weight_bytes, cache_bytes: of an element.
        utilization: the share of a GPU's memory that vLLM takes for itself.
        max_tokens: of a sequence, prompt and completion.
        adapter_bytes: of one adapter slot; 0 where weights are served whole.
    """

    gpus: int = 1
    weight_bytes: int = 2
    cache_bytes: int = 2
    utilization: float = DEFAULT_UTILIZATION
    max_tokens: int = 4096
    adapter_bytes: int = 0


def engine_of(spec: RunSpec, shape: Shape, config: Mapping[str, Any]) -> Engine:
    """Return how the run's engines serve. `config` is the model's config.json."""
    flags = {name.replace("_", "-"): value for name, value in spec.rollout.vllm.items() if value is not None}
    to = served_types(spec.rollout.vllm, config).to
    width = WIDTH[to or "BF16"]
    lora = lora_of(spec.trainer.peft, shape)
    travels = lora is not None and not why_whole(spec, config)
    slot = adapter_params(shape, lora) * width if travels and lora is not None else 0
    if slot and lora is not None:
        slot = slot * engine_rank(spec.trainer.peft or {}) // lora.rank
    return Engine(
        gpus=int(flags.get("tensor-parallel-size") or 1) * int(flags.get("pipeline-parallel-size") or 1),
        weight_bytes=width,
        cache_bytes=1 if "fp8" in str(flags.get("kv-cache-dtype")) else width,
        utilization=float(flags.get("gpu-memory-utilization") or DEFAULT_UTILIZATION),
        max_tokens=int(flags.get("max-model-len") or config.get("max_position_embeddings") or 4096),
        adapter_bytes=slot,
    )


def engine_memory(shape: Shape, engine: Engine, gpu_bytes: int) -> EngineMemory:
    """Return what one engine takes of GPUs of this size."""
    token = shape.layers * shape.cached * engine.cache_bytes // min(engine.gpus, shape.kv_heads)
    weights = shape.params * engine.weight_bytes // engine.gpus
    budget = int(engine.utilization * gpu_bytes) - weights - engine.adapter_bytes
    tokens = max(0, budget // token)
    parts = {"weights": weights, "adapter": engine.adapter_bytes, "KV cache": tokens * token}
    host = memory_of({"weights on their way": shape.params * engine.weight_bytes})
    return EngineMemory(memory_of(parts), host, token, tokens, tokens / engine.max_tokens)
