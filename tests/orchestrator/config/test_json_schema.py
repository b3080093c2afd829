"""The JSON Schema of run.yaml: it accepts what `validate` accepts, and refuses most mistakes in single keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from grpo_orch.orchestrator.cli.prepare import RECIPES, init_text
from grpo_orch.orchestrator.config.json_schema import json_schema
from grpo_orch.orchestrator.config.load import ConfigError
from tests.generators.config_world import VALID, changed, schema_problems
from tests.orchestrator.config.test_validate_messages import Case, cases

ROOT = Path(__file__).parents[3]
FILES = sorted({*RECIPES.glob("*/*.yaml"), *(ROOT / "examples").glob("*/*.yaml")})
# Of the invalid cases of validated.txt. The others break rules between keys or of texts, name files or functions
# that do not exist, or do not fit this machine.
REFUSED_MIN = 53


def problems(tmp_path: Path, *changes: tuple[str, str]) -> list[str]:
    (tmp_path / "run.yaml").write_text(changed(*changes))
    return schema_problems(tmp_path / "run.yaml")


def test_schema_is_valid_draft_2020_12() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_schema_accepts_examples_and_recipes(file: Path) -> None:
    assert schema_problems(file) == []


def test_schema_accepts_template_and_valid_file(tmp_path: Path) -> None:
    for text in (init_text("my-run"), VALID):
        (tmp_path / "run.yaml").write_text(text)
        assert schema_problems(tmp_path / "run.yaml") == []


def invalid() -> list[Case]:
    return [case for case in cases() if any(line.startswith("! ") for line in case.said)]


def test_schema_refuses_many_invalid_files(tmp_path: Path) -> None:
    refused = [case.name for case in invalid() if _is_refused(case, tmp_path)]
    assert len(refused) >= REFUSED_MIN, refused


def _is_refused(case: Case, tmp_path: Path) -> bool:
    (tmp_path / "run.yaml").write_text(changed(*case.changes))
    try:
        return bool(schema_problems(tmp_path / "run.yaml"))
    except ConfigError:  # not YAML
        return False


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("replicas: 2", "replica: 2", "rollout"),
        ("max_steps: 40", "max_steps: forty", "grpo.max_steps"),
        ("max_steps: 40", "use_vllm: true", "grpo"),
        ("max_steps: 40", "loss_type: drgrpo", "grpo.loss_type"),
        ("num_generations: 8", "num_generations: 1", "grpo.num_generations"),
        ("replicas: 2", "replicas: -1", "rollout.replicas"),
        ("max-model-len: 256", "max-num-seqs: many", "rollout.vllm.max-num-seqs"),
        ("name: demo", "name: Demo!", "name"),
        ("storage: ./run", "storage: {uri: ./run}", "storage"),
        ("  model: ./model\n", "", "trainer"),
        ("storage: ./run\n", "", ""),
        ("  reward_funcs: [rewards.digit_share]\n", "", "trainer"),
    ],
)
def test_schema_refuses(tmp_path: Path, old: str, new: str, where: str) -> None:
    assert [line.partition(":")[0] for line in problems(tmp_path, (old, new))] == [where]


def test_file_that_extends_may_lack_and_remove_keys(tmp_path: Path) -> None:
    (tmp_path / "over.yaml").write_text("extends: run.yaml\ntrainer: {model: null, dataset: {split: test}}\n")
    assert schema_problems(tmp_path / "over.yaml") == []


def test_schema_describes_every_plain_key_of_ours() -> None:
    foreign = {"grpo", "vllm", "resources", "peft", "accelerate", "storage"}

    def undescribed(schema: dict[str, Any], path: str) -> list[str]:
        found = []
        for key, value in schema.get("properties", {}).items():
            if key in foreign:
                continue
            nested = [part for part in (value, *value.get("anyOf", ())) if "properties" in part]
            if not nested and not value.get("description"):
                found.append(f"{path}{key}")
            found += [each for part in nested for each in undescribed(part, f"{path}{key}.")]
        return found

    assert undescribed(json_schema()["else"], "") == []


def test_schema_describes_keys() -> None:
    whole: dict[str, Any] = json_schema()["else"]["properties"]
    description = whole["rollout"]["properties"]["env"]["description"]
    assert description.startswith(
        "Environment of the vLLM process; numbers keep their spelling. `VLLM_CACHE_ROOT`"
    )
    assert whole["trainer"]["properties"]["agent"]["anyOf"][0]["properties"]["turns"]["maximum"] == 1000
    assert ".md" not in json.dumps(json_schema())  # links are for the documentation
    assert whole["grpo"]["description"].startswith("Each key is a key of GRPOConfig (TRL ")
    assert whole["grpo"]["properties"]["epsilon"] == {"type": "number"}
    assert whole["rollout"]["properties"]["vllm"]["properties"]["enforce-eager"]["type"] == "boolean"
