"""What `validate` reads in a dataset's own rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.load import ConfigError, load_spec
from tests.generators.config_world import changed, furnish

CHAT = [{"role": "user", "content": "1 + 1"}]


def problem(folder: Path, *changes: tuple[str, str]) -> str:
    """The only problem of a run.yaml; empty where there is none."""
    (folder / "run.yaml").write_text(changed(*changes))
    try:
        load_spec(folder / "run.yaml")
    except ConfigError as error:
        [found] = error.problems
        return f"{found.key}: {found.message}"
    return ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    furnish(tmp_path)
    return tmp_path


def write(folder: Path, *rows: dict[str, Any], name: str = "prompts.jsonl") -> None:
    (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_fewer_rows_than_a_step_takes_are_refused(folder: Path) -> None:
    write(folder, *[{"prompt": str(at)} for at in range(3)])
    found = problem(folder)
    assert found.startswith("trainer.dataset: 3 rows, and one step takes 4 different prompts")
    write(folder, *[{"prompt": str(at)} for at in range(4)])
    assert problem(folder) == ""


def test_messages_without_a_prompt_column_are_refused(folder: Path) -> None:
    write(folder, *[{"messages": CHAT}] * 8)
    found = problem(folder)
    assert found.startswith("trainer.dataset: the file's columns are messages; expected one called `prompt`")
    assert "`prompt: module.function`" in found


def test_template_that_names_a_missing_column_is_refused(folder: Path) -> None:
    write(folder, *[{"question": "?", "answer": 1}] * 8)
    dataset = ("dataset: prompts.jsonl", 'dataset: {path: prompts.jsonl, prompt: "{query}"}')
    assert problem(folder, dataset) == (
        "trainer.dataset.prompt: names query, and the file's columns are question, answer"
    )


def test_csv_rows_are_counted_by_record(folder: Path) -> None:
    (folder / "rows.csv").write_text('prompt\n"a\nb"\nc\n')
    found = problem(folder, ("dataset: prompts.jsonl", "dataset: rows.csv"))
    assert found.startswith("trainer.dataset: 2 rows, and one step takes 4")


@pytest.mark.parametrize("template", ["", "chat_template.jinja"])
def test_chats_need_a_chat_template_in_a_local_model(folder: Path, template: str) -> None:
    write(folder, *[{"prompt": CHAT}] * 8)
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "tokenizer_config.json").write_text("{}")
    if template:
        (model / template).write_text("{{ messages }}")
    found = problem(folder)
    assert ("has no chat template" in found) == (not template)


def test_rows_that_setup_may_still_write_are_not_judged(folder: Path) -> None:
    write(folder, {"messages": CHAT})
    assert problem(folder, ("dataset: prompts.jsonl", "dataset: prompts.jsonl\n  setup: python prepare.py")) == ""


@pytest.mark.parametrize("content", [b"", b"[1]\n", b"{not json\n", b"\xff\xfe\x00", b"{}\n"])
def test_unreadable_rows_are_left_to_the_trainer(folder: Path, content: bytes) -> None:
    (folder / "prompts.jsonl").write_bytes(content)
    found = problem(folder)
    assert found == "" or found.startswith("trainer.dataset: ")
