"""Where a model is looked for, and what is said when it cannot be had."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_orch.orchestrator.config.model_size import SizeUnknown, find_config, find_size
from grpo_orch.orchestrator.config.notices import find_notices
from grpo_orch.orchestrator.config.problems import Findings
from grpo_orch.orchestrator.plan.gather import make_plan
from grpo_orch.orchestrator.plan.machines import active_params, cached_lookup, find_model
from grpo_orch.orchestrator.plan.prices import PriceBook
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.sizing.shapes import shape_of
from grpo_orch.policies.weights.disk_sizes import ModelSize
from tests.generators.model_configs import CONFIGS, QWEN_3_30B_A3B, put_in_cache
from tests.orchestrator.plan.recipes import size_of, spec_of

NAME = "Qwen/Qwen2.5-32B-Instruct"


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def snapshot(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "hub" / f"models--{NAME.replace('/', '--')}" / "snapshots").iterdir()
    return found


def test_config_json_in_the_hubs_cache_is_enough(tmp_path: Path) -> None:
    spec = spec_of("qwen-32b")
    assert "HF_HUB_OFFLINE" in find_model(spec, find_size).unknown
    put_in_cache(tmp_path / "hub")
    found = find_model(spec, find_size)
    assert (found.params, found.stored_bytes, found.unknown) == (32_763_876_352, 65_527_752_704, "")
    assert find_config(spec) == CONFIGS[NAME]


def test_complete_cached_snapshot_gives_size_and_partial_not(tmp_path: Path) -> None:
    put_in_cache(tmp_path / "hub")
    folder = snapshot(tmp_path)
    index = {"metadata": {"total_size": 65_527_752_704}, "weight_map": {"a": "1.bin", "b": "2.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "1.bin").touch()
    with pytest.raises(SizeUnknown, match="HF_HUB_OFFLINE"):
        find_size(spec_of("qwen-32b"))
    (folder / "2.bin").touch()
    assert find_size(spec_of("qwen-32b")) == ModelSize(32_763_876_352, 65_527_752_704, CONFIGS[NAME])


def test_folder_with_config_json_only_has_no_size(tmp_path: Path) -> None:
    spec = spec_of("qwen-32b")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIGS[NAME]))
    here = replace(spec, workdir=str(tmp_path), trainer=replace(spec.trainer, model="model"))
    assert find_model(here, find_size).params == 32_763_876_352
    (tmp_path / "model" / "config.json").write_text('{"model_type": "mamba"}')
    assert "mamba" in find_model(here, find_size).unknown


@pytest.mark.parametrize(
    "odd",
    [
        {"vocab_size": "152064"},
        {"vocab_size": None},
        {"architectures": 1},
        {"architectures": [[]]},
        {"text_config": [1]},
        {"text_config": {"max_position_embeddings": "x"}},
        {"max_position_embeddings": "32k"},
        {"num_key_value_heads": 0},
        {"num_key_value_heads": False},
        {"hidden_size": True},
        {"model_type": "mixtral", "mlp_only_layers": 1, "num_local_experts": 2, "num_experts_per_tok": 1},
        {"model_type": "mixtral", "mlp_only_layers": [[1]], "num_local_experts": 2, "num_experts_per_tok": 1},
        {"model_type": ["qwen2"]},
    ],
)
def test_invalid_config_json_ends_no_plan(odd: dict[str, object], tmp_path: Path) -> None:
    spec = spec_of("qwen-32b")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**CONFIGS[NAME], **odd}))
    here = replace(spec, workdir=str(tmp_path), trainer=replace(spec.trainer, model="model"))
    find_notices(here, find_config(here), Findings("run.yaml", {(): 1}))
    assert make_plan(here, find_size, PriceBook()).warnings is not None


def test_unavailable_config_json_is_reported() -> None:
    """The hub tells the size of a gated model to everybody, and its config.json to those who have its licence."""
    unknown = find_model(spec_of("qwen-32b"), lambda _: ModelSize(7, 14)).unknown
    assert "config.json is not available" in unknown
    assert "HF_TOKEN" in unknown


@pytest.mark.parametrize("where", ["grpo", "accelerate", "text"])
def test_deepspeeds_file_gives_the_division_of_weights(where: str, tmp_path: Path) -> None:
    spec, said = spec_of("math-two-gpus"), {"zero_optimization": {"stage": 3}}
    named = json.dumps(said) if where == "text" else "ds.json"
    own = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    trainer = replace(spec.trainer, resources={"accelerators": "H100:8"})
    here = replace(spec, workdir=str(tmp_path), trainer=trainer)
    if where == "accelerate":
        here = replace(here, trainer=replace(trainer, accelerate=own))
    else:
        here = replace(here, grpo={**spec.grpo, "deepspeed": named})
    if where != "text":
        blind = make_plan(here, size_of, PriceBook())
        assert (blind.trainer.memory, blind.trainer.fits) == ({}, None)
        assert any("ds.json" in one for one in blind.unknown)
    (tmp_path / "ds.json").write_text(json.dumps(said))
    plan = make_plan(here, size_of, PriceBook())
    assert plan.model.params is not None
    assert plan.trainer.memory["weights"] == pytest.approx(2 * plan.model.params / 8, rel=1e-6)
    assert not any("ds.json" in one for one in plan.unknown)


def test_hub_is_asked_once() -> None:
    asked = []

    def find(spec: RunSpec) -> ModelSize:
        asked.append(spec)
        raise SizeUnknown("away")

    once, spec = cached_lookup(find), spec_of("qwen-32b")
    for _ in range(2):
        with pytest.raises(SizeUnknown, match="away"):
            once(spec)
    assert len(asked) == 1
    kept = cached_lookup(size_of)
    assert kept(spec) is kept(spec)


def test_active_parameters_exclude_embedding_and_idle_experts() -> None:
    """Qwen2.5-32B has a head beside its embedding. Of Qwen3-30B-A3B's 3.35 billion, 0.31 are the embedding."""
    shape = shape_of(CONFIGS[NAME])
    assert active_params(shape) == shape.params - 152_064 * 5120
    assert active_params(shape_of(QWEN_3_30B_A3B)) == pytest.approx(3.35e9 - 0.31e9, rel=0.005)
