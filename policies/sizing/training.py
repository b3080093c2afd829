"""The training settings that determine a run's memory, from its specification."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from grpo_orch.policies.model.spec import (
    RunSpec,
    Sharding,
    computes_in_half,
    generates_itself,
    model_settings,
    processes_of,
    sharding_of,
)
from grpo_orch.policies.sizing.shapes import Linear, Shape
from grpo_orch.policies.weights.adapters import DEFAULT_RANK
from grpo_orch.policies.weights.tensors import NAMED, WIDTH

Attention = Literal["sdpa", "eager", "flash"]

FLOAT32 = 4
# TRL 1.16's and transformers 5.19's.
DEFAULT_BATCH = 8
DEFAULT_COMPLETION = 256
# Bytes of an optimizer's states for each trained parameter. Block constants of 8-bit optimizers are 2 x 4 bytes
# for 256 elements (bitsandbytes 0.50, `functional.py`).
EIGHT_BIT = 2 + 8 / 256
# Number of states in the weights' own type.
IN_WEIGHTS_TYPE = {"sgd": 0, "adagrad": 1, "rmsprop": 1, "lion_32bit": 1, "paged_lion_32bit": 1, "adafactor": 0}
ADAM_STATES = 2
# PEFT's default target modules (0.21, `utils/constants.py`).
PEFT_TARGETS = {"qwen3_moe": ("q_proj", "k_proj", "v_proj", "o_proj"), "phi3": ("qkv_proj",)}
PEFT_USUAL = ("q_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter of this rank on the linear layers with these names, in every layer.

    `whole`: modules that are trained as a whole in addition (`modules_to_save`).
    """

    rank: int
    targets: frozenset[str]
    whole: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A run's training settings. Lengths are in tokens, and those of the longest batch.

    Attributes:
        weight_bytes: of a weight during a pass, and of an element of the hidden state.
        stored_bytes: of a weight between passes: wider under FSDP2, which casts gathered weights.
        compute_bytes: of an element in computations; fewer than `weight_bytes` under autocast.
        state_bytes: of the optimizer's states, for each trained parameter.
        sequences: in one forward and backward pass of a process.
        generation_sequences: that one process generates at once, if the trainer generates itself.
        accumulates: whether a step adds up the gradients of several batches.
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

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def tokens(self) -> int:
        """Tokens of one pass, prompts and padding included."""
        return self.sequences * self.length

    @property
    def is_mixed(self) -> bool:
        """Whether weights are cast for computations."""
        return self.compute_bytes < self.weight_bytes


def training_of(spec: RunSpec, shape: Shape, prompt_tokens: int) -> Training:
    """Return the run's training settings.

    Args:
        prompt_tokens: of the longest prompt, which depends on the dataset.
    """
    grpo = spec.grpo
    sharding, offloads_optimizer, offloads_weights = sharding_of(spec)
    is_half = computes_in_half(spec)
    loaded_bytes = stored_bytes = _weight_bytes(grpo)
    # DeepSpeed converts the model; FSDP2 casts gathered weights, and accelerate keeps trained weights in float32.
    if sharding == "fsdp":
        stored_bytes = loaded_bytes if spec.trainer.peft is not None else FLOAT32
    elif sharding != "none" and is_half:
        stored_bytes = 2
    weight_bytes = 2 if is_half and sharding != "none" else loaded_bytes
    # PEFT keeps trained weights in float32, and DeepSpeed its optimizer's copy.
    is_float32 = spec.trainer.peft is not None or sharding.startswith("zero")
    trained_bytes = FLOAT32 if is_float32 else stored_bytes
    sequences = int(grpo.get("per_device_train_batch_size") or DEFAULT_BATCH)
    return Training(
        processes=processes_of(spec),
        sharding=sharding,
        offloads_optimizer=offloads_optimizer,
        offloads_weights=offloads_weights,
        weight_bytes=weight_bytes,
        stored_bytes=stored_bytes,
        compute_bytes=2 if is_half else weight_bytes,
        state_bytes=state_bytes(str(grpo.get("optim") or "adamw_torch"), trained_bytes),
        lora=lora_of(spec.trainer.peft, shape),
        reference=float(grpo.get("beta") or 0) != 0 and spec.trainer.peft is None,
        checkpointing=bool(grpo.get("gradient_checkpointing", True)),
        attention=_attention(grpo),
        sequences=sequences,
        prompt_tokens=prompt_tokens,
        completion_tokens=int(grpo.get("max_completion_length") or DEFAULT_COMPLETION),
        generation_sequences=sequences * batches_per_generation(spec) if generates_itself(spec) else 0,
        accumulates=int(grpo.get("gradient_accumulation_steps") or 1) > 1,
    )


