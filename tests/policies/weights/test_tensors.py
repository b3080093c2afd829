"""Which tensors a policy may have, and in which types they are published."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import to_json
from grpo_orch.policies.model.spec import Dataset, RunSpec, TrainerSpec
from grpo_orch.policies.serving.canary import Canary
from grpo_orch.policies.weights.tensors import Tensor, mismatch, served_types
from grpo_orch.tasks.machine.base_model import tensors_in
from grpo_orch.tasks.rollout.policy_check import PolicyCheck
from grpo_orch.tasks.rollout.vllm.server import PolicyRefused

LAYER = "model.layers.{}."
BASE = {
    "model.embed_tokens.weight": Tensor("BF16", (84, 64)),
    "model.norm.weight": Tensor("BF16", (64,)),
    "lm_head.weight": Tensor("BF16", (84, 64)),
    **{f"{LAYER.format(n)}self_attn.q_proj.weight": Tensor("BF16", (64, 64)) for n in range(3)},
    **{f"{LAYER.format(n)}mlp.down_proj.weight": Tensor("BF16", (64, 128)) for n in range(3)},
}
Q0 = "model.layers.0.self_attn.q_proj.weight"
FULL = {name: replace(tensor, dtype="F32") for name, tensor in BASE.items()}  # as a trainer publishes it


def without(*names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in FULL.items() if name not in names}


@pytest.mark.parametrize(
    ("published", "why"),
    [
        (FULL, ""),
        (BASE, ""),
        (without(Q0), f"missing tensors: {Q0}"),
        ({}, "missing tensors: lm_head.weight and 8 more"),
        (without("lm_head.weight"), "missing tensors: lm_head.weight"),
        ({**FULL, Q0: Tensor("F32", (64, 63))}, f"wrong shape: {Q0} is [64, 63], the model's is [64, 64]"),
        ({**FULL, Q0: Tensor("I8", (64, 64))}, f"quantised weights: {Q0} is of I8"),
        ({**FULL, Q0: Tensor("U8", (2048, 1))}, f"quantised weights: {Q0} is of U8"),
        ({**FULL, Q0: Tensor("F8_E4M3", (64, 64))}, f"quantised weights: {Q0} is of F8_E4M3"),
        ({**FULL, f"{Q0}.absmax": Tensor("F32", (64,))}, f"quantised weights: {Q0}.absmax"),
        (
            {**FULL, f"{Q0}.quant_state.bitsandbytes__nf4": Tensor("U8", (99,))},
            f"quantised weights: {Q0}.quant_state.bitsandbytes__nf4",
        ),
        (
            {f"base_model.model.{n}": t for n, t in FULL.items()},
            "unmerged adapters: base_model.model.lm_head.weight",
        ),
        (
            {**FULL, "model.layers.0.self_attn.q_proj.lora_A.default.weight": Tensor("F32", (8, 64))},
            "unmerged adapters: model.layers.0.self_attn.q_proj.lora_A.default.weight",
        ),
        (
            {**without(Q0), "model.layers.0.self_attn.q_proj.base_layer.weight": FULL[Q0]},
            "unmerged adapters: model.layers.0.self_attn.q_proj.base_layer.weight",
        ),
        (
            {**FULL, "model.layers.3.mlp.down_proj.weight": Tensor("F32", (64, 128))},
            "a tensor that the model does not have: model.layers.3.mlp.down_proj.weight",
        ),
    ],
)
def test_tensor_differences_name_shape_and_type(published: dict[str, Tensor], why: str) -> None:
    assert mismatch(published, BASE) == why


def test_tensors_unused_by_the_trainer_may_be_missing() -> None:
    tied = without("lm_head.weight")
    assert mismatch(tied, BASE, tied=True) == ""
    bare = {name: tensor for name, tensor in BASE.items() if name != "lm_head.weight"}
    assert mismatch(tied, bare) == ""
    assert mismatch(FULL, bare, tied=True) == ""  # said twice, as where weights are divided over processes
    assert mismatch(FULL, bare) == "a tensor that the model does not have: lm_head.weight"
    older = {**BASE, "model.layers.0.self_attn.rotary_emb.inv_freq": Tensor("F32", (32,))}
    assert mismatch(FULL, older) == ""
    more = {**BASE, "mtp.layers.0.mlp.down_proj.weight": Tensor("BF16", (64, 128))}
    assert mismatch(FULL, more) == "missing tensors: mtp.layers.0.mlp.down_proj.weight"
    assert mismatch(FULL, more, unused=[r"^mtp.*"]) == ""


def test_a_base_whose_files_leave_a_prefix_out_is_the_same_model() -> None:
    gpt2 = {"wte.weight": Tensor("F32", (84, 64)), "h.0.attn.bias": Tensor("F32", (1, 1, 64, 64))}
    assert mismatch({"transformer.wte.weight": Tensor("F32", (84, 64))}, gpt2) == ""
    assert mismatch({"transformer.wte.weight": Tensor("F32", (84, 63))}, gpt2).startswith("wrong shape")


def test_quantised_base_model_is_matched_in_kind() -> None:
    base = {**BASE, Q0: Tensor("F8_E4M3", (64, 64)), f"{Q0}_scale_inv": Tensor("F32", (1, 1))}
    assert mismatch(base, base) == ""
    assert mismatch({**base, Q0: Tensor("I8", (64, 64))}, base).startswith("quantised weights")


@pytest.mark.parametrize(
    ("name", "dtype", "why"),
    [("model.a.weight", "F32", ""), ("model.a.SCB", "F32", "quantised"), ("model.a.weight", "I8", "quantised")],
)
def test_obvious_non_weight_is_found_without_base_files(name: str, dtype: str, why: str) -> None:
    assert mismatch({name: Tensor(dtype, (1,))}, {}).startswith(why)


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file without its data."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {
        n: {"dtype": t.dtype, "shape": t.shape, "data_offsets": [0, 0]} for n, t in tensors.items()
    }
    data = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(data).to_bytes(8, "little") + data)


def check_of(folder: Path, tied: bool | None = None) -> PolicyCheck:
    config = {} if tied is None else {"tie_word_embeddings": tied}
    (folder / "base").mkdir(parents=True, exist_ok=True)
    (folder / "base" / "config.json").write_text(json.dumps(config))
    trainer = TrainerSpec(model="base", dataset=Dataset(path="json"), reward_funcs=())
    return PolicyCheck(RunSpec(name="t", storage="memory://t", trainer=trainer, grpo={}, workdir=str(folder)))


def test_compared_files_are_those_that_engines_load(tmp_path: Path) -> None:
    base = tmp_path / "base"
    names = sorted(BASE)
    write(base / "model-00001-of-00002.safetensors", {name: BASE[name] for name in names[:4]})
    write(base / "model-00002-of-00002.safetensors", {name: BASE[name] for name in names[4:]})
    write(base / "consolidated.safetensors", {"layers.0.attention.wq.weight": Tensor("BF16", (64, 64))})
    parts = {name: f"model-0000{1 + (name in names[4:])}-of-00002.safetensors" for name in names}
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    assert tensors_in(base) == BASE
    write(tmp_path / "whole" / "model.safetensors", FULL)
    write(tmp_path / "part" / "model.safetensors", without(Q0))
    check = check_of(tmp_path)
    assert check.verify(tmp_path / "whole") is None
    with pytest.raises(PolicyRefused, match="missing tensors") as caught:
        check.verify(tmp_path / "part")
    assert not caught.value.touched


def test_head_may_be_missing_if_base_model_ties_it(tmp_path: Path) -> None:
    write(tmp_path / "base" / "model.safetensors", BASE)
    write(tmp_path / "policy" / "model.safetensors", without("lm_head.weight"))
    assert check_of(tmp_path, tied=True).verify(tmp_path / "policy") is None
    assert check_of(tmp_path, tied=None).verify(tmp_path / "policy") is None, "as older files leave it out"
    with pytest.raises(PolicyRefused, match="lm_head"):
        check_of(tmp_path, tied=False).verify(tmp_path / "policy")


def test_canary_comes_with_files_and_damaged_one_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "base" / "model.safetensors", {**BASE, "mtp.weight": Tensor("BF16", (1,))})
    write(tmp_path / "policy" / "model.safetensors", FULL)
    canary = Canary([1, 2], [None], "bfloat16", 2, ["^mtp"])
    (tmp_path / "policy" / layout.CANARY).write_bytes(to_json(canary))
    assert check_of(tmp_path).verify(tmp_path / "policy") == canary
    for damaged in (b"{}", b"\xff", b""):
        (tmp_path / "policy" / layout.CANARY).write_bytes(damaged)
        with pytest.raises(PolicyRefused, match="canary"):
            check_of(tmp_path).verify(tmp_path / "policy")


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 40, (4).to_bytes(8, "little") + b"nope"])
def test_file_without_safetensors_format_is_refused(tmp_path: Path, content: bytes) -> None:
    write(tmp_path / "base" / "model.safetensors", BASE)
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "model.safetensors").write_bytes(content)
    with pytest.raises(PolicyRefused, match="unreadable"):
        check_of(tmp_path).verify(tmp_path / "policy")


# In which types weights are published, told from run.yaml and the base model's configuration.

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
def test_dtypes_that_engines_round_to(flags: dict[str, Any], config: dict[str, Any], to: str | None) -> None:
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


def test_float32_model_is_rounded_to_what_engines_take() -> None:
    served = served_types({}, {"dtype": "float32"}, {MATRIX: Tensor("F32", (4, 4))})
    assert served.of({MATRIX: Tensor("F32", (4, 4))}) == {MATRIX: "BF16"}


def test_names_without_the_base_models_prefix_are_its_own() -> None:
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
def test_weights_that_engines_widen_are_not_rounded(name: str, published: str) -> None:
    served = served_types({}, {"dtype": "bfloat16"}, {name: Tensor("BF16", (4, 4))})
    assert served.of({name: Tensor("F32", (4, 4))}) == {name: published}
