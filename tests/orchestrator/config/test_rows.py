"""What `validate` reads in a dataset's own rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.generators.config_world import NO_REHEARSAL, furnish, problem, write_rows

LENGTH = ("max_completion_length: 16", "max_completion_length: 128")
CHAT = [{"role": "user", "content": "1 + 1"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    furnish(tmp_path)
    return tmp_path


def test_fewer_rows_than_a_step_takes_are_refused(folder: Path) -> None:
    write_rows(folder, *[{"prompt": str(at)} for at in range(3)])
    found = problem(folder)
    assert found.startswith("trainer.dataset: 3 rows, but one step needs 4 different prompts")
    write_rows(folder, *[{"prompt": str(at)} for at in range(4)])
    assert problem(folder) == ""


def test_messages_without_a_prompt_column_are_refused(folder: Path) -> None:
    write_rows(folder, *[{"messages": CHAT}] * 8)
    found = problem(folder)
    assert found.startswith("trainer.dataset: the file has no column `prompt`; its columns are messages; add one")
    assert "`prompt: module.function`" in found


def test_column_of_a_later_row_counts(folder: Path) -> None:
    write_rows(folder, *[{"question": "?"}] * 7, {"question": "?", "query": "?"})
    assert problem(folder, ("dataset: prompts.jsonl", 'dataset: {path: prompts.jsonl, prompt: "{query}"}')) == ""


def test_template_that_names_a_missing_column_is_refused(folder: Path) -> None:
    write_rows(folder, *[{"question": "?", "answer": 1}] * 8)
    dataset = ("dataset: prompts.jsonl", 'dataset: {path: prompts.jsonl, prompt: "{query}"}')
    assert problem(folder, dataset) == (
        "trainer.dataset.prompt: uses query, but the file's columns are question, answer; "
        "expected columns of the file"
    )


def test_csv_rows_are_counted_by_record(folder: Path) -> None:
    (folder / "rows.csv").write_text('prompt\n"a\nb"\nc\n')
    found = problem(folder, ("dataset: prompts.jsonl", "dataset: rows.csv"))
    assert found.startswith("trainer.dataset: 2 rows, but one step needs 4")


@pytest.mark.parametrize("template", ["", "chat_template.jinja"])
def test_chats_need_a_chat_template_in_a_local_model(folder: Path, template: str) -> None:
    write_rows(folder, *[{"prompt": CHAT}] * 8)
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "tokenizer_config.json").write_text("{}")
    if template:
        (model / template).write_text("{{ messages }}")
    found = problem(folder)
    assert ("has no chat template" in found) == (not template)


def test_rows_that_setup_may_still_write_are_not_judged(folder: Path) -> None:
    write_rows(folder, {"messages": CHAT})
    assert problem(folder, ("dataset: prompts.jsonl", "dataset: prompts.jsonl\n  setup: python prepare.py")) == ""


JSON_FORM = 'expected one JSON object per line, as in {"prompt": "1 + 1"}'
CSV_FORM = "expected a line of column names, then at least one line of values"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b"", f"a.jsonl is empty; {JSON_FORM}"),
        ("a.jsonl", b"\n \n\n", f"a.jsonl has only blank lines; {JSON_FORM}"),
        ("a.csv", b"prompt,answer\n", f"a.csv has no line of values; {CSV_FORM}"),
        ("a.parquet", b"", "a.parquet is empty; expected a Parquet file with rows"),
        ("a.jsonl.gz", b"", f"a.jsonl.gz is empty; {JSON_FORM}"),
    ],
)
@pytest.mark.parametrize("key", ["dataset", "eval_dataset"])
def test_file_without_rows_is_refused(folder: Path, key: str, name: str, content: bytes, says: str) -> None:
    (folder / name).write_bytes(content)
    written = f"dataset: {name}" if key == "dataset" else f"dataset: prompts.jsonl\n  eval_dataset: {name}"
    assert problem(folder, ("dataset: prompts.jsonl", written)) == f"trainer.{key}: {says}"


@pytest.mark.parametrize(
    ("split", "says"),
    [
        ("train", ""),
        ("train[2:]", ""),
        ("train[4:]", "train[4:] selects none of the 4 rows of few.jsonl; expected at least one"),
        ("train[:10%]", "train[:10%] selects none of the 4 rows of few.jsonl; expected at least one"),
        ("train[-1:]+train[9:]", ""),
        ("train[:10%](pct1_dropremainder)", ""),  # the trainer's to say
        ("test", "a single file has only the split train; expected train, or a slice as in train[:500], got test"),
    ],
)
def test_held_out_split_without_rows_is_refused(folder: Path, split: str, says: str) -> None:
    write_rows(folder, *[{"prompt": "1"}] * 4, name="few.jsonl")
    held_out = f'eval_dataset: {{path: few.jsonl, split: "{split}"}}'
    found = problem(folder, ("dataset: prompts.jsonl", f"dataset: prompts.jsonl\n  {held_out}"))
    assert found == (says and f"trainer.eval_dataset.split: {says}")


def test_part_with_fewer_rows_than_a_step_takes_is_refused(folder: Path) -> None:
    part = ("dataset: prompts.jsonl", 'dataset: {path: prompts.jsonl, split: "train[:3]"}')
    assert problem(folder, part).startswith("trainer.dataset: 3 rows, but one step needs 4 different prompts")


def test_rows_repeated_for_their_share_are_counted(folder: Path) -> None:
    write_rows(folder, {"prompt": "1"}, name="one.jsonl")
    write_rows(folder, *[{"prompt": "1"}] * 2, name="two.jsonl")
    parts = "[{path: one.jsonl, weight: 1}, {path: two.jsonl, weight: 1}]"
    assert problem(folder, ("dataset: prompts.jsonl", f"dataset: {parts}")) == ""


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


def test_csv_with_rows_longer_than_header_is_left_to_trainer(folder: Path) -> None:
    (folder / "rows.csv").write_text("question,answer\n" + "a,b,c\n" * 8)
    assert problem(folder, ("dataset: prompts.jsonl", "dataset: rows.csv")) == ""


def test_blank_lines_before_the_columns_of_a_csv_are_skipped(folder: Path) -> None:
    (folder / "rows.csv").write_text("\n\nprompt,answer\n\n" + "a,b\n" * 8)
    assert problem(folder, ("dataset: prompts.jsonl", "dataset: rows.csv")) == ""


def test_name_that_no_file_can_have_is_refused(folder: Path) -> None:
    name = f"{'a' * 300}.jsonl"
    assert "no such file or folder" in problem(folder, ("dataset: prompts.jsonl", f"dataset: {name}"))


SHORT = ("max-model-len: 256", "max-num-seqs: 8")
NO_ROOM = "grpo.max_completion_length: 128 leaves no room for a prompt in the model's context; expected less than"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ([], "rollout.vllm.max-model-len: 256 exceeds the model's context, and vLLM does not start; expe"),
        ([SHORT], ""),
        ([SHORT, LENGTH], NO_ROOM),
        ([SHORT, LENGTH, ("  replicas: 2", "  replicas: 0"), NO_REHEARSAL], NO_ROOM),
    ],
)
def test_lengths_beyond_the_models_own_context_are_refused(
    folder: Path, changes: list[tuple[str, str]], says: str
) -> None:
    (folder / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 128}))
    found = problem(folder, *changes)
    assert found.startswith(says)
    assert bool(found) == bool(says)
