"""What a run's memory depends on of how it trains: read from its specification."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from policies.model.spec import (
    RunSpec,
    Sharding,
    computes_in_half,
    generates_itself,
    model_settings,
    processes_of,
    sharding_of,
)
from policies.sizing.shapes import Linear, Shape
from policies.weights.adapters import ALL_LINEAR, DEFAULT_RANK
from policies.weights.tensors import NAMED, WIDTH

Attention = Literal["sdpa", "eager", "flash"]

FLOAT32 = 4
# TRL 1.16's and transformers 5.19's.
DEFAULT_BATCH = 8
DEFAULT_COMPLETION = 256
# Bytes of an optimizer's states for each trained parameter, in float32 unless the weights' own type is said. Block
# constants of the 8-bit ones are 2 x 4 bytes for 256 elements (bitsandbytes 0.50, `functional.py`).
EIGHT_BIT = 2 + 8 / 256
IN_WEIGHTS_TYPE = {"sgd": 0, "adagrad": 1, "rmsprop": 1, "lion_32bit": 1, "paged_lion_32bit": 1, "adafactor": 0}
ADAM_STATES = 2
# What PEFT adapts where nothing is named (0.21, `utils/constants.py`).
PEFT_TARGETS = {"qwen3_moe": ("q_proj", "k_proj", "v_proj", "o_proj"), "phi3": ("qkv_proj",)}
PEFT_USUAL = ("q_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter of this rank on the linear layers with these names, in every layer.

    `whole`: modules that are trained themselves, beside it (`modules_to_save`).
    """

    rank: int
    targets: frozenset[str]
    whole: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a run trains. Lengths are in tokens, and those of the longest batch.

    Attributes:
        weight_bytes: of a weight, as a pass through the model finds it; the hidden state is as wide.
        stored_bytes: of a weight from pass to pass: wider under FSDP2, which casts what it gathers.
        compute_bytes: of an element where it is computed; fewer than `weight_bytes` under autocast.
        state_bytes: of the optimizer's states, for each trained parameter.
        sequences: that one process takes through forward and backward pass at once.
        generation_sequences: that one process makes at once, where the trainer generates by itself.
        accumulates: whether a step adds up the gradients of several batches.
        fused_layers: whether Liger's kernels stand in for norms and activations.
    """

    processes: int = 1
    sharding: Sharding = "none"
    offloads_optimizer: bool = False
    offloads_weights: bool = False
    weight_bytes: int = FLOAT32
    stored_bytes: int = FLOAT32
    compute_bytes: int = 2
    state_bytes: float = ADAM_STATES * FLOAT32
    lora: Lora | None = None
    reference: bool = False
    checkpointing: bool = True
    attention: Attention = "sdpa"
    sequences: int = DEFAULT_BATCH
    prompt_tokens: int = 512
    completion_tokens: int = DEFAULT_COMPLETION
    generation_sequences: int = 0
    accumulates: bool = False
    fused_layers: bool = False

    @property
    def tokens(self) -> int:
        """Of one pass, prompts and padding included."""
        return self.sequences * (self.prompt_tokens + self.completion_tokens)

    @property
    def is_mixed(self) -> bool:
        """Whether weights are cast to be computed with."""
        return self.compute_bytes < self.weight_bytes


def training_of(spec: RunSpec, shape: Shape, prompt_tokens: int) -> Training:
    """Return how the run trains.

    Args:
        prompt_tokens: of the longest prompt, which only its dataset tells.
    """
    grpo = spec.grpo
    sharding, optimizer_away, weights_away = sharding_of(spec)
    half = computes_in_half(spec)
    loaded_bytes = stored_bytes = _weight_bytes(grpo)
    # DeepSpeed converts the model; FSDP2 casts what it gathers, and accelerate keeps what is trained in float32.
    if sharding == "fsdp":
        stored_bytes = loaded_bytes if spec.trainer.peft is not None else FLOAT32
    elif sharding != "none" and half:
        stored_bytes = 2
    weight_bytes = 2 if half and sharding != "none" else loaded_bytes
    # PEFT keeps what it trains in float32, and DeepSpeed its optimizer's copy.
    in_float32 = spec.trainer.peft is not None or sharding.startswith("zero")
    trained_bytes = FLOAT32 if in_float32 else stored_bytes
    sequences = int(grpo.get("per_device_train_batch_size") or DEFAULT_BATCH)
    at_once = int(grpo.get("steps_per_generation") or grpo.get("gradient_accumulation_steps") or 1)
    return Training(
        processes=processes_of(spec),
        sharding=sharding,
        offloads_optimizer=optimizer_away,
        offloads_weights=weights_away,
        weight_bytes=weight_bytes,
        stored_bytes=stored_bytes,
        compute_bytes=2 if half else weight_bytes,
        state_bytes=state_bytes(str(grpo.get("optim") or "adamw_torch"), trained_bytes),
        lora=lora_of(spec.trainer.peft, shape),
        reference=float(grpo.get("beta") or 0) != 0 and spec.trainer.peft is None,
        checkpointing=bool(grpo.get("gradient_checkpointing", True)),
        attention=_attention(grpo),
        sequences=sequences,
        prompt_tokens=prompt_tokens,
        completion_tokens=int(grpo.get("max_completion_length") or DEFAULT_COMPLETION),
        generation_sequences=sequences * at_once if generates_itself(spec) else 0,
        accumulates=int(grpo.get("gradient_accumulation_steps") or 1) > 1,
        fused_layers=bool(grpo.get("use_liger_kernel")),
    )


def divides_weights(spec: RunSpec) -> bool:
    """Whether each process keeps a part of the weights alone, by ZeRO-3 or FSDP2."""
    return sharding_of(spec)[0] in ("zero3", "fsdp")


def lora_of(peft: Mapping[str, Any] | None, shape: Shape) -> Lora | None:
    """The adapter that a LoraConfig makes for such a model; None where there is none."""
    if peft is None:
        return None
    named = peft.get("target_modules")
    every = frozenset(one.name for one in (*shape.attention, *shape.mlp))
    if isinstance(named, str):
        targets = every if named.lower() == ALL_LINEAR else _matched(named, shape)
    elif named is None:
        targets = frozenset(PEFT_TARGETS.get(shape.model_type, PEFT_USUAL))
    else:
        targets = frozenset(str(one).rpartition(".")[2] for one in named)
    whole = frozenset(str(one).rpartition(".")[2] for one in peft.get("modules_to_save") or ())
    return Lora(int(peft.get("r") or DEFAULT_RANK), targets, whole)


def _matched(pattern: str, shape: Shape) -> frozenset[str]:
    """The layers whose whole names a pattern matches in some layer (PEFT 0.21, `match_target_against_key`)."""
    blocks = (("self_attn", shape.attention), ("mlp", shape.mlp))
    try:
        return frozenset(
            one.name
            for block, layers in blocks
            for one in layers
            for at in range(shape.layers)
            if re.fullmatch(pattern, f"model.layers.{at}.{block}.{one.name}")
        )
    except re.error:  # which PEFT refuses
        return frozenset()


def state_bytes(optimizer: str, trained_bytes: int) -> float:
    """Bytes of an optimizer's states for each trained parameter, given the width of the parameter itself."""
    if "8bit" in optimizer or optimizer == "adamw_bnb_8bit":
        return EIGHT_BIT / (2 if "lion" in optimizer or "rmsprop" in optimizer else 1)
    return float(IN_WEIGHTS_TYPE.get(optimizer, ADAM_STATES) * trained_bytes)


