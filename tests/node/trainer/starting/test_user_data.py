"""Datasets as people have them become rows with a prompt, or one line says why not."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest

from grpo_orch.policies.model.spec import Dataset
from grpo_orch.tasks.trainer.preflight import check_prompts, check_rewards
from grpo_orch.tasks.trainer.user_data import Data, load_data, prompts_used
from grpo_orch.tasks.trainer.user_objects import BadSpec

# In the columns of openai/gsm8k and of the MATH dataset.
GSM8K = [
    {"question": f"Ann has {n} pens and buys 2. How many?", "answer": f"{n} + 2 = {n + 2}\n#### {n + 2}"}
    for n in range(5)
]
MATH = [
    {"problem": f"What is ${n}^2$?", "level": "Level 1", "type": "Algebra", "solution": f"\\boxed{{{n * n}}}"}
    for n in range(3)
]
PROMPTS = """
import random

def asks(row):
    return f"{row['question']} Answer:"

def chats(row):
    return [{"role": "user", "content": row["question"]}]

def splits(row):
    return {"prompt": row["question"], "answer": int(row["answer"].split("#### ")[1])}

def spoils(row):
    row["answer"] = "?"
    return row["question"]

def lost(row):
    return row["text"]

def late(row):
    return row["question"] if "3" not in row["question"] else None

def mixes(row):
    return chats(row) if "3" in row["question"] else row["question"]

def one_more(row):
    return {"prompt": row["question"], **({"hint": "x"} if "3" in row["question"] else {})}

def one_less(row):
    return {"prompt": row["question"], **({} if "3" in row["question"] else {"hint": "x"})}

def huge(row):
    return {"prompt": row["question"], "bits": 2**70}

def numbers(row):
    import numpy
    changed = {"answer": "x"} if "3" in row["question"] else {}
    return {"prompt": row["question"], "score": float("nan"), "at": numpy.zeros(2), **changed}

def leaves(row):
    raise SystemExit(3)

def dice(row):
    return row["question"] + str(random.random())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    sys.modules.pop("my_prompts", None)
    (tmp_path / "my_prompts.py").write_text(PROMPTS)
    write(tmp_path / "gsm8k.jsonl", GSM8K)
    write(tmp_path / "math.jsonl", MATH)
    yield tmp_path
    sys.modules.pop("my_prompts", None)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def load(folder: Path, *parts: Dataset, used: int = 100) -> Data:
    return load_data("trainer.dataset", parts[0] if len(parts) == 1 else parts, folder, used)


def gsm8k(**more: Any) -> Dataset:
    return Dataset(path="gsm8k.jsonl", **more)


def math(**more: Any) -> Dataset:
    return Dataset(path="math.jsonl", **more)


def test_raw_rows_by_a_template_keep_their_columns(folder: Path) -> None:
    rows = load(folder, gsm8k(prompt="Q: {question}\nPut it in \\boxed{{}}.\nA:")).rows
    assert rows[1]["prompt"] == "Q: Ann has 1 pens and buys 2. How many?\nPut it in \\boxed{}.\nA:"
    assert rows["answer"][:] == [row["answer"] for row in GSM8K]
    assert load(folder, math(prompt="{problem}")).rows.column_names == [*MATH[0], "prompt"]


def test_a_template_in_each_message_makes_a_chat(folder: Path) -> None:
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "{question}"})
    found = load(folder, gsm8k(prompt=messages))
    assert found.rows[0]["prompt"] == [messages[0], {"role": "user", "content": GSM8K[0]["question"]}]
    check_prompts(found.firsts)


@pytest.mark.parametrize(
    ("name", "prompt", "answer"),
    [
        ("asks", GSM8K[0]["question"] + " Answer:", GSM8K[0]["answer"]),
        ("chats", [{"role": "user", "content": GSM8K[0]["question"]}], GSM8K[0]["answer"]),
        ("splits", GSM8K[0]["question"], 2),
        ("spoils", GSM8K[0]["question"], GSM8K[0]["answer"]),
    ],
)
def test_a_function_makes_a_text_a_chat_or_columns(folder: Path, name: str, prompt: Any, answer: Any) -> None:
    row = load(folder, gsm8k(prompt=f"my_prompts.{name}")).rows[0]
    assert (row["prompt"], row["answer"]) == (prompt, answer)


