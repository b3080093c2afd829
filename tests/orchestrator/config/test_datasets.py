"""Templates of prompts, and rows that cannot be read. What is read and refused otherwise: `validated.txt`."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_orch.policies.model.datasets import read_template
from tests.generators.config_world import furnish, problem


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    furnish(tmp_path)
    return tmp_path


def test_a_template_is_filled_as_by_python() -> None:
    row = {"question": "a {b}?", "n": 3}
    for text in (
        "{question} ({n}) \\boxed{{}}",
        "{{question}}",
        "no column",
        "{n}{n}",
        "\\frac{{1}}{{2}} {question}",
    ):
        assert read_template(text).fill(row) == text.format(**row)
    assert read_template("{n}: {question} {n}").columns == ("n", "question")


@pytest.mark.parametrize("content", [b"[1]\n", b"{not json\n", b"\xff\xfe\x00", b"{}\n"])
def test_unreadable_rows_are_left_to_the_trainer(folder: Path, content: bytes) -> None:
    (folder / "prompts.jsonl").write_bytes(content)
    found = problem(folder)
    assert found == "" or found.startswith("trainer.dataset: ")


@pytest.mark.parametrize("line", [b'{"prompt": "a}', b'{"prompt": "\xfcber"}'])
def test_invalid_json_line_is_named(folder: Path, line: bytes) -> None:
    (folder / "prompts.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "1"}\n' + b'{"prompt": "1"}\n' * 99 + line)
    found = problem(folder)
    assert found.startswith("trainer.dataset: prompts.jsonl, line 101: ")
    assert found.endswith("; expected a JSON object in UTF-8 in every line")
