"""Which tensors are those that an engine expects, told from their names, shapes and types alone."""

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
from grpo_orch.policies.weights.tensors import Tensor, mismatch
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
def test_tensors_are_told_by_name_shape_and_type(published: dict[str, Tensor], why: str) -> None:
    assert mismatch(published, BASE) == why


def test_what_the_trainer_has_no_use_for_may_be_missing() -> None:
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


def test_a_base_that_is_itself_quantised_is_met_in_kind() -> None:
    base = {**BASE, Q0: Tensor("F8_E4M3", (64, 64)), f"{Q0}_scale_inv": Tensor("F32", (1, 1))}
    assert mismatch(base, base) == ""
    assert mismatch({**base, Q0: Tensor("I8", (64, 64))}, base).startswith("quantised weights")


@pytest.mark.parametrize(
    ("name", "dtype", "why"),
    [("model.a.weight", "F32", ""), ("model.a.SCB", "F32", "quantised"), ("model.a.weight", "I8", "quantised")],
)
def test_without_the_base_models_files_what_is_plainly_no_weight_is_found(name: str, dtype: str, why: str) -> None:
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


def test_the_files_that_engines_load_are_the_ones_that_are_compared(tmp_path: Path) -> None:
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


def test_the_head_may_be_missing_where_the_base_model_says_that_it_is_tied(tmp_path: Path) -> None:
    write(tmp_path / "base" / "model.safetensors", BASE)
    write(tmp_path / "policy" / "model.safetensors", without("lm_head.weight"))
    assert check_of(tmp_path, tied=True).verify(tmp_path / "policy") is None
    assert check_of(tmp_path, tied=None).verify(tmp_path / "policy") is None, "as older files leave it out"
    with pytest.raises(PolicyRefused, match="lm_head"):
        check_of(tmp_path, tied=False).verify(tmp_path / "policy")


def test_the_canary_comes_with_the_files_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
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
def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    write(tmp_path / "base" / "model.safetensors", BASE)
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "model.safetensors").write_bytes(content)
    with pytest.raises(PolicyRefused, match="unreadable"):
        check_of(tmp_path).verify(tmp_path / "policy")
