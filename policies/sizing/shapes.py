"""What a model is made of: the numbers from which its memory follows. `read_shape` has them from a config.json."""

from __future__ import annotations

from dataclasses import dataclass, replace


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
    """The mixture in a layer that has one. Experts are three matrices of hidden x width each, in two tensors for
    all of them; the shared ones work on every token, as one of `shared_width`."""

    count: int
    chosen: int  # of them for each token
    width: int
    shared_width: int = 0
    shared_gate: bool = False  # a weight for each element of the hidden state
    layers: int  # that have one, of all layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Attention with keys and values in one small vector a token (MLA, DeepSeek-V2, arXiv 2405.04434)."""

    query_rank: int  # 0: queries are made without a detour
    kv_rank: int
    rope_dim: int  # of each head, and the part of the cache that all heads share
    nope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder. Counts and widths are in elements.

    Attributes:
        attention: a layer's linear layers around its attention.
        mlp: those of a layer without experts.
        norms: elements of a layer's norms.
        windowed_layers: that look back over `window` tokens alone.
        other_params: of parts that read no text, such as a vision tower; none is known from config.json.
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
    latent: Latent | None = None
    window: int | None = None
    windowed_layers: int = 0
    other_params: int = 0

    @property
    def params(self) -> int:
        """All of them; a tied head counts once."""
        return self.text_params + self.other_params

    @property
    def text_params(self) -> int:
        return self.layers_params + self.embedding_params * (1 if self.tied else 2) + self.hidden

    @property
    def embedding_params(self) -> int:
        """Of the embedding, and of the head."""
        return self.vocab * self.hidden

    @property
    def layers_params(self) -> int:
        """Of all layers, without embedding, head and last norm."""
        sparse = self.experts.layers if self.experts else 0
        common = self.norms + sum(one.params for one in self.attention)
        dense = sum(one.params for one in self.mlp)
        return self.layers * common + (self.layers - sparse) * dense + sparse * self.experts_params

    @property
    def experts_params(self) -> int:
        """Of one layer's mixture, its router included."""
        if self.experts is None:
            return 0
        one = self.experts
        routed = one.count * 3 * self.hidden * one.width
        return (
            routed + one.count * self.hidden + 3 * self.hidden * one.shared_width + one.shared_gate * self.hidden
        )

    @property
    def routed_params(self) -> int:
        """Of all experts that tokens are sent to."""
        one = self.experts
        return 0 if one is None else one.layers * one.count * 3 * self.hidden * one.width

    @property
    def attention_flops(self) -> int:
        """Operations of all layers' attention in a forward pass, for each token and token that it looks at: scores
        and their sum of values, 2 for each product."""
        of_value = self.latent.value_dim if self.latent is not None else self.head_dim
        return 2 * self.layers * self.heads * (self.head_dim + of_value)

    @property
    def layer_params(self) -> int:
        """Of the largest layer."""
        common = self.norms + sum(one.params for one in self.attention)
        return common + max(sum(one.params for one in self.mlp), self.experts_params)

    @property
    def cached(self) -> int:
        """Elements that one layer keeps of a token in the KV cache."""
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope_dim
        return 2 * self.kv_heads * self.head_dim


def with_all_params(shape: Shape, counted: int) -> Shape:
    """The shape with what its model's files hold beyond it, in `other_params`: they count `counted` parameters."""
    stored_head = shape.embedding_params if shape.tied else 0
    beyond = counted - shape.text_params
    return replace(shape, other_params=0 if beyond in (0, stored_head) else max(0, beyond))