def _weight_bytes(grpo: Mapping[str, Any]) -> int:
    """TRL loads in float32 unless it is told (1.16, `create_model_from_path`)."""
    asked = model_settings(grpo)
    named = str(asked.get("dtype") or asked.get("torch_dtype") or "float32").removeprefix("torch.")
    return WIDTH[NAMED.get(named, "BF16")]


def _attention(grpo: Mapping[str, Any]) -> Attention:
    asked = str(model_settings(grpo).get("attn_implementation") or "sdpa")
    return "eager" if asked == "eager" else "flash" if "flash" in asked else "sdpa"


# How large a LoRA adapter is: two matrices a linear layer (arXiv 2106.09685).


def adapter_params(shape: Shape, lora: Lora) -> int:
    """Elements of the adapter: rank x (inputs + outputs) for each layer that it is on.

    Experts are no linear layers to PEFT: transformers keeps them in one tensor for all.
    """
    sparse = shape.experts.layers if shape.experts else 0
    attention = sum(_of(one, lora) for one in adapted(shape.attention, lora))
    mlp = sum(_of(one, lora) for one in adapted(shape.mlp, lora))
    return shape.layers * attention + (shape.layers - sparse) * mlp


def copied_params(shape: Shape, lora: Lora) -> int:
    """Elements of the base model's own matrices that are trained beside the adapter, each in a copy."""
    layers = (*shape.attention, *shape.mlp)
    ends = shape.embedding_params * len(lora.whole & {"lm_head", "embed_tokens"})
    return ends + shape.layers * sum(one.params for one in layers if one.name in lora.whole)


