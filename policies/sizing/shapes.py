"""The shape of a model, from which its memory follows, and how to read it from a config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight of (outputs x inputs), by the last part of its name; its bias has `outputs` elements."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False

    @property
    def params(self) -> int:
        return self.outputs * (self.inputs + self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture of experts of a layer.

    An expert has three matrices of hidden x width; all are stored in two tensors.
    """

    count: int
    chosen: int  # experts for each token
    width: int
    layers: int  # that have experts, of all layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder. Counts and widths are in elements.

    Attributes:
        attention: a layer's linear layers of its attention.
        mlp: those of the MLP of a layer without experts.
        norms: elements of a layer's norms.
        windowed_layers: layers that attend only to the last `window` tokens.
        other_params: of parts that process no text, such as a vision tower; not derived from config.json.
    """

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocab: int
    tied: bool
    attention: tuple[Linear, ...]
    mlp: tuple[Linear, ...]
    norms: int
    experts: Experts | None = None
    window: int | None = None
    windowed_layers: int = 0
    other_params: int = 0

    @property
    def params(self) -> int:
        """All parameters; a tied head counts once."""
        return self.text_params + self.other_params

    @property
    def text_params(self) -> int:
        return self.layers_params + self.embedding_params * (1 if self.tied else 2) + self.hidden

    @property
    def embedding_params(self) -> int:
        """Parameters of the embedding; the head has the same number."""
        return self.vocab * self.hidden

    @property
    def layers_params(self) -> int:
        """Parameters of all layers, without embedding, head and last norm."""
        sparse = self.experts.layers if self.experts else 0
        common = self.norms + sum(linear.params for linear in self.attention)
        dense = sum(linear.params for linear in self.mlp)
        return self.layers * common + (self.layers - sparse) * dense + sparse * self.experts_params

    @property
    def experts_params(self) -> int:
        """Parameters of one layer's experts, the router included."""
        if self.experts is None:
            return 0
        return self.experts.count * self.hidden * (3 * self.experts.width + 1)

    @property
    def routed_params(self) -> int:
        """Parameters of all routed experts, in all layers."""
        experts = self.experts
        return 0 if experts is None else experts.layers * experts.count * 3 * self.hidden * experts.width

    @property
    def attention_flops(self) -> int:
        """Operations of all layers' attention in a forward pass, for each token and token that it attends to.

        For scores and the weighted sum of values, 2 for each product.
        """
        return 4 * self.layers * self.heads * self.head_dim

    @property
    def layer_params(self) -> int:
        """Parameters of the largest layer."""
        common = self.norms + sum(linear.params for linear in self.attention)
        return common + max(sum(linear.params for linear in self.mlp), self.experts_params)

    @property
    def cached(self) -> int:
        """Elements that one layer keeps of a token in the KV cache."""
        return 2 * self.kv_heads * self.head_dim


def with_all_params(shape: Shape, counted: int) -> Shape:
    """Return the shape with `other_params` from the parameters `counted` in the model's files."""
    stored_head = shape.embedding_params if shape.tied else 0
    others = counted - shape.text_params
    return replace(shape, other_params=0 if others in (0, stored_head) else max(0, others))


# A model's shape, read from its config.json.
#
# The names are those of transformers 5.19 (`models/*/modeling_*.py`), against whose models the counts are tested.
# Other families raise UnknownShape: nothing is guessed.