def test_function_may_return_any_numbers_and_change_some_rows(folder: Path) -> None:
    row = load(folder, gsm8k(prompt="my_prompts.numbers")).rows[3]
    assert (row["at"], row["answer"], row["score"] == row["score"]) == ([0.0, 0.0], "x", False)


@pytest.mark.parametrize("other", [{"a": 1}, [1], "x"])
def test_column_of_nulls_joins_any_type_in_any_order(folder: Path, other: Any) -> None:
    write(folder / "none.jsonl", [{"prompt": "p", "m": None}])
    write(folder / "some.jsonl", [{"prompt": "q", "m": other}])
    parts = [Dataset(path="none.jsonl"), Dataset(path="some.jsonl")]
    assert load(folder, *parts).rows["m"][:] == [None, other]
    assert load(folder, *reversed(parts)).rows["m"][:] == [other, None]


def test_chats_that_only_json_can_hold_are_chats(folder: Path) -> None:
    prompts = [[{"role": "user", "content": "p"}], [{"role": "user", "content": "q", "name": 1}]]
    features = datasets.Features({"prompt": datasets.Json()})
    datasets.Dataset.from_dict({"prompt": prompts}, features=features).to_parquet(folder / "json.parquet")
    assert load(folder, Dataset(path="json.parquet")).rows["prompt"][:] == prompts


def test_edited_function_is_called_again(folder: Path) -> None:
    assert load(folder, gsm8k(prompt="my_prompts.asks")).rows[0]["prompt"].endswith("Answer:")
    (folder / "my_prompts.py").write_text(PROMPTS.replace("Answer:", "It is ..."))
    del sys.modules["my_prompts"]
    assert load(folder, gsm8k(prompt="my_prompts.asks")).rows[0]["prompt"].endswith("It is ...")


def test_files_of_every_kind(folder: Path) -> None:
    table = datasets.Dataset.from_list(GSM8K)
    table.to_parquet(folder / "rows.parquet")
    table.to_csv(folder / "rows.csv")
    (folder / "rows.json").write_text(json.dumps(GSM8K))
    for name in ("gsm8k.jsonl", "rows.json", "rows.csv"):
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
    for name in ("rows.parquet", "rows.csv", "rows.json", "gsm8k.jsonl.gz", "rows.json.gz", "rows.csv.gz"):
        rows = load(folder, Dataset(path=name, prompt="{question}")).rows
        assert rows["answer"][:] == [row["answer"] for row in GSM8K], name


