"""The shipped key tables against the installed packages, and our checks against TRL's own."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.orchestrator.config.foreign_keys import grpo_table, vllm_table
from grpo_orch.orchestrator.config.load import ConfigError, load_spec
from tests.generators import config_tables as make

FILES = [*(source[0] for source in make.SOURCES), make.VLLM_FILE]


@pytest.fixture(scope="module")
def installed() -> dict[str, dict[str, Any]]:
    return make.tables()


@pytest.mark.parametrize("file", FILES)
def test_shipped_table_equals_the_installed_package(installed: dict[str, dict[str, Any]], file: str) -> None:
    shipped = json.loads((make.FOLDER / file).read_text())
    assert shipped == json.loads(json.dumps(installed[file])), "run python -m tests.generators.config_tables"


def test_every_key_that_we_refuse_exists() -> None:
    from grpo_orch.orchestrator.config import foreign_keys as keys

    for table in (keys.grpo_table(), keys.vllm_table(), keys.lora_table()):
        assert set(table.refused) <= set(table.keys)
        assert not set(table.removed) & set(table.keys)


def run_yaml(folder: Path, grpo: dict[str, Any]) -> Path:
    (folder / "rewards.py").write_text("def score(completions, **kwargs):\n    return [0.0] * len(completions)\n")
    evaluated = {"eval_dataset": "some/dataset"} if "eval_strategy" in grpo else {}
    document = {
        "name": "oracle",
        "storage": "./run",
        "trainer": {"model": "some/model", "dataset": "some/data", "reward_funcs": "rewards.score", **evaluated},
        "grpo": grpo,
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(document))  # JSON is YAML
    return path


def accepted_by_us(path: Path) -> bool:
    try:
        load_spec(path)
    except ConfigError:
        return False
    return True


BATCH_KEYS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "num_generations",
)
BATCHES = [
    {key: value for key, value in zip(BATCH_KEYS, values, strict=True) if value is not None}
    for values in itertools.product((None, 1, 4, 6), (None, 4), (None, 3), (None, 8, 12), (None, 1, 2, 4))
]
EVALUATIONS = [
    {"eval_strategy": "steps", "eval_steps": 5, "num_generations": 4, "per_device_eval_batch_size": batch} | more
    for batch in (1, 4, 6, 8)
    for more in ({}, {"num_generations_eval": 1}, {"num_generations_eval": 3}, {"num_generations_eval": 8})
]
OTHERS: list[dict[str, Any]] = [
    {"fp16": True},
    {"scale_rewards": False},
    {"scale_rewards": "batch"},
    {"auto_find_batch_size": True},
    {"loss_type": "grpo", "lr_scheduler_type": "constant", "optim": "adamw_torch"},
    {"lr_scheduler_type": "constnat"},
    {"optim": "adam"},
    {"eval_strategy": "sometimes", "eval_steps": 5},
]


def accepted_by_trl(folder: Path, grpo: dict[str, Any]) -> bool:
    from trl import GRPOConfig

    try:
        GRPOConfig(output_dir=str(folder / "out"), **({"use_cpu": True, "bf16": False} | grpo))
    except ValueError:
        return False
    return True


def test_trl_accepts_what_we_accept(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [*BATCHES, *EVALUATIONS, *OTHERS]
    accepted = [(accepted_by_us(run_yaml(tmp_path, grpo)), accepted_by_trl(tmp_path, grpo)) for grpo in cases]
    assert [grpo for grpo, (by_us, by_trl) in zip(cases, accepted, strict=True) if by_us != by_trl] == []


def test_the_generation_window_is_trl_s(tmp_path: Path) -> None:
    """Steps at which TRL generates anew, by its own rule, are the multiples of our window."""
    from trl import GRPOConfig

    from grpo_orch.orchestrator.config.effective import EffectiveRun
    from grpo_orch.orchestrator.config.problems import Findings

    for accumulation, per_generation, iterations in itertools.product((1, 2, 4, 6), (None, 1, 4, 6), (1, 2, 3)):
        grpo = {
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": accumulation,
            "num_iterations": iterations,
        }
        if per_generation is not None:
            grpo["steps_per_generation"] = per_generation
        config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **grpo)
        every = config.steps_per_generation * config.num_iterations  # GRPOTrainer._prepare_inputs
        generating = [step for step in range(1, 40) if step * accumulation % every == 0]
        window = EffectiveRun({"grpo": grpo}, Findings("run.yaml", {(): 1})).window
        assert generating == list(range(window, 40, window)), grpo


def test_node_versions_equal_the_documentation() -> None:
    from grpo_orch.tasks.rollout.vllm import flags as vllm_flags
    from grpo_orch.tasks.trl import trl_grpo

    text = (Path(__file__).parents[2] / "docs" / "run-yaml.md").read_text()
    table = grpo_table()
    trainer = {**trl_grpo.DEFAULTS, **trl_grpo.EVALUATION_DEFAULTS}
    said = {
        key: value for key, value in trainer.items() if key not in table.refused and value != table.default(key)
    }
    for key, value in {**said, **vllm_flags.DEFAULTS}.items():
        assert f"| `{key}` | {value} |" in text
    assert set(vllm_flags.FIXED) <= set(vllm_table().refused)
    assert set(trl_grpo.FIXED) <= set(table.refused)


def test_trl_keeps_the_defaults_that_we_compute_with() -> None:
    from trl import GRPOConfig

    config = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False)
    assert config.num_generations == grpo_table().default("num_generations")
    assert config.beta == grpo_table().default("beta") == 0.0
