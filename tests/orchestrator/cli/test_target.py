"""Which run a command's argument means, and what is said of one that means none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo_orch.orchestrator.cli.target import NoSuchRun, open_run, storage_of
from grpo_orch.orchestrator.config.shorthand import PASSWORD
from grpo_orch.policies.model import exit_codes
from tests.rigs.command_line import Cli
from tests.stand_ins.control_plane import Run


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["plain", "a b", "100% sure", "what?", "grün", "it's #1"])
def test_a_run_is_found_by_its_folder_whatever_that_is_called(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name / "run"
    store = Run(folder).create().store
    for argument in (str(folder), f"{name}/run", f"{name}/../{name}/run/", f"file://{folder}"):
        found, record = open_run(argument)
        assert (found.url, record.run_id) == (store.url, "sim-0")


@pytest.mark.parametrize("name", ["a" * 300, "b/" * 3000, "a-file/below"])
def test_what_cannot_be_a_path_is_one_line(name: str) -> None:
    Path("a-file").touch()
    with pytest.raises(NoSuchRun, match=name[:40]):
        storage_of(name)


def test_what_may_not_be_looked_into_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", denied)
    with pytest.raises(NoSuchRun, match="elsewhere: Permission denied"):
        storage_of("elsewhere")


@pytest.mark.parametrize("name", ["file:///tmp/\udcff", "s3://bucket/\udce4"])
def test_a_name_that_nobody_can_be_told_is_one_line(name: str) -> None:
    """What Python makes of bytes that the terminal's locale does not know, above all."""
    with pytest.raises(NoSuchRun, match="expected UTF-8") as refused:
        storage_of(name)
    assert str(refused.value).isprintable()


def test_a_url_with_a_password_is_refused_before_anybody_writes_it_down() -> None:
    with pytest.raises(NoSuchRun) as refused:
        storage_of("s3://user:hunter2@bucket/run")
    assert str(refused.value) == PASSWORD


LOOKING = "status, status -w, events, explain, logs daemon, report, plot, samples, web, checkpoints ls, members ls"
STEERING = "resume, rollback, down"


@pytest.mark.parametrize("words", f"{LOOKING}, {STEERING}".split(", "))
def test_a_folder_that_is_not_there_is_no_run_and_is_not_made(words: str, grpo_orch: Cli, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/typo/run"
    answer = grpo_orch(*words.split(), url)
    told = f"no run in {url}; start one with `grpo-orch up run.yaml`"
    assert (answer.code, answer.line) == (exit_codes.USAGE, told)
    assert not (tmp_path / "typo").exists()