def test_a_folder_with_configurations_as_hub_datasets_have_them(folder: Path) -> None:
    (folder / "set").mkdir()
    write(folder / "set" / "a.jsonl", GSM8K)
    write(folder / "set" / "b.jsonl", GSM8K[:2])
    configs = "- {config_name: main, data_files: a.jsonl}\n- {config_name: few, data_files: b.jsonl}\n"
    (folder / "set" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert len(load(folder, Dataset(path="set", name="few", prompt="{question}")).rows) == 2
    with pytest.raises(
        BadSpec, match=r"^trainer\.dataset: set: Config name is missing\. .*'main', 'few'"
    ) as caught:
        load(folder, Dataset(path="set"))
    assert "\n" not in str(caught.value)
    with pytest.raises(BadSpec, match=r'Unknown split "test"\. Should be one of \[\'train\'\]'):
        load(folder, Dataset(path="set", name="main", split="test"))


def test_hub_name_includes_revision_and_configuration(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def hub(*args: Any, **kwargs: Any) -> datasets.Dataset:
        asked.extend((args, kwargs))
        return datasets.Dataset.from_list(GSM8K)

    monkeypatch.setattr(datasets, "load_dataset", hub)  # there is no hub here
    load(folder, Dataset(path="openai/gsm8k", name="main", split="test", revision="e53f048", prompt="{question}"))
    assert asked == [("openai/gsm8k", "main"), {"split": "test", "revision": "e53f048", "streaming": False}]


def test_a_stream_is_read_as_far_as_it_can_be_used(folder: Path) -> None:
    rows = load(folder, gsm8k(prompt="{question}", streaming=True), used=3).rows
    assert rows["answer"][:] == [row["answer"] for row in GSM8K[:3]]
    assert len(load(folder, gsm8k(prompt="{question}", streaming=True)).rows) == len(GSM8K)


@pytest.mark.parametrize(
    ("steps", "accumulation", "per_generation", "iterations", "prompts"),
    [(10, 1, 1, 1, 80), (10, 4, 4, 1, 80), (10, 4, 4, 2, 40), (3, 1, 2, 1, 16)],
)
def test_as_many_prompts_as_a_training_takes(
    steps: int, accumulation: int, per_generation: int, iterations: int, prompts: int
) -> None:
    """Eight at once."""
    config = SimpleNamespace(
        max_steps=steps,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=per_generation,
        num_iterations=iterations,
        generation_batch_size=64,
        num_generations=8,
    )
    assert prompts_used(config) == prompts


def test_several_datasets_are_concatenated_with_all_columns(folder: Path) -> None:
    found = load(folder, gsm8k(prompt="{question}"), math(prompt="{problem}"))
    assert found.rows["prompt"][:] == [*(one["question"] for one in GSM8K), *(one["problem"] for one in MATH)]
    assert found.rows["answer"][len(GSM8K)] is None
    assert [row["prompt"] for row in found.firsts.values()] == [GSM8K[0]["question"], MATH[0]["problem"]]
    assert list(found.firsts) == ["trainer.dataset[0]", "trainer.dataset[1]"]


def test_a_reward_is_tried_on_every_dataset(folder: Path) -> None:
    def by_answer(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(right.endswith(one)) for one, right in zip(completions, answer, strict=True)]

    firsts = load(folder, gsm8k(prompt="{question}"), math(prompt="{problem}")).firsts
    config = SimpleNamespace(num_generations=2, max_steps=3, remove_unused_columns=False)
    with pytest.raises(BadSpec, match=r"AttributeError: .* on the first row of trainer\.dataset\[1\], with"):
        check_rewards([by_answer], ["rewards.by_answer"], firsts, config)


def test_weights_are_shares_of_the_prompts_and_lose_no_row(folder: Path) -> None:
    """Five rows and three, as one and two: the three are repeated."""
    found = load(folder, gsm8k(prompt="{question}", weight=1), math(prompt="{problem}", weight=2))
    prompts = found.rows["prompt"][:]
    assert sorted(one for one in prompts if "Ann" in one) == sorted(row["question"] for row in GSM8K)
    squares = [one for one in prompts if "Ann" not in one]
    assert len(squares) == 10
    assert {squares.count(row["problem"]) for row in MATH} == {3, 4}
    assert [sum("Ann" in one for one in prompts[at : at + 3]) for at in range(0, 15, 3)] == [1] * 5


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([gsm8k()], '.dataset: gsm8k.jsonl has no column `prompt`, only question, answer; .*"{question}"`'),
        ([gsm8k(prompt="{quest}")], ".dataset.prompt: there is no column quest; expected one of question, answer"),
        ([gsm8k(prompt="{question")], ".dataset.prompt: .*; double literal braces"),
        ([gsm8k(prompt="my_prompts.none")], ".dataset.prompt: my_prompts.none: module .* has no attribute"),
        ([gsm8k(prompt="no_such.one")], ".dataset.prompt: no_such.one: No module named"),
        ([gsm8k(prompt="my_prompts.lost")], "lost raised KeyError: 'text'; .* on row 0, with question, answer"),
        ([gsm8k(prompt="my_prompts.late")], "late returned None for row 3; expected a text, or a list of mess"),
        ([gsm8k(prompt="my_prompts.leaves")], "leaves raised SystemExit: 3; it was called on row 0"),
        ([gsm8k(prompt="my_prompts.dice")], "dice returned two prompts for one row; expected the same"),
        (
            [gsm8k(prompt="{question}"), math(prompt=({"role": "user", "content": "{problem}"},))],
            r"expected prompts of one form; those of .*\[0\] are texts, .*\[1\] are chats",
        ),
        (
            [gsm8k(prompt="{question}"), gsm8k(prompt="my_prompts.splits")],
            r"expected one type of each column; .*: The features can't be aligned because the key answer ",
        ),
        ([gsm8k(split="train[:0]")], r"gsm8k\.jsonl.* no "),
        ([gsm8k(prompt="my_prompts.mixes")], "mixes returned a chat for row 3; expected a text, as for the first"),
        ([gsm8k(prompt="my_prompts.one_more")], "returned a text with hint for row 3; expected a text, as for"),
        ([gsm8k(prompt="my_prompts.one_less")], "returned a text for row 3; expected a text with hint, as for"),
        ([gsm8k(prompt="my_prompts.huge")], "dataset.prompt: what it returns is no column: Python int too large"),
        ([Dataset(path="empty.jsonl")], r"^trainer\.dataset: empty\.jsonl has no rows$"),
        ([Dataset(path="empty.jsonl", streaming=True)], r"^trainer\.dataset: empty\.jsonl has no rows$"),
        ([Dataset(path="header.csv", streaming=True)], r"^trainer\.dataset: header\.csv has no rows$"),
        ([Dataset(path="no_prompt.jsonl")], "the prompt of row 1 is nothing; expected a text or a chat in every"),
        ([Dataset(path="mixed.jsonl")], "its prompts are of several types; expected texts alone, or chats alone"),
        (
            [Dataset(path="struct.jsonl"), Dataset(path="list.jsonl")],
            r"expected one type of each column; .* m ",
        ),
        ([Dataset(path="holes.jsonl", prompt="{a}")], "prompt: row 1: its a is null; expected a text or a num"),
        ([Dataset(path="lists.jsonl", prompt="{a}")], "prompt: row 0: its a is a list; expected a text or a num"),
        ([Dataset(path="broken.jsonl")], r"broken\.jsonl: line 2: Expecting ',' delimiter; expected a JSON obj"),
        ([Dataset(path="latin.jsonl")], r"latin\.jsonl: line 3: 'utf-8' codec can't decode byte 0xe9"),
        ([Dataset(path="latin.jsonl", streaming=True)], r"latin\.jsonl: line 3: 'utf-8' codec can't decode byte"),
        ([Dataset(path="broken.json")], r"broken\.json: (?!An error occurred)"),
    ],
)  # fmt: skip
def test_user_data_errors_name_their_cause(folder: Path, parts: list[Dataset], says: str) -> None:
    write(folder / "holes.jsonl", [{"a": "x"}, {"a": None}])
    write(folder / "lists.jsonl", [{"a": ["x"]}])
    write(folder / "empty.jsonl", [])
    (folder / "header.csv").write_text("prompt,a\n")
    write(folder / "no_prompt.jsonl", [{"prompt": "p"}, {"prompt": None}])
    write(folder / "mixed.jsonl", [{"prompt": "p"}, {"prompt": [{"role": "user", "content": "p"}]}])
    write(folder / "struct.jsonl", [{"prompt": "p", "m": {"a": 1}}])
    write(folder / "list.jsonl", [{"prompt": "p", "m": []}])
    (folder / "broken.json").write_text('[{"prompt": "p"}, {"prompt": "p"]')
    (folder / "broken.jsonl").write_text('{"prompt": "p"}\n{"prompt": "p"\n{"prompt": "p"}\n')
    (folder / "latin.jsonl").write_bytes(b'{"prompt": "p"}\n\n{"prompt": "p", "city": "Orl\xe9ans"}\n')
    with pytest.raises(BadSpec, match=says) as caught:
        load(folder, *parts)
    assert str(caught.value).startswith("trainer.dataset")
    assert "\n" not in str(caught.value)


def test_chats_in_another_column_are_named_with_the_way_out(folder: Path) -> None:
    (folder / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "1 apples:"}]}\n')
    with pytest.raises(BadSpec, match=r"only messages; `messages` holds chats: name a function"):
        load_data("trainer.dataset", Dataset(path="chats.jsonl"), folder, 1)
