"""Decide whether a run publishes its LoRA adapter alone, for the nodes' engines to apply, or merged whole weights.

One rule for all: `validate` prints its reason, the trainer publishes by it, and the nodes start vLLM by it. It
depends only on the run's specification and the model's config.json, which are the same everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from grpo_orch.policies.model.spec import RunSpec, deepspeed_file, model_settings, shards_weights
from grpo_orch.policies.weights.tensors import FLOATS, NAMED, Tensor, served_types

ADAPTER_WEIGHTS = "adapter_model.safetensors"  # PEFT's names
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_BASE = "base.json"  # the model that it is for
BASE_MODEL = "base"  # the name under which an engine with adapters serves its base weights, only to its agent
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's --max-lora-rank (0.32: `vllm.config.lora`)
DEFAULT_RANK = 8  # PEFT's
ALL_LINEAR = "all-linear"  # PEFT's name for every linear layer except the head

# LoraConfig keys with which saved tensors, rank and alpha define the adapter completely (vLLM 0.32:
# `vllm.lora.peft_helper`). Any other key changes the trained function, or the base weights.
PLAIN_KEYS = frozenset(
    {
        "r",
        "lora_alpha",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "lora_dropout",
        "fan_in_fan_out",
        "task_type",
        "revision",
        "megatron_core",
        "qalora_group_size",
    }
)
PLAIN_INITS = (True, False, "gaussian", "orthogonal")  # others change the base weights at the start, or may
EMBEDDINGS = frozenset({"lm_head", "embed_tokens", "embed_out", "embed_in", "wte", "word_embeddings"})
QUANTISED = "a quantised model cannot be published to rollout nodes"
QUANTISED_WORDS = ("quantization_config", "load_in_4bit", "load_in_8bit")
ONE_MODEL_EACH = frozenset({"NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU", "MULTI_HPU", "DEEPSPEED"})
# Without named targets, vLLM prepares all layers for adapters: also the head, which it supports up to this
# vocabulary (0.32: `vllm.lora.layers.logits_processor`), and experts, at many times the adapter's size.
VOCABULARY_MAX = 258_048
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# With these in config.json, vision or audio layers exist to which vLLM applies no adapter, and a `text_config` may
# omit defaults, such as the size of its vocabulary.
OTHER_PARTS = ("text_config", "vision_config", "audio_config")
# Generative models that vLLM 0.32 serves without adapters; a test compares the list with its sources.
WITHOUT_ADAPTERS = frozenset(
    {
        "BailingMoeV2_5ForCausalLM",
        "BailingMoeV3ForCausalLM",
        "BloomForCausalLM",
        "Cohere2MoeForCausalLM",
        "DbrxForCausalLM",
        "DeepseekV32ForCausalLM",
        "DeepseekV4ForCausalLM",
        "FalconForCausalLM",
        "FalconMambaForCausalLM",
        "GPT2LMHeadModel",
        "GPTJForCausalLM",
        "Gemma3nForCausalLM",
        "Glm5NextForCausalLM",
        "HCXVisionV2ForCausalLM",
        "HYV4ForCausalLM",
        "HrmTextForCausalLM",
        "IQuestLoopCoderForCausalLM",
        "InklingForCausalLM",
        "InklingForConditionalGeneration",
        "KimiLinearForCausalLM",
        "Mamba2ForCausalLM",
        "MambaForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "MiniMaxM3SparseForCausalLM",
        "OrionForCausalLM",
        "Qwen4ExpForCausalLM",
        "StableLmForCausalLM",
        "Step1ForCausalLM",
        "Step3TextForCausalLM",
        "Step3p5ForCausalLM",
        "Zamba2ForCausalLM",
    }
)


def adapter_obstacle(spec: RunSpec, config: Mapping[str, Any]) -> str:
    """Return why policies are published whole, as a clause that names the key; empty if adapters are published.

    Args:
        config: the model's config.json as in the file, since transformers adds defaults and removes entries. Empty
            if unavailable.
    """
    peft = spec.trainer.peft
    if peft is None:
        return "no adapter is trained"
    return _not_plain(peft) or _no_single_model(spec) or _no_such_engine(spec, peft, config)


def engine_flags(spec: RunSpec) -> dict[str, Any]:
    """Return the flags of `vllm serve` for an engine that serves this run's adapters, one at a time."""
    peft = spec.trainer.peft or {}
    flags: dict[str, Any] = {
        "enable-lora": True,
        "max-loras": 1,
        "max-cpu-loras": 1,
        "max-lora-rank": engine_rank(peft),
    }
    named = _named_targets(peft)
    if named is not None:
        flags["lora-target-modules"] = named
    return {**flags, "served-model-name": BASE_MODEL}


