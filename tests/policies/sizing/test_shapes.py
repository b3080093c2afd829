"""Shapes from config.json, held to the parameters that public models' own files have."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_orch.policies.sizing.shapes import UnknownShape, shape_of, with_all_params
from tests.generators import model_configs as known


@pytest.mark.parametrize(
    ("config", "params"),
    [
        # As the hub's pages of these models count their safetensors files.
        (known.QWEN_2_5_32B, 32_763_876_352),
        (known.QWEN_2_5_7B, 7_615_616_512),
        (known.QWEN_2_5_1_5B, 1_543_714_304),
        (known.LLAMA_3_2_1B, 1_235_814_400),
        (known.QWEN_3_30B_A3B, 30_532_122_624),
    ],
    ids=lambda one: one["model_type"] if isinstance(one, dict) else "",
)
def test_parameters_equal_the_models_files(config: dict[str, Any], params: int) -> None:
    assert shape_of(config).params == params


def test_vision_model_has_its_text_shape_and_extra_weights() -> None:
    text = {name: value for name, value in known.QWEN_2_5_7B.items() if name != "tie_word_embeddings"}
    shape = shape_of({"model_type": "some_vl", "text_config": text, "tie_word_embeddings": True})
    assert shape.tied
    seen = with_all_params(shape, shape.text_params + 600_000_000)
    assert (seen.other_params, seen.params) == (600_000_000, shape.text_params + 600_000_000)


def test_stored_tied_head_is_no_extra_weight() -> None:
    shape = shape_of(known.QWEN_2_5_1_5B)
    assert with_all_params(shape, shape.params + shape.embedding_params) == shape


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "mamba2", "hidden_size": 8}, "model_type mamba2"),
        ({}, "without model_type"),
        ({"model_type": "llama"}, "has no hidden_size"),
        ({**known.LLAMA_3_2_1B, "vocab_size": None}, "has no vocab_size"),
        ({**known.LLAMA_3_2_1B, "num_attention_heads": 0}, "a size of 0"),
    ],
)
def test_unknown_shape_is_reported(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnknownShape, match=said):
        shape_of(config)


def test_every_sixth_layer_of_gemma_3_looks_back_over_all() -> None:
    """27B: 62 layers, 10 of them whole, as its report has it (arXiv 2503.19786)."""
    text = {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "sliding_window": 1024,
    }
    shape = shape_of({"model_type": "gemma3", "text_config": text})
    assert (shape.window, shape.windowed_layers) == (1024, 52)
    assert shape.params == pytest.approx(27.01e9, rel=1e-3)
