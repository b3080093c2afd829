"""Whether a run's LoRA adapter travels alone, to be applied by the nodes' engine, or merged into whole weights.

One rule for all: `validate` tells its reason, the trainer publishes by it, and the nodes start vLLM by it. What it
needs is in the run's specification and in the model's own config.json, which are the same everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from policies.model.spec import RunSpec, model_settings
from policies.weights.tensors import FLOATS, NAMED, Tensor, served_types

ADAPTER_WEIGHTS = "adapter_model.safetensors"  # PEFT's names
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_BASE = "base.json"  # which model it is for
BASE_MODEL = "base"  # what an engine with adapters serves its bare weights as: nobody asks for that but its agent
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's --max-lora-rank takes (0.32: `vllm.config.lora`)
DEFAULT_RANK = 8  # PEFT's
ALL_LINEAR = "all-linear"  # PEFT's word for every linear layer but the head

# LoraConfig's keys with which the saved tensors, rank and alpha say all that an engine has to know (vLLM 0.32:
# `vllm.lora.peft_helper`). With any other that is set the trained function is more than that, or the base weights
# are no longer the model's.
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
PLAIN_INITS = (True, False, "gaussian", "orthogonal")  # the others begin by changing the base weights, or may
EMBEDDINGS = frozenset({"lm_head", "embed_tokens", "embed_out", "embed_in", "wte", "word_embeddings"})
QUANTISED = "a quantised model cannot be published to rollout nodes"
QUANTISED_WORDS = ("quantization_config", "load_in_4bit", "load_in_8bit")
ONE_MODEL_EACH = frozenset({"NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU", "MULTI_HPU", "DEEPSPEED"})
# Where targets are not named, vLLM prepares everything for adapters: the head too, which it does up to this
# vocabulary (0.32: `vllm.lora.layers.logits_processor`), and experts, at many times the adapter's size.
VOCABULARY_MAX = 258_048
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# With these in config.json there are linear layers to which vLLM applies no adapter, those that see or hear, and a
# `text_config` may leave out what is as usual, the size of its vocabulary too.
OTHER_PARTS = ("text_config", "vision_config", "audio_config")
# Generating models that vLLM 0.32 serves without adapters; a test compares with its sources.
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


def why_whole(spec: RunSpec, config: Mapping[str, Any]) -> str:
    """Why policies are published whole, in a clause that names what run.yaml says; empty where adapters travel.

    Args:
        config: the model's config.json as the file is, for transformers adds what is left out there and takes out
            what it has undone. Empty where it is not at hand.
    """
    peft = spec.trainer.peft
    if peft is None:
        return "no adapter is trained"
    return _not_plain(peft) or _no_single_model(spec) or _no_such_engine(spec, peft, config)


def engine_flags(spec: RunSpec) -> dict[str, Any]:
    """The flags of `vllm serve` with which an engine takes this run's adapters, one at a time."""
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
    """The type, in safetensors' name, that engines round an adapter's matrices to when they load it
    (`vllm/config/lora.py`: the model's own unless `lora-dtype` says otherwise); None where it is not certain.

    Args:
        config: the base model's config.json.
    """
    flags = {name.replace("_", "-"): value for name, value in spec.rollout.vllm.items()}
    asked = str(flags.get("lora-dtype") or "auto").lower()
    return served_types(flags, config).to if asked == "auto" else NAMED.get(asked)


def engine_rank(peft: Mapping[str, Any]) -> int:
    """The least rank that vLLM can make room for which holds all of this LoraConfig's; 0 if none does."""
    return next((rank for rank in RANKS if rank >= _largest_rank(peft)), 0)


def _not_plain(peft: Mapping[str, Any]) -> str:
    """What makes the adapter more than two matrices a layer beside an unchanged base model."""
    if (init := peft.get("init_lora_weights", True)) not in PLAIN_INITS:
        return f"trainer.peft.init_lora_weights: {init} changes the base weights"
    if (bias := peft.get("bias", "none")) != "none":
        return f"trainer.peft.bias: {bias} trains weights of the base model"
    for key in sorted(peft.keys() - PLAIN_KEYS - {"init_lora_weights", "bias", "inference_mode"}):
        if peft[key]:
            return f"vLLM does not apply adapters with trainer.peft.{key}"
    targets = peft.get("target_modules")
    if isinstance(targets, str) and targets.lower() != ALL_LINEAR:
        return "trainer.peft.target_modules is a pattern, and vLLM is told names"
    if embeddings := sorted(EMBEDDINGS & set(_named_targets(peft) or ())):
        return f"trainer.peft.target_modules has {embeddings[0]}, which is no linear layer to vLLM"
    if not engine_rank(peft):
        return f"rank {_largest_rank(peft)} is above vLLM's largest, {RANKS[-1]}"
    return ""


