"""JSON from commands that start a run or write files: one document a line on stdout, text on stderr."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from grpo_orch.orchestrator.cli import start
from grpo_orch.orchestrator.cli.look import attach
from grpo_orch.orchestrator.cli.options import Output, Stop
from grpo_orch.orchestrator.cli.prepare import SCHEMA_LINE, recipe_lines
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import RunMoved
from grpo_orch.policies.model.vocabulary import RunPhase
from tests.generators.config_world import furnish, schema_problems
from tests.generators.views_world import World
from tests.rigs.command_line import Cli


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_up_prints_where_the_daemon_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, grpo_orch: Cli) -> None:
    furnish(folder)
    monkeypatch.setenv("GRPO_ORCH_NODE_PYTHON", "/bin/true")
    monkeypatch.setattr(start, "start_daemon", lambda *_: 41)
    monkeypatch.setattr(start, "start_rehearsal", lambda *_: None)
    assert document(grpo_orch, "up", "--yes", "--detach", "-o", "json") == {
        "run": "demo",
        "pid": 41,
        "controller": None,
        "store": f"file://{folder}/run",
    }


def document(grpo_orch: Cli, *words: str) -> Any:
    """Return the only document that the command prints."""
    answer = grpo_orch(*words)
    assert answer.code == 0, answer.err
    (line,) = answer.out.splitlines()
    return json.loads(line)


def test_attached_program_gets_the_report_and_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    world = World()
    world.starts()
    world.happens(21, RunMoved(RunPhase.FAILED, "no disk"))
    with pytest.raises(Stop) as stop:
        attach(world.store, Output.JSON)
    assert stop.value.exit_code == exit_codes.FAILED
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["phase"] == "failed"


def test_init_prints_its_files_and_recipes(grpo_orch: Cli) -> None:
    assert document(grpo_orch, "init", "-o", "json") == {"files": ["run.yaml", "run.schema.json"]}
    assert document(grpo_orch, "init", "-o", "json", "--recipe") == {"recipes": recipe_lines()}
    files = document(grpo_orch, "init", "-o", "json", "--recipe", "math-two-gpus")["files"]
    assert sorted(files) == sorted(str(path) for path in Path("math-two-gpus").iterdir())


def test_init_writes_the_schema_that_its_files_name(folder: Path, grpo_orch: Cli) -> None:
    assert grpo_orch("init").code == 0
    assert grpo_orch("init", "--recipe", "math-two-gpus").code == 0
    printed = grpo_orch("schema").out
    jsonschema.Draft202012Validator.check_schema(json.loads(printed))
    for file in folder.rglob("*.yaml"):
        assert file.read_text().startswith(SCHEMA_LINE)
        assert (file.parent / "run.schema.json").read_text() == printed
        assert schema_problems(file) == []


def test_init_renews_its_own_schema_only(folder: Path, grpo_orch: Cli) -> None:
    schema = folder / "run.schema.json"
    schema.write_text("{}")
    assert grpo_orch("init").line == "run.schema.json already exists and is not grpo-orch's; rename it"
    assert not (folder / "run.yaml").exists()
    schema.write_text('{"title": "run.yaml of grpo-orch"}')
    assert grpo_orch("init").code == 0
    assert schema.read_text() == grpo_orch("schema").out
