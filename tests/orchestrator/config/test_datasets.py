"""What `trainer.dataset` becomes, without a row of it being read. What is refused: `validated.txt`."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from grpo_orch.orchestrator.config.load import load_spec
from grpo_orch.policies.model.datasets import read_template
from grpo_orch.policies.model.spec import Dataset, datasets_of
from tests.generators.config_world import PROMPTS, changed, furnish, problem


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    furnish(tmp_path)
    (tmp_path / "prompts.py").write_text(PROMPTS)
    (tmp_path / "math.jsonl.gz").write_bytes(gzip.compress(b""))
    return tmp_path


def load(folder: Path, dataset: str) -> Dataset | tuple[Dataset, ...]:
    (folder / "run.yaml").write_text(changed(("dataset: prompts.jsonl", f"dataset: {dataset}")))
    return load_spec(folder / "run.yaml").trainer.dataset


def test_dataset_options_are_validated(folder: Path) -> None:
    found = load(
        folder, '{path: openai/gsm8k, name: main, revision: e53f048, streaming: true, prompt: "{question}"}'
    )
    assert found == Dataset(
        path="openai/gsm8k", name="main", revision="e53f048", streaming=True, prompt="{question}"
    )
    for name in ("asks", "free"):
        assert load(folder, f"{{path: prompts.jsonl, prompt: prompts.{name}}}") == Dataset(
            path=str(folder / "prompts.jsonl"), prompt=f"prompts.{name}"
        )


def test_several_datasets_and_messages(folder: Path) -> None:
    chat = '[{role: system, content: "Be brief."}, {role: user, content: "{problem}"}]'
    found = load(folder, f"[{{path: math.jsonl.gz, prompt: {chat}, weight: 3}}, {{path: a/b, weight: 1}}]")
    assert datasets_of(found)[0] == Dataset(
        path=str(folder / "math.jsonl.gz"),
        prompt=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "{problem}"}),
        weight=3.0,
    )
    assert datasets_of(found)[1] == Dataset(path="a/b", weight=1.0)
    assert load(folder, "[a/b, c/d]") == (Dataset(path="a/b"), Dataset(path="c/d"))


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