def trained_params(shape: Shape, training: Training) -> int:
    """How many parameters the optimizer changes."""
    lora = training.lora
    return shape.params if lora is None else adapter_params(shape, lora) + copied_params(shape, lora)


def adapted(layers: tuple[Linear, ...], lora: Lora | None) -> Iterator[Linear]:
    """Those of the linear layers that have an adapter."""
    return (one for one in layers if lora is not None and one.name in lora.targets)


def _of(layer: Linear, lora: Lora) -> int:
    return lora.rank * (layer.inputs + layer.outputs)


# What a trainer takes that generates by itself, by transformers' `generate`: in a run without rollout nodes
# (`rollout.replicas: 0`), or while none is to be had. And which trainers cannot.

# Of each word for each completion where the next one is drawn: logits, shaped and as log-probabilities, in
# float32, and their sum in float64 (`tasks/trl/own_generation.py`).
DRAW_BYTES = 3 * 4 + 2 * 8


def why_not_itself(spec: RunSpec) -> str:
    """Why the trainer of a run with rollout nodes does not generate while there is none; empty where it does."""
    if spec.rollout.recovery == "exact":
        return "with recovery: exact no completion may differ from what a rollout node would make"
    if spec.rollout.max_staleness:
        return "with max_staleness the completions of a step are an older policy's, whose weights it has not"
    if spec.trainer.agent is not None:
        return "an agent's sessions are the gateway's"
    if divides_weights(spec):
        return "no process of the trainer has the whole model"
    for key in ("generation_kwargs", "vllm_structured_outputs_regex"):
        if spec.grpo.get(key):
            return f"grpo.{key} is vLLM's"
    return ""


def generating(shape: Shape, training: Training) -> dict[str, int]:
    """Return the parts of a batch's generation, at its last token.

    A cache grows by a copy: for a moment one layer's is there twice, and repeated for each head (transformers
    5.19, `DynamicLayer.update`, `repeat_kv`). Under autocast all weights are cast once, and kept to the end.
    """
    length, count = training.prompt_tokens + training.completion_tokens, training.generation_sequences
    one = count * length * training.compute_bytes
    of_layer = 2 * shape.kv_heads * shape.head_dim
    if shape.latent is not None:  # transformers keeps keys and values as they are computed with
        of_layer = shape.heads * (shape.head_dim + shape.latent.value_dim)
    casts = (shape.text_params - shape.embedding_params) * training.compute_bytes
    return {
        "KV cache": one * (shape.layers * of_layer + of_layer + 2 * shape.heads * shape.head_dim),
        "logits": count * shape.vocab * DRAW_BYTES,
        "weights cast": casts if training.is_mixed and training.lora is None else 0,
    }
