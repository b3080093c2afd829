"""What `validate` reads of lengths in a model's own folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.config.load import ConfigError, load_spec
from tests.generators.config_world import changed, furnish

FLAG = ("max-model-len: 256", "max-num-seqs: 8")
LENGTH = ("max_completion_length: 16", "max_completion_length: 128")


def lines(folder: Path, *changes: tuple[str, str]) -> list[str]:
    """The problems of a run.yaml whose model has 128 positions."""
    furnish(folder)
    (folder / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 128}))
    (folder / "run.yaml").write_text(changed(*changes))
    try:
        load_spec(folder / "run.yaml")
    except ConfigError as error:
        return [f"{found.key}: {found.message}" for found in error.problems]
    return []


def test_longer_context_than_the_models_is_refused(tmp_path: Path) -> None:
    assert lines(tmp_path) == [
        "rollout.vllm.max-model-len: 256 is above the model's own context, and vLLM does not start"
        "; expected at most 128, its max_position_embeddings"
    ]


@pytest.mark.parametrize("replicas", ["2", "0"])
def test_completions_as_long_as_the_models_context_are_refused(tmp_path: Path, replicas: str) -> None:
    changes = [FLAG, LENGTH, ("  replicas: 2", f"  replicas: {replicas}")]
    found = [line for line in lines(tmp_path, *changes) if line.startswith("grpo.max_completion_length")]
    assert found == [
        "grpo.max_completion_length: 128 leaves no room for a prompt in the model's context"
        "; expected less than 128, its max_position_embeddings"
    ]


def test_completions_shorter_than_the_models_context_are_taken(tmp_path: Path) -> None:
    assert lines(tmp_path, FLAG) == []