def batches_per_generation(spec: RunSpec) -> int:
    """Return the batches that a process makes of its share of a generation (TRL 1.16, `__post_init__`)."""
    grpo = spec.grpo
    if explicit := grpo.get("generation_batch_size"):
        batch = int(grpo.get("per_device_train_batch_size") or DEFAULT_BATCH) * processes_of(spec)
        return int(explicit) // batch
    return int(grpo.get("steps_per_generation") or grpo.get("gradient_accumulation_steps") or 1)


def lora_of(peft: Mapping[str, Any] | None, shape: Shape) -> Lora | None:
    """Return the adapter of a LoraConfig for such a model; None without one."""
    if peft is None:
        return None
    modules = peft.get("target_modules")
    if isinstance(modules, str):  # `all-linear`, or a pattern, which is counted as matching all
        targets = frozenset(layer.name for layer in (*shape.attention, *shape.mlp))
    elif modules is None:
        targets = frozenset(PEFT_TARGETS.get(shape.model_type, PEFT_USUAL))
    else:
        targets = frozenset(str(module).rpartition(".")[2] for module in modules)
    whole = frozenset(str(module).rpartition(".")[2] for module in peft.get("modules_to_save") or ())
    return Lora(int(peft.get("r") or DEFAULT_RANK), targets, whole)


def state_bytes(optimizer: str, trained_bytes: int) -> float:
    """Return the bytes of an optimizer's states for each trained parameter, given the parameter's own width."""
    if "8bit" in optimizer:
        return EIGHT_BIT / (2 if "lion" in optimizer or "rmsprop" in optimizer else 1)
    return float(IN_WEIGHTS_TYPE.get(optimizer, ADAM_STATES) * trained_bytes)


def _weight_bytes(grpo: Mapping[str, Any]) -> int:
    """Return the width of weights as TRL loads them: float32 by default (1.16, `create_model_from_path`)."""
    settings = model_settings(grpo)
    dtype = str(settings.get("dtype") or settings.get("torch_dtype") or "float32").removeprefix("torch.")
    return WIDTH[NAMED.get(dtype, "BF16")]


def _attention(grpo: Mapping[str, Any]) -> Attention:
    implementation = str(model_settings(grpo).get("attn_implementation") or "sdpa")
    return "eager" if implementation == "eager" else "flash" if "flash" in implementation else "sdpa"


# The size of a LoRA adapter: two matrices a linear layer (arXiv 2106.09685).


def adapter_params(shape: Shape, lora: Lora) -> int:
    """Return the elements of the adapter: rank x (inputs + outputs) for each adapted layer.

    PEFT does not treat experts as linear layers: transformers keeps them in one tensor for all.
    """
    sparse = shape.experts.layers if shape.experts else 0
    attention = sum(_layer_params(layer, lora) for layer in adapted(shape.attention, lora))
    mlp = sum(_layer_params(layer, lora) for layer in adapted(shape.mlp, lora))
    return shape.layers * attention + (shape.layers - sparse) * mlp


def copied_params(shape: Shape, lora: Lora) -> int:
    """Return the elements of base matrices that are trained in addition to the adapter, each in a copy."""
    layers = (*shape.attention, *shape.mlp)
    ends = shape.embedding_params * len(lora.whole & {"lm_head", "embed_tokens"})
    return ends + shape.layers * sum(layer.params for layer in layers if layer.name in lora.whole)


def trained_params(shape: Shape, training: Training) -> int:
    """Return the number of trained parameters."""
    lora = training.lora
    return shape.params if lora is None else adapter_params(shape, lora) + copied_params(shape, lora)


def adapted(layers: tuple[Linear, ...], lora: Lora | None) -> Iterator[Linear]:
    """Return the linear layers that have an adapter."""
    return (layer for layer in layers if lora is not None and layer.name in lora.targets)


def _layer_params(layer: Linear, lora: Lora) -> int:
    return lora.rank * (layer.inputs + layer.outputs)


# Memory of a trainer that generates itself, by transformers' `generate`, in a run without rollout nodes
# (`rollout.replicas: 0`).

# Bytes for each word of the vocabulary and completion when the next token is drawn: logits, processed and as
# log-probabilities, in float32, and their sum in float64 (`tasks/trl/own_generation.py`).
DRAW_BYTES = 3 * 4 + 2 * 8


def generating(shape: Shape, training: Training) -> dict[str, int]:
    """Return the memory of a batch's generation at its last token, by part.

    A cache grows by a copy: for a moment one layer's exists twice, and repeated for each head (transformers 5.19,
    `DynamicLayer.update`, `repeat_kv`). Under autocast all weights are cast once, and kept to the end.
    """
    count = training.generation_sequences
    element_bytes = count * training.length * training.compute_bytes
    casts = (shape.text_params - shape.embedding_params) * training.compute_bytes
    copies = shape.cached + 2 * shape.heads * shape.head_dim
    return {
        "KV cache": element_bytes * (shape.layers * shape.cached + copies),
        "logits": count * shape.vocab * DRAW_BYTES,
        "weights cast": casts if training.is_mixed and training.lora is None else 0,
    }