def engine_type(spec: RunSpec, config: Mapping[str, Any]) -> str | None:
    """Return the type, by safetensors' name, to which engines round an adapter's matrices; None if uncertain.

    It is the model's own unless `lora-dtype` is set (`vllm/config/lora.py`).

    Args:
        config: the base model's config.json.
    """
    flags = {name.replace("_", "-"): value for name, value in spec.rollout.vllm.items()}
    dtype = str(flags.get("lora-dtype") or "auto").lower()
    return served_types(flags, config).to if dtype == "auto" else NAMED.get(dtype)


def engine_rank(peft: Mapping[str, Any]) -> int:
    """Return the smallest rank supported by vLLM that covers this LoraConfig; 0 if none does."""
    return next((rank for rank in RANKS if rank >= _largest_rank(peft)), 0)


def _not_plain(peft: Mapping[str, Any]) -> str:
    """Return why the adapter is more than two matrices a layer and an unchanged base model; empty if it is not."""
    if (init := peft.get("init_lora_weights", True)) not in PLAIN_INITS:
        return f"trainer.peft.init_lora_weights: {init} changes the base weights"
    if (bias := peft.get("bias", "none")) != "none":
        return f"trainer.peft.bias: {bias} trains weights of the base model"
    for key in sorted(peft.keys() - PLAIN_KEYS - {"init_lora_weights", "bias", "inference_mode"}):
        if peft[key]:
            return f"vLLM does not apply adapters with trainer.peft.{key}"
    targets = peft.get("target_modules")
    if isinstance(targets, str) and targets.lower() != ALL_LINEAR:
        return "trainer.peft.target_modules is a pattern, and vLLM needs names"
    if embeddings := sorted(EMBEDDINGS & set(_named_targets(peft) or ())):
        return f"trainer.peft.target_modules has {embeddings[0]}, which vLLM does not treat as a linear layer"
    if not engine_rank(peft):
        return f"rank {_largest_rank(peft)} is above vLLM's maximum, {RANKS[-1]}"
    return ""


def _no_single_model(spec: RunSpec) -> str:
    """Return why no trainer process has a whole, plain model; empty if one does."""
    grpo, accelerate = spec.grpo, spec.trainer.accelerate or {}
    if any(word in str(grpo.get("model_init_kwargs")) for word in QUANTISED_WORDS):  # a mapping, or JSON
        return "the base model is quantised (grpo.model_init_kwargs)"
    for key in ("fsdp", "deepspeed"):
        if grpo.get(key):
            return f"grpo.{key} may shard the weights over processes"
    kind = accelerate.get("distributed_type") or "NO"
    if kind not in ONE_MODEL_EACH or deepspeed_file(spec) or shards_weights(spec):
        return "trainer.accelerate may shard the weights over processes"
    return ""


