"""`grpo-orch eval`, by the real command line over a store in a folder: mistakes, the plan, and what is shown."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoint.records import documents, evaluated
from checkpoint.records.documents import RunRecord
from checkpoint.records.evaluated import SCHEMA, Evaluated
from checkpoint.store.run_store import Store
from checkpoint.stream import transfer
from checkpoint.stream.catalog import Catalog
from checkpoint.stream.manifest import files_below
from orchestrator.cli import main
from orchestrator.cli.evaluate import _run_of, _subjects
from policies.model import exit_codes
from policies.model.spec import Dataset, RunSpec
from policies.model.vocabulary import PolicyVersion
from tests.stand_ins.world import spec

Eval = Callable[..., tuple[int, str, str]]


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A run with two checkpoints, and problems beside it."""
    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    store = Store((tmp_path / "store").as_uri())
    documents.create_run(store, RunRecord(documents.SCHEMA, "id", time.time(), spec_with(spec(), tmp_path)))
    (tmp_path / "files").mkdir()
    (tmp_path / "problems.jsonl").write_text('{"prompt": "1 + 1"}\n')
    for step in (10, 20):
        (tmp_path / "files" / "model.safetensors").write_bytes(b"w" * step)
        transfer.upload(
            store, Catalog(store, "t"), files_below(tmp_path / "files"), PolicyVersion(0, step), time.time(), {}
        )
    return store


def spec_with(run: RunSpec, folder: Path, **changes: Any) -> RunSpec:
    return replace(run, workdir=str(folder), **changes)


@pytest.fixture
def evaluate(parent: Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Eval:
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO())
        monkeypatch.setattr("sys.argv", ["grpo-orch", "eval", parent.url, *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capfd.readouterr()
        return int(end.value.code or 0), out, err

    return call


def stored(parent: Store, subjects: list[str], problems: Dataset) -> Store:
    """What an evaluation of these leaves, its evaluator being done."""
    record = documents.read_run(parent)
    found = _subjects(parent, [one for one in subjects if one != "base"], base="base" in subjects)
    store, made = _run_of(parent, record, found, problems, None)
    documents.create_run(store, made)
    for at, subject in enumerate(subjects):
        right = 40 + 30 * at
        verdicts = ["correct"] * right + ["wrong"] * 20 + ["unreadable"] * (80 - right)
        scores: list[float | None] = [1.0 if one == "correct" else 0.0 for one in verdicts]
        columns, tokens = {"right": scores}, [7] * len(scores)
        made_of = Evaluated(SCHEMA, subject, columns, {"right": 1.0}, "right", "right", verdicts, tokens, cut=3)
        evaluated.evaluated(subject).write(store, made_of)
    return store


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "names no trainer.eval_dataset; name held-out problems with --dataset"),
        (("--dataset", "missing.jsonl"), "--dataset missing.jsonl: there is no such file or folder"),
        (("--dataset", "problems.jsonl", "--step", "7"), "no checkpoint 7; there are: 0-10, 0-20"),
        (("--dataset", "problems.jsonl", "--step", "seven"), "'seven' names no checkpoint"),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(
    parent: Store, evaluate: Eval, arguments: tuple[str, ...], said: str
) -> None:
    code, out, err = evaluate(*arguments)
    assert (code, out, err.count("\n")) == (exit_codes.USAGE, "", 1)
    assert said in err
    assert parent.folders("evaluations") == []


def test_no_is_an_answer_and_pins_nothing(parent: Store, evaluate: Eval) -> None:
    code, out, err = evaluate("--dataset", "problems.jsonl")  # no terminal: the question gets none
    assert code != exit_codes.OK
    assert "USD/h" in err, "what it costs is said first, and not where results go"
    assert out.strip() == ""
    assert not any(one.pinned for one in Catalog(parent, "test").newest().checkpoints)


def test_what_is_stored_is_shown_side_by_side(parent: Store, evaluate: Eval, tmp_path: Path) -> None:
    store = stored(parent, ["base", "0-20"], Dataset(path=str(tmp_path / "problems.jsonl")))
    _, out, _ = evaluate("--dataset", "problems.jsonl", "-o", "json")
    told = json.loads(out)
    assert told["store"] == store.url
    assert told["policies"]["base"]["shares"]["correct"]["value"] == 0.4
    assert told["policies"]["0-20"]["rewards"]["right"]["value"] == 0.7
    difference = told["difference"]["shares"]["correct"]
    assert difference["value"] == pytest.approx(0.3)
    assert 0.15 < difference["low"] < 0.3 < difference["high"] < 0.45
    _, text, _ = evaluate("--dataset", "problems.jsonl")
    for words in ("base", "0-20", "difference", "right form, wrong", "unreadable", "40.0 %", "+30.0 %"):
        assert words in text, text


def test_each_question_has_a_store_of_its_own_and_the_same_one_the_same(parent: Store) -> None:
    record, here = documents.read_run(parent), Dataset(path="a")
    subjects = _subjects(parent, ["20", "10", "10"], base=True)
    assert [one.name for one in subjects] == ["base", "0-10", "0-20"]
    urls = [
        _run_of(parent, record, subjects, here, None)[0].url,
        _run_of(parent, record, subjects, here, None)[0].url,
        _run_of(parent, record, subjects, here, 5)[0].url,
        _run_of(parent, record, subjects[:2], here, None)[0].url,
        _run_of(parent, record, subjects, Dataset(path="b"), None)[0].url,
    ]
    assert urls[0] == urls[1]
    assert len(set(urls)) == 4
    assert all(url.startswith(f"{parent.url}/evaluations/base") for url in urls)
