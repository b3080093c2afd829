"""The kinds of models whose shapes are known, by `model_type` (transformers 5.19, `configuration_*.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What config.json does not say of its kind.

    Attributes:
        defaults: what it may leave out.
        tied: whether the head is the embedding where nothing is said.
        qkv_bias: whether queries, keys and values have a bias.
        reads_bias: whether `attention_bias` and `mlp_bias` count.
        head_norms: whether each head's queries and keys are normalised.
        norms: of a layer, each as wide as the hidden state.
        fused: whether queries, keys and values are one linear layer, and gate and up.
        windows: whether a `sliding_window` that is set is used.
        full_every: every so many layers one looks back over everything; 0: none.
    """

    defaults: Mapping[str, int] = field(default_factory=dict)
    tied: bool = False
    qkv_bias: bool = False
    reads_bias: bool = False
    head_norms: bool = False
    norms: int = 2
    fused: bool = False
    experts: bool = False
    shared_gate: bool = False
    latent: bool = False
    windows: bool = False
    full_every: int = 0


# A text_config is written without what is as usual.
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
    "qwen2_moe": Family(qkv_bias=True, experts=True, shared_gate=True),
    "qwen3": Family(reads_bias=True, head_norms=True, defaults={"head_dim": 128}),
    "qwen3_vl_text": Family(reads_bias=True, head_norms=True, defaults={"head_dim": 128}),
    "qwen3_moe": Family(reads_bias=True, head_norms=True, experts=True),
    "gemma": Family(tied=True, reads_bias=True, defaults={"head_dim": 256}),
    "gemma2": Family(tied=True, reads_bias=True, norms=4, windows=True, full_every=2, defaults={"head_dim": 256}),
    "gemma3_text": Family(
        tied=True, reads_bias=True, norms=4, head_norms=True, windows=True, full_every=6, defaults=GEMMA_3
    ),
    "phi3": Family(fused=True, windows=True),
    "deepseek_v3": Family(reads_bias=True, experts=True, latent=True),
}
