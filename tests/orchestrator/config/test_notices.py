"""`validate` prints notices and is content, and tells the same to programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.generators.config_world import changed, furnish
from tests.rigs.command_line import Cli

NO_KL = (
    "no KL is logged, so divergence is detected by gradient norm, entropy and reward only; "
    "set e.g. grpo.beta: 0.02"
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with a run.yaml of which there is something to say."""
    run_yaml = furnish(tmp_path)
    run_yaml.write_text(changed(("  beta: 0.02\n", ""), ("{limit: 0.5}", "{}")))
    monkeypatch.chdir(tmp_path)
    return run_yaml


def test_validate_prints_notices_and_is_content(here: Path, grpo_orch: Cli) -> None:
    assert here.exists()
    assert grpo_orch("validate", "run.yaml") == (
        0,
        f"run.yaml: demo is valid\nnotice: run.yaml:7: grpo: {NO_KL}\n",
        "",
    )


def test_validate_for_programs(here: Path, grpo_orch: Cli) -> None:
    def said() -> tuple[int, dict[str, Any], str]:
        code, out, err = grpo_orch("validate", "run.yaml", "-o", "json")
        return code, json.loads(out), err

    notice = {"file": "run.yaml", "line": 7, "key": "grpo", "message": NO_KL}
    valid = {"file": "run.yaml", "name": "demo", "valid": True, "problems": [], "notices": [notice]}
    assert said() == (0, valid, "")
    here.write_text(changed(("{limit: 0.5}", "{limit: -1}")))
    where = {"file": "run.yaml", "line": 20, "key": "policies.kl.limit"}
    problem = where | {"message": "expected more than 0, got -1"}
    invalid = {"file": "run.yaml", "name": None, "valid": False, "problems": [problem], "notices": []}
    assert said() == (2, invalid, "")
    here.unlink()
    code, document, err = said()
    assert (code, document["valid"], document["problems"][0]["line"], err) == (2, False, None, "")