def _no_such_engine(spec: RunSpec, peft: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return why vLLM with run.yaml's flags cannot serve the adapters; empty if it can."""
    flags = {name.replace("_", "-"): value for name, value in spec.rollout.vllm.items()}
    if flags.get("enable-lora") is False:
        return "rollout.vllm.enable-lora is false"
    for flag in ("quantization", "speculative-config"):
        if flags.get(flag) is not None:
            return f"rollout.vllm.{flag} is set"
    if config.get("quantization_config"):
        return "the base model is quantised (its config.json)"
    without = sorted(WITHOUT_ADAPTERS & set(config.get("architectures") or ()))
    if without:
        return f"vLLM does not support adapters for {without[0]}"
    if model_settings(spec.grpo).get("revision") != flags.get("revision"):
        return "grpo.model_init_kwargs and rollout.vllm name different revisions of the base model"
    if _named_targets(peft) is None:
        if any(key in config for key in OTHER_PARTS):
            return "the model is multimodal, so target_modules must be named"
        if config.get("vocab_size", 0) > VOCABULARY_MAX:
            return f"with a vocabulary above {VOCABULARY_MAX}, vLLM needs named target_modules"
        if any(config.get(key) for key in EXPERTS):
            return "the model has experts, so target_modules must be named"
    return ""


def _named_targets(peft: Mapping[str, Any]) -> list[str] | None:
    """Return the last parts of the target modules' names; None if they depend on the model."""
    targets = peft.get("target_modules")
    if targets is None or isinstance(targets, str):
        return None
    return sorted({str(target).rpartition(".")[2] for target in targets})


def _largest_rank(peft: Mapping[str, Any]) -> int:
    named = (peft.get("rank_pattern") or {}).values()
    return max([int(peft.get("r") or DEFAULT_RANK), *(rank for rank in named if isinstance(rank, int))])


# Check that a published adapter has two matrices for each of its layers, and that the base model has these layers.
#
# PEFT saves them as `base_model.model.LAYER.lora_A.weight` (rank x inputs) and `.lora_B.weight` (outputs x rank).
# vLLM itself ignores layers that its model does not have, and takes any rank up to its maximum.

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


def adapter_mismatch(
    published: Mapping[str, Tensor], config: Mapping[str, Any], base: Mapping[str, Tensor], engine_rank: int
) -> str:
    """Return why the tensors are no adapter for the base model, naming one; empty if they are.

    Args:
        config: adapter_config.json.
        base: the base model's tensors. Missing ones are not compared, because transformers and the files name some
            models' layers differently: the engine then reports whether it has the layer.
        engine_rank: the maximum rank of the engine.
    """
    layers: dict[str, dict[str, Tensor]] = {}
    for name in sorted(published):
        found = _NAME.fullmatch(name)
        if found is None:
            return f"a tensor that does not belong to an adapter: {name}"
        if published[name].dtype not in FLOATS:
            return f"quantised weights: {name} is of {published[name].dtype}"
        layers.setdefault(found[1], {})[found[2]] = published[name]
    if not layers:
        return "the adapter has no tensors"
    for layer, pair in layers.items():
        if reason := _unfit(layer, pair, config, base.get(f"{layer}.weight"), engine_rank):
            return reason
    return ""


def _unfit(
    layer: str, pair: Mapping[str, Tensor], config: Mapping[str, Any], weight: Tensor | None, engine_rank: int
) -> str:
    """Return why a layer's two matrices do not match the configuration and its weight; empty if they do."""
    if pair.keys() != {"A", "B"}:
        return f"missing tensors: half of the adapter of {layer}"
    inner, outer = pair["A"].shape, pair["B"].shape
    rank = _rank_of(layer, config)
    if len(inner) != 2 or len(outer) != 2 or (inner[0], outer[1]) != (rank, rank):
        return f"wrong rank: {layer} has {list(inner)} and {list(outer)}, adapter_config.json has {rank}"
    if rank > engine_rank:
        return f"wrong rank: {layer} has {rank}, the engine supports at most {engine_rank}"
    if weight is not None and weight.shape not in ((outer[0], inner[1]), (inner[1], outer[0])):
        return f"wrong shape: {layer} is adapted as {[outer[0], inner[1]]}, the model's is {list(weight.shape)}"
    return ""


def _rank_of(layer: str, config: Mapping[str, Any]) -> Any:
    """Return a layer's rank as PEFT and vLLM do: by the first key that matches the end of its name."""
    for key, rank in (config.get("rank_pattern") or {}).items():
        if re.match(rf"(.*\.)?({key})$", layer):
            return rank
    return config.get("r")
