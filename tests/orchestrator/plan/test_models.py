"""Where a model is looked for, and what is said when it cannot be had."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.config.sizes.model import NotKnown, find_config, find_size
from orchestrator.plan.models import active_params, asked_once, know_model
from policies.model.spec import RunSpec
from policies.sizing.shapes import shape_of
from policies.weights.disks import ModelSize
from tests.generators.model_configs import CONFIGS, put_in_cache
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
    assert "HF_HUB_OFFLINE" in know_model(spec, find_size).unknown
    put_in_cache(tmp_path / "hub")
    found = know_model(spec, find_size)
    assert (found.params, found.stored_bytes, found.unknown) == (32_763_876_352, 65_527_752_704, "")
    assert find_config(spec) == CONFIGS[NAME]


def test_a_whole_snapshot_in_the_cache_tells_its_size_and_half_of_one_does_not(tmp_path: Path) -> None:
    put_in_cache(tmp_path / "hub")
    folder = snapshot(tmp_path)
    index = {"metadata": {"total_size": 65_527_752_704}, "weight_map": {"a": "1.bin", "b": "2.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "1.bin").touch()
    with pytest.raises(NotKnown, match="HF_HUB_OFFLINE"):
        find_size(spec_of("qwen-32b"))
    (folder / "2.bin").touch()
    assert find_size(spec_of("qwen-32b")) == ModelSize(32_763_876_352, 65_527_752_704, CONFIGS[NAME])


def test_a_folder_with_config_json_alone(tmp_path: Path) -> None:
    spec = spec_of("qwen-32b")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIGS[NAME]))
    here = replace(spec, workdir=str(tmp_path), trainer=replace(spec.trainer, model="model"))
    assert know_model(here, find_size).params == 32_763_876_352
    (tmp_path / "model" / "config.json").write_text('{"model_type": "mamba"}')
    assert "mamba" in know_model(here, find_size).unknown


def test_the_hub_is_asked_once() -> None:
    asked = []

    def find(spec: RunSpec) -> ModelSize:
        asked.append(spec)
        raise NotKnown("away")

    once, spec = asked_once(find), spec_of("qwen-32b")
    for _ in range(2):
        with pytest.raises(NotKnown, match="away"):
            once(spec)
    assert len(asked) == 1
    kept = asked_once(size_of)
    assert kept(spec) is kept(spec)


def test_what_a_token_goes_through() -> None:
    """Qwen2.5-32B has a head beside its embedding; Mixtral takes two of eight experts: 12.9 of 46.7 billion, its
    embedding of 0.13 not among them."""
    shape = shape_of(CONFIGS[NAME])
    assert active_params(shape) == shape.params - 152_064 * 5120
    mixtral = {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
    }
    assert active_params(shape_of(mixtral)) == pytest.approx(12.88e9 - 0.13e9, rel=0.005)
