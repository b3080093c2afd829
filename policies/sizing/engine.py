"""The memory of a rollout node's vLLM engine, and how many tokens its KV cache holds.

vLLM 0.32 takes a share of each GPU, profiles its largest batch, and gives the rest to the KV cache
(`v1/worker/gpu_worker.py`, `determine_available_memory`). Weights and cache are exact, the profiled batch is an
upper bound, and CUDA graphs are an assumption.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_orch.policies.model.gpus import engine_gpus
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.sizing.memory import CUDA_BYTES, GIB, EngineMemory, memory_of
from grpo_orch.policies.sizing.shapes import Shape
from grpo_orch.policies.sizing.training import adapter_params, lora_of
from grpo_orch.policies.weights.adapters import ALL_LINEAR, adapter_obstacle, engine_rank
from grpo_orch.policies.weights.tensors import NAMED, WIDTH, served_types

DEFAULT_UTILIZATION = 0.92  # vLLM 0.32's
BLOCK_TOKENS = 16  # of its cache
DEFAULT_LENGTH = 4096  # if neither run.yaml nor config.json has one
# Minimum GPU memory, with the default numbers of tokens and sequences in a batch (`engine/arg_utils.py`).
BATCHES = ((160 * GIB, 16_384, 1024), (70 * GIB, 8192, 1024), (0, 2048, 256))
# Bytes for each word and sequence: logits in two bytes, in float32, sorted with indices, log-probabilities.
SAMPLING_BYTES = 2 + 4 + 4 + 8 + 4
GRAPHS_BYTES = GIB  # an assumption


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The settings of a run's engines.

    Attributes:
        gpus: of one engine, over which weights and KV cache are divided.
        weight_bytes, cache_bytes: of an element.
        utilization: the share of a GPU's memory that vLLM takes.
        cache_total_bytes: of a GPU's KV cache, if set in run.yaml; replaces the share.
        max_tokens: of a sequence, prompt and completion.
        batch_tokens, batch_sequences: in a batch; 0: vLLM's default for the GPU.
        adapter_params: reserved for one adapter; 0 if weights are served whole.
    """

    gpus: int = 1
    weight_bytes: int = 2
    cache_bytes: int = 2
    utilization: float = DEFAULT_UTILIZATION
    cache_total_bytes: int | None = None
    max_tokens: int = DEFAULT_LENGTH
    batch_tokens: int = 0
    batch_sequences: int = 0
    adapter_params: int = 0
    graphs: bool = True


def engine_of(spec: RunSpec, shape: Shape, config: Mapping[str, Any]) -> Engine:
    """Return the settings of the run's engines. `config` is the model's config.json."""
    flags = spec.rollout.vllm
    text = config.get("text_config") or {}
    longest = config.get("max_position_embeddings") or text.get("max_position_embeddings") or DEFAULT_LENGTH
    width = WIDTH[served_types(spec.rollout.vllm, config).to or "BF16"]
    cache_total = flags.get("kv-cache-memory-bytes")
    return Engine(
        gpus=engine_gpus(flags),
        weight_bytes=width,
        cache_bytes=_cache_width(str(flags.get("kv-cache-dtype")), width),
        utilization=float(flags.get("gpu-memory-utilization") or DEFAULT_UTILIZATION),
        cache_total_bytes=whole_number(cache_total) or None,
        max_tokens=whole_number(flags.get("max-model-len")) or int(longest),
        batch_tokens=whole_number(flags.get("max-num-batched-tokens")),
        batch_sequences=whole_number(flags.get("max-num-seqs")),
        adapter_params=_adapter_reserve(spec, shape, config),
        graphs=not flags.get("enforce-eager"),
    )


def engine_memory(shape: Shape, engine: Engine, gpu_bytes: int) -> EngineMemory:
    """Return an engine's memory on GPUs of this size."""
    weights = shape.params * engine.weight_bytes // engine.gpus
    others = {
        "weights": weights,
        "adapter": engine.adapter_params * engine.weight_bytes,
        "activations": _profile_bytes(shape, engine, gpu_bytes),
        "CUDA": CUDA_BYTES + (GRAPHS_BYTES if engine.graphs else 0),
    }
    cache = engine.cache_total_bytes
    if cache is None:
        cache = max(0, int(engine.utilization * gpu_bytes) - sum(others.values()))
    sequences = cache / _sequence_bytes(shape, engine)
    return EngineMemory(
        gpu=memory_of({**others, "KV cache": cache}, "serving"),
        token_bytes=_token_bytes(shape, engine),
        tokens=int(sequences * engine.max_tokens),
        sequences=sequences,
    )


def _token_bytes(shape: Shape, engine: Engine) -> int:
    """Return the bytes of a token in one GPU's cache.

    Heads are divided over the GPUs, at least one on each (`v1/kv_cache_interface.py`).
    """
    return shape.layers * math.ceil(shape.cached / min(engine.gpus, shape.kv_heads)) * engine.cache_bytes


