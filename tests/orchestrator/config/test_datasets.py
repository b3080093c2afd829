"""What `validate` says of `trainer.dataset` without reading a row of it."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from orchestrator.config.load import ConfigError, load_spec
from policies.model.datasets import read_template
from policies.model.spec import Dataset, datasets_of
from tests.generators.config_world import changed, furnish

PROMPTS = """\
def asks(row):
    return row["question"]


def two(row, other):
    return ""


def none():
    return ""


async def later(row):
    return ""


def free(row, *, style="plain", **_):
    return ""
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    furnish(tmp_path)
    (tmp_path / "prompts.py").write_text(PROMPTS)
    (tmp_path / "math.jsonl.gz").write_bytes(gzip.compress(b""))
    return tmp_path


def load(folder: Path, dataset: str, *more: tuple[str, str]) -> Dataset | tuple[Dataset, ...]:
    (folder / "run.yaml").write_text(changed(("dataset: prompts.jsonl", f"dataset: {dataset}"), *more))
    return load_spec(folder / "run.yaml").trainer.dataset


def test_what_may_be_said_of_a_dataset(folder: Path) -> None:
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


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        ("{path: a/b, prompt: Solve it}", ".prompt: expected a text with columns in braces, as in {question}"),
        ("{path: a/b, prompt: '{}'}", ".prompt: {} names no column; braces of the text itself are doubled"),
        ("{path: a/b, prompt: 'In \\boxed{}: {question}'}", ".prompt: {} names no column"),
        ("{path: a/b, prompt: '{question} in \\boxed{answer}'}", "\\boxed{answer} would show the model"),
        ("{path: a/b, prompt: '{question!r}'}", ".prompt: {question...} is more than a column's name"),
        ("{path: a/b, prompt: '{question'}", ".prompt: expected '}' before end of string; braces of the text"),
        ("{path: a/b, prompt: prompts.ask}", '.prompt: prompts.py defines no ask; .*; did you mean "asks"?'),
        ("{path: a/b, prompt: prompts.two}", ".prompt: two cannot be called with a row alone; expected def"),
        ("{path: a/b, prompt: prompts.none}", ".prompt: none cannot be called with a row alone"),
        ("{path: a/b, prompt: prompts.later}", ".prompt: later is async; expected a plain function"),
        ("{path: a/b, prompt: no_such.one}", ".prompt: no module no_such in "),
        ("{path: a/b, prompt: 7}", ".prompt: expected text or a list of mappings or null, got 7"),
        ("{path: a/b, prompt: [{role: user}]}", ".prompt[0]: expected a message with the texts"),
        ("{path: a/b, prompt: [{role: user, content: '{}'}]}", ".prompt[0].content: {} names no column"),
        ("{path: a/b, prompt: [{role: user, content: '{{}}'}]}", ".prompt: no message names a column"),
        ("{path: a/b, streaming: true, split: 'train[:9]'}", ".split: a stream has no slices"),
        ("{path: a/b, weight: 1}", ".weight: the share of one dataset among several"),
        ("[{path: a/b, weight: 1}, c/d]", "[1]: has no weight, and another one has"),
        ("[{path: a/b, weight: 0}, {path: c/d, weight: 1}]", "[0].weight: expected more than 0, got 0"),
        ("[{path: a/b, wieght: 1}]", '[0].wieght: unknown key; expected one of .*; did you mean "weight"?'),
        ("[7]", "[0]: expected a mapping with the keys path, name, split, .*, weight, got 7"),
        ("[{path: no_such.jsonl}]", "[0].path: no such file or folder: "),
        ("[{split: train}]", "[0].path: missing; expected text"),
        ("[]", ": expected at least one dataset"),
        ("7", ": expected a name or path or a mapping with the keys path"),
    ],
)  # fmt: skip
def test_what_is_said(folder: Path, dataset: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(folder, dataset)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{folder}/run.yaml:5: trainer.dataset")
    for part in says.split(".*"):
        assert part in line


def test_a_stream_needs_to_know_how_far_it_is_read(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.dataset\.streaming: .*; set grpo\.max_steps"):
        load(folder, "{path: a/b, streaming: true}", ("max_steps: 40", "num_train_epochs: 1"))
    held_out = "\n  eval_dataset: {path: a/b, streaming: true}\n  reward_funcs:"
    with pytest.raises(ConfigError, match=r"eval_dataset\.streaming: each evaluation takes all rows; remove it"):
        load(folder, "a/b", ("\n  reward_funcs:", held_out))


def test_each_dataset_is_shipped(folder: Path) -> None:
    (folder.parent / "more").mkdir(exist_ok=True)
    cloud = ("storage: ./run", "storage: s3://bucket/run\ncloud: sky")
    with pytest.raises(ConfigError, match=r"trainer\.dataset\[1\]: \.\./more is outside the folder"):
        load(folder, "[a/b, ../more]", cloud)


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
