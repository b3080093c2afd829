"""In which types weights are published, told from run.yaml and the base model's configuration."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_orch.policies.weights.tensors import Tensor, served_types

MATRIX = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("flags", "config", "to"),
    [
        ({}, {"dtype": "bfloat16"}, "BF16"),
        ({}, {"torch_dtype": "float16"}, "F16"),
        ({"dtype": "auto"}, {"dtype": "float32"}, "BF16"),
        ({"dtype": None}, {"text_config": {"dtype": "bfloat16"}}, "BF16"),
        ({"dtype": "half"}, {"dtype": "bfloat16"}, "F16"),
        ({"dtype": "Float"}, {"dtype": "bfloat16"}, "F32"),
        ({"dtype": "bfloat16"}, {}, "BF16"),
        ({}, {}, None),
        ({}, {"dtype": "float8_e4m3fn"}, None),
        ({"dtype": "int4"}, {"dtype": "bfloat16"}, None),
        ({"quantization": "fp8"}, {"dtype": "bfloat16"}, None),
        ({"quantization": None}, {"dtype": "bfloat16"}, "BF16"),
        ({"hf_overrides": {"dtype": "float16"}}, {"dtype": "bfloat16"}, None),
        ({}, {"dtype": "bfloat16", "quantization_config": {}}, None),
        ({}, {"dtype": "bfloat16", "head_dtype": "float32"}, None),
    ],
)
def test_what_engines_round_to(flags: dict[str, Any], config: dict[str, Any], to: str | None) -> None:
    assert served_types(flags, config).to == to


@pytest.mark.parametrize(
    ("trained", "in_base", "published"),
    [
        (Tensor("F32", (4, 4)), Tensor("BF16", (4, 4)), "BF16"),
        (Tensor("F64", (4, 4)), None, "BF16"),
        (Tensor("BF16", (4, 4)), Tensor("BF16", (4, 4)), "BF16"),
        (Tensor("F16", (4, 4)), Tensor("BF16", (4, 4)), "F16"),  # no wider, no narrower: as it is
        (Tensor("F32", (4, 4)), Tensor("F32", (4, 4)), "F32"),  # a gate that the base model has wider
        (Tensor("F32", (4,)), Tensor("BF16", (4,)), "F32"),  # engines keep some vectors wider
        (Tensor("F32", ()), None, "F32"),
        (Tensor("I8", (4, 4)), None, "I8"),
        (Tensor("F8_E4M3", (4, 4)), None, "F8_E4M3"),
        (Tensor("F32", (4, 4)), Tensor("F8_E4M3", (4, 4)), "F32"),
    ],
)
def test_the_type_of_a_tensor(trained: Tensor, in_base: Tensor | None, published: str) -> None:
    base = {} if in_base is None else {MATRIX: in_base}
    assert served_types({}, {"dtype": "bfloat16"}, base).of({MATRIX: trained}) == {MATRIX: published}


def test_a_model_whose_files_are_all_float32_is_rounded_to_what_engines_take() -> None:
    served = served_types({}, {"dtype": "float32"}, {MATRIX: Tensor("F32", (4, 4))})
    assert served.of({MATRIX: Tensor("F32", (4, 4))}) == {MATRIX: "BF16"}


def test_names_that_a_base_model_leaves_out_the_prefix_of_are_its_own() -> None:
    served = served_types({}, {"dtype": "bfloat16"}, {"h.gate.weight": Tensor("F32", (4, 4))})
    assert served.of({"model.h.gate.weight": Tensor("F32", (4, 4))}) == {"model.h.gate.weight": "F32"}


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("model.layers.1.mlp.gate.weight", "F32"),  # GLM-4.5, whose files have it in bfloat16
        ("model.layers.1.feed_forward.router.weight", "F32"),
        ("model.layers.1.mamba.A_log", "F32"),
        ("model.layers.1.mlp.gate_proj.weight", "BF16"),
        ("model.layers.1.mlp.shared_expert_gate.weight", "BF16"),
    ],
)
def test_what_engines_widen_is_not_rounded(name: str, published: str) -> None:
    served = served_types({}, {"dtype": "bfloat16"}, {name: Tensor("BF16", (4, 4))})
    assert served.of({name: Tensor("F32", (4, 4))}) == {name: published}