def _sequence_bytes(shape: Shape, engine: Engine) -> int:
    """Return the bytes of the longest sequence, in whole blocks. Sliding-window layers keep only their window."""
    blocks = math.ceil(engine.max_tokens / BLOCK_TOKENS)
    layer_bytes = _token_bytes(shape, engine) // shape.layers * BLOCK_TOKENS
    window_blocks = min(blocks, math.ceil((shape.window or 0) / BLOCK_TOKENS) + 1)
    full_blocks = (shape.layers - shape.windowed_layers) * blocks
    return layer_bytes * (full_blocks + shape.windowed_layers * window_blocks)


def _profile_bytes(shape: Shape, engine: Engine, gpu_bytes: int) -> int:
    """Return the bytes of the largest batch's pass, or of sampling for the most sequences, whichever is larger."""
    tokens, sequences = next((tokens, count) for size, tokens, count in BATCHES if gpu_bytes >= size)
    tokens, sequences = engine.batch_tokens or tokens, engine.batch_sequences or sequences
    inner = shape.mlp_width
    if shape.experts is not None:
        inner = max(inner, shape.experts.chosen * shape.experts.width)
    layer = tokens * (3 * inner // engine.gpus + 4 * shape.hidden) * engine.weight_bytes
    return max(layer, min(tokens, sequences) * shape.vocab * SAMPLING_BYTES)


def _adapter_reserve(spec: RunSpec, shape: Shape, config: Mapping[str, Any]) -> int:
    """Return the elements that vLLM reserves for one adapter of the smallest sufficient rank.

    On all layers if none are named. Parts that vLLM divides over GPUs are counted on each.
    """
    peft = spec.trainer.peft
    if peft is None or adapter_obstacle(spec, config):
        return 0
    modules = peft.get("target_modules") or ALL_LINEAR
    lora = lora_of({**peft, "target_modules": modules, "r": engine_rank(peft)}, shape)
    return 0 if lora is None else adapter_params(shape, lora)


def _cache_width(dtype: str, model_width: int) -> int:
    """Return the bytes of an element of the cache; `model_width` by default."""
    return 1 if "fp8" in dtype else WIDTH[NAMED[dtype]] if dtype in NAMED else model_width


def whole_number(value: object) -> int:
    """Return a flag's whole number as vLLM reads it (0.32, `human_readable_int`).

    `4k` is 4,000 and `4K` is 4,096. 0 without a number, as for -1 and `auto`.
    """
    if isinstance(value, int):
        return max(0, value)
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)|(\d+)([KMGT])", str(value).strip())
    if found is None:
        return 0
    decimal, thousands, binary, powers = found.groups()
    if binary is not None:
        return int(binary) << 10 * (1 + "KMGT".index(powers))
    return int(float(decimal) * 10.0 ** (3 * (1 + "kmgt".index(thousands)) if thousands else 0))


# Whether a prompt and a completion of full length fit into the model's context, and into vLLM's.

MAX_MODEL_LEN = "max-model-len"
# With these vLLM uses another length than config.json's (0.32, `_get_and_verify_max_len`).
REPLACED_BY = ("config-format", "hf-config-path", "hf-overrides", "rope-scaling")
OF_MODEL = "its max_position_embeddings"
ALLOWED_BY = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
# RoPE scalings included in max_position_embeddings; for any other vLLM multiplies it by a factor.
COUNTED = frozenset({"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"})


def context_problem(
    flags: Mapping[str, Any], env: Mapping[str, str], completion: int, config: Mapping[str, Any]
) -> tuple[tuple[str, ...], str] | None:
    """Return the key of run.yaml and the reason why every prompt would be refused; None if some may fit.

    The lengths of prompts depend on the tokenizer and are not checked here.

    Args:
        flags: vLLM's, of `rollout.vllm`; empty if the trainer generates itself.
        env: `rollout.env`.
        completion: `grpo.max_completion_length`.
        config: the model's config.json; empty if unknown.
    """
    positions, max_model_len = _positions(config), whole_number(flags.get(MAX_MODEL_LEN))
    if any(flags.get(name) for name in REPLACED_BY):
        positions = None
    key = ("rollout", "vllm", MAX_MODEL_LEN)
    if max_model_len and max_model_len <= completion:
        message = f"{max_model_len} leaves no room for a prompt: grpo.max_completion_length is {completion}"
        return key, f"{message}; expected more than that"
    if positions is None:
        return None
    allowed = max(positions, whole_number(config.get("model_max_length")))  # vLLM's limit
    if max_model_len > allowed and env.get(ALLOWED_BY, "0") == "0":
        message = f"{max_model_len} exceeds the model's context, and vLLM does not start"
        return key, f"{message}; expected at most {positions}, {OF_MODEL}"
    if not max_model_len and positions <= completion:
        message = f"{completion} leaves no room for a prompt in the model's context"
        return ("grpo", "max_completion_length"), f"{message}; expected less than {positions}, {OF_MODEL}"
    return None


def _positions(config: Mapping[str, Any]) -> int | None:
    """Return the model's context in tokens; None if config.json does not define it."""
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    scaling = text.get("rope_parameters") or text.get("rope_scaling")
    if isinstance(scaling, Mapping):  # of the model, or of each type of layer
        parts = [scaling, *(part for part in scaling.values() if isinstance(part, Mapping))]
        if any(
            part.get("factor") and (part.get("rope_type") or part.get("type")) not in COUNTED for part in parts
        ):
            return None
    found = text.get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else None