# Model families with known shapes, by `model_type` (transformers 5.19, `configuration_*.py`).


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Properties of a model family that config.json does not contain.

    Attributes:
        defaults: values that it may omit.
        tied: whether the head is the embedding by default.
        qkv_bias: whether queries, keys and values have a bias.
        reads_bias: whether `attention_bias` and `mlp_bias` count.
        head_norms: whether each head's queries and keys are normalised.
        norms: of a layer, each as wide as the hidden state.
        fused: whether queries, keys and values are one linear layer, and gate and up.
        windows: whether `sliding_window` is used if set.
        full_every: every n-th layer attends to all tokens; 0: none.
    """

    defaults: Mapping[str, int] = field(default_factory=dict)
    tied: bool = False
    qkv_bias: bool = False
    reads_bias: bool = False
    head_norms: bool = False
    norms: int = 2
    fused: bool = False
    experts: bool = False
    windows: bool = False
    full_every: int = 0


# A text_config omits defaults.
GEMMA_3 = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(reads_bias=True),
    "mistral": Family(windows=True),
    "mixtral": Family(experts=True, windows=True),
    "qwen2": Family(qkv_bias=True),
    "qwen2_vl": Family(qkv_bias=True),
    "qwen2_vl_text": Family(qkv_bias=True),
    "qwen2_5_vl": Family(qkv_bias=True),
    "qwen2_5_vl_text": Family(qkv_bias=True),
    "qwen3": Family(reads_bias=True, head_norms=True, defaults={"head_dim": 128}),
    "qwen3_vl_text": Family(reads_bias=True, head_norms=True, defaults={"head_dim": 128}),
    "qwen3_moe": Family(reads_bias=True, head_norms=True, experts=True),
    "gemma": Family(tied=True, reads_bias=True, defaults={"head_dim": 256}),
    "gemma2": Family(tied=True, reads_bias=True, norms=4, windows=True, full_every=2, defaults={"head_dim": 256}),
    "gemma3_text": Family(
        tied=True, reads_bias=True, norms=4, head_norms=True, windows=True, full_every=6, defaults=GEMMA_3
    ),
    "phi3": Family(fused=True, windows=True),
}


class UnknownShape(ValueError):
    """The model's family is unknown, or a number is missing from its configuration; the message tells which."""


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Return the shape of the model with this config.json; of a multimodal model, that of its text part.

    Raises UnknownShape.
    """
    text = config.get("text_config")
    own: Mapping[str, Any] = {**text} if isinstance(text, Mapping) else config
    kind = str(own.get("model_type") or config.get("model_type") or "")
    if kind not in FAMILIES:
        found = f"model_type {kind}" if kind else "a configuration without model_type"
        raise UnknownShape(f"{found} is not supported; expected one of {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[kind]
    tied = next(
        (section["tie_word_embeddings"] for section in (own, config) if "tie_word_embeddings" in section), None
    )
    return _shape(
        kind, family, _Read(kind, {**family.defaults, **own}), family.tied if tied is None else bool(tied)
    )


class _Read:
    """Reads whole numbers of a configuration, by the first of several names that is set."""

    def __init__(self, kind: str, config: Mapping[str, Any]) -> None:
        self._kind, self.config = kind, config

    def count(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self.config.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
        if default is None:
            raise UnknownShape(f"the {self._kind} configuration has no {names[0]}")
        return default

    def is_set(self, name: str, default: bool = False) -> bool:
        return bool(self.config.get(name, default))


def _shape(kind: str, family: Family, read: _Read, tied: bool) -> Shape:
    hidden, heads = read.count("hidden_size"), read.count("num_attention_heads")
    layers, mlp_width = read.count("num_hidden_layers"), read.count("intermediate_size")
    if not (hidden and heads and layers):
        raise UnknownShape(f"the {kind} configuration has a size of 0")
    kv_heads = read.count("num_key_value_heads", default=heads)
    head_dim = read.count("head_dim", default=hidden // heads)
    if not (kv_heads and head_dim):
        raise UnknownShape(f"the {kind} configuration has a size of 0")
    window, windowed = _windows(family, read, layers)
    return Shape(
        model_type=kind,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=mlp_width,
        vocab=read.count("vocab_size"),
        tied=tied,
        attention=tuple(_attention(family, read, hidden, heads, kv_heads, head_dim)),
        mlp=tuple(_mlp(family, read, hidden, mlp_width)),
        norms=family.norms * hidden + (2 * head_dim if family.head_norms else 0),
        experts=_experts(family, read, layers),
        window=window,
        windowed_layers=windowed,
    )


def _attention(
    family: Family, read: _Read, hidden: int, heads: int, kv_heads: int, head_dim: int
) -> Iterable[Linear]:
    bias = read.is_set("attention_bias") if family.reads_bias else False
    qkv_bias = bias or (family.qkv_bias and read.is_set("qkv_bias", True))
    if family.fused:
        yield Linear("qkv_proj", hidden, (heads + 2 * kv_heads) * head_dim, qkv_bias)
    else:
        yield Linear("q_proj", hidden, heads * head_dim, qkv_bias)
        yield Linear("k_proj", hidden, kv_heads * head_dim, qkv_bias)
        yield Linear("v_proj", hidden, kv_heads * head_dim, qkv_bias)
    yield Linear("o_proj", heads * head_dim, hidden, bias)


def _mlp(family: Family, read: _Read, hidden: int, width: int) -> Iterable[Linear]:
    bias = read.is_set("mlp_bias") if family.reads_bias else False
    if family.fused:
        yield Linear("gate_up_proj", hidden, 2 * width, bias)
    else:
        yield Linear("gate_proj", hidden, width, bias)
        yield Linear("up_proj", hidden, width, bias)
    yield Linear("down_proj", width, hidden, bias)


def _experts(family: Family, read: _Read, layers: int) -> Experts | None:
    """Return the experts, which are in every layer or every n-th."""
    if not family.experts:
        return None
    sparse_step = read.count("decoder_sparse_step", default=1)
    dense = read.config.get("mlp_only_layers") or ()
    return Experts(
        count=read.count("num_experts", "num_local_experts"),
        chosen=read.count("num_experts_per_tok"),
        width=read.count("moe_intermediate_size", "intermediate_size"),
        layers=sum(
            number not in dense and sparse_step > 0 and (number + 1) % sparse_step == 0 for number in range(layers)
        ),
    )


def _windows(family: Family, read: _Read, layers: int) -> tuple[int | None, int]:
    """Return the window of sliding-window layers, and the number of these layers."""
    window = read.count("sliding_window", default=0)
    if not (window and family.windows):
        return None, 0
    kinds = read.config.get("layer_types")
    if isinstance(kinds, list):
        return window, sum(kind == "sliding_attention" for kind in kinds)
    every = read.count("sliding_window_pattern", default=family.full_every)
    return window, layers - (layers // every if every else 0)