def _no_single_model(spec: RunSpec) -> str:
    """What leaves no trainer process with a whole, plain model."""
    grpo, accelerate = spec.grpo, spec.trainer.accelerate or {}
    if any(word in str(grpo.get("model_init_kwargs")) for word in QUANTISED_WORDS):  # a mapping, or JSON
        return "the base model is quantised (grpo.model_init_kwargs)"
    for key in ("fsdp", "deepspeed"):
        if grpo.get(key):
            return f"grpo.{key} may divide the weights over processes"
    kind = accelerate.get("distributed_type") or "NO"
    stage = _zero_stage(accelerate.get("deepspeed_config") or {})
    if kind not in ONE_MODEL_EACH or stage not in (0, 1, 2):
        return "trainer.accelerate may divide the weights over processes"
    return ""


def _no_such_engine(spec: RunSpec, peft: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """What vLLM, as run.yaml has it, cannot do with adapters."""
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
        return f"vLLM has no adapters for {without[0]}"
    if model_settings(spec.grpo).get("revision") != flags.get("revision"):
        return "grpo.model_init_kwargs and rollout.vllm name different revisions of the base model"
    if _named_targets(peft) is None:
        if any(key in config for key in OTHER_PARTS):
            return "the model is not of text alone, so target_modules have to be named"
        if config.get("vocab_size", 0) > VOCABULARY_MAX:
            return f"vLLM has no adapters for a vocabulary above {VOCABULARY_MAX} unless target_modules are named"
        if any(config.get(key) for key in EXPERTS):
            return "the model has experts, so target_modules have to be named"
    return ""


def _named_targets(peft: Mapping[str, Any]) -> list[str] | None:
    """The last parts of the target modules' names; None where they follow from the model."""
    targets = peft.get("target_modules")
    if targets is None or isinstance(targets, str):
        return None
    return sorted({str(target).rpartition(".")[2] for target in targets})


def _largest_rank(peft: Mapping[str, Any]) -> int:
    named = (peft.get("rank_pattern") or {}).values()
    return max([int(peft.get("r") or DEFAULT_RANK), *(rank for rank in named if isinstance(rank, int))])


def _zero_stage(config: Mapping[str, Any]) -> Any:
    """Of an accelerate config's DeepSpeed section; a text where that is in a file of its own."""
    return "in a file" if "deepspeed_config_file" in config else config.get("zero_stage", 0)


# Whether the tensors of a published adapter are two matrices each for layers that the base model has.
#
# PEFT saves them as `base_model.model.LAYER.lora_A.weight` (rank x inputs) and `.lora_B.weight` (outputs x rank).
# vLLM itself leaves out what it does not find in its model, and takes any rank up to its largest.

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


def adapter_mismatch(
    published: Mapping[str, Tensor], config: Mapping[str, Any], base: Mapping[str, Tensor], engine_rank: int
) -> str:
    """Why the tensors are no adapter for the base model, in a line that names one; empty where they are.

    Args:
        config: adapter_config.json.
        base: the base model's tensors. One that is not there is not compared, for transformers names some models'
            layers otherwise than their files do: the engine then says whether it has the layer.
        engine_rank: the largest that the engine has room for.
    """
    layers: dict[str, dict[str, Tensor]] = {}
    for name in sorted(published):
        found = _NAME.fullmatch(name)
        if found is None:
            return f"a tensor that is none of an adapter's: {name}"
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
    """Why a layer's two matrices are not those of the configuration and of its weight; empty where they are."""
    if pair.keys() != {"A", "B"}:
        return f"missing tensors: half of the adapter of {layer}"
    inner, outer = pair["A"].shape, pair["B"].shape
    rank = _rank_of(layer, config)
    if len(inner) != 2 or len(outer) != 2 or (inner[0], outer[1]) != (rank, rank):
        return f"another rank: {layer} has {list(inner)} and {list(outer)}, adapter_config.json says {rank}"
    if rank > engine_rank:
        return f"another rank: {layer} has {rank}, the engine has room for {engine_rank}"
    if weight is not None and weight.shape not in ((outer[0], inner[1]), (inner[1], outer[0])):
        return f"another shape: {layer} is adapted as {[outer[0], inner[1]]}, the model's is {list(weight.shape)}"
    return ""


def _rank_of(layer: str, config: Mapping[str, Any]) -> Any:
    """As PEFT and vLLM read the pattern: a key matches the end of a layer's name, and the first one counts."""
    for key, rank in (config.get("rank_pattern") or {}).items():
        if re.match(rf"(.*\.)?({key})$", layer):
            return rank
    return config.get("r")
