"""Shapes against transformers' own models, built without content."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_orch.policies.sizing.shapes import FAMILIES, shape_of, with_all_params

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
MIXED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OTHERS: dict[str, list[dict[str, Any]]] = {
    "llama": [{"attention_bias": True, "mlp_bias": True}, {"head_dim": 16}, {"tie_word_embeddings": True}],
    "mistral": [{"head_dim": 12, "sliding_window": 8}],
    "mixtral": [{"num_local_experts": 4, "num_experts_per_tok": 2}],
    "qwen3": [{"attention_bias": True, "tie_word_embeddings": True}],
    "qwen3_moe": [{"decoder_sparse_step": 2, **MIXED}, {"mlp_only_layers": [1], **MIXED}],
}
WITH_EYES = {"qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text"}


@pytest.mark.parametrize("kind", sorted(FAMILIES.keys() - WITH_EYES))
def test_parameters_equal_transformers_model(kind: str) -> None:
    for other in ({}, *OTHERS.get(kind, [])):
        config = AutoConfig.for_model(kind, **{**SIZES, **other})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        written = config.to_dict()
        assert shape_of(written).params == sum(one.numel() for one in model.parameters()), (kind, other)
        _check_layers(shape_of(written), model)


def _check_layers(shape: Any, model: Any) -> None:
    """Each linear layer that the shape names is there, with these sizes."""
    found = {
        (name.rpartition(".")[2], one.in_features, one.out_features)
        for name, one in model.named_modules()
        if isinstance(one, torch.nn.Linear)
    }
    dense = shape.mlp if shape.experts is None or shape.experts.layers < shape.layers else ()
    assert {(one.name, one.inputs, one.outputs) for one in (*shape.attention, *dense)} <= found


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_the_text_part_of_a_model_that_sees(kind: str) -> None:
    from transformers import AutoModelForImageTextToText

    config = AutoConfig.for_model(kind)
    for name, value in {**SIZES, "layer_types": ["full_attention"] * 3}.items():
        setattr(config.text_config, name, value)
    config.vision_config.depth = config.vision_config.num_hidden_layers = 1
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    counted = sum(one.numel() for one in model.parameters())
    shape = shape_of(config.to_dict())
    text = [*model.model.language_model.parameters(), *model.lm_head.parameters()]
    assert shape.params == sum(one.numel() for one in {id(one): one for one in text}.values())
    assert with_all_params(shape, counted).params == counted
