"""`grpo-orch eval`, by the real command line over a store in a folder: mistakes, the plan, and what is shown."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint.records import documents, evaluations
from grpo_orch.checkpoint.records.documents import write_fork
from grpo_orch.checkpoint.records.evaluations import SCHEMA, EvaluationResult
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import transfer
from grpo_orch.checkpoint.stream.catalog import Catalog, Revision
from grpo_orch.checkpoint.stream.manifest import files_below
from grpo_orch.orchestrator.cli.checkpoints import NEWEST
from grpo_orch.orchestrator.cli.evaluate import find_problems, find_subjects, pin, run_of
from grpo_orch.orchestrator.cli.options import Stop
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.spec import Dataset, FleetPolicy, Notify, PoliciesSpec
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.model.vocabulary import Evaluation, PolicyVersion, Subject
from grpo_orch.tasks.evaluating.evaluator import unpin
from tests.rigs.command_line import Cli
from tests.stand_ins.control_plane import Run


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A run with two checkpoints, and problems beside it."""
    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    store = Run(tmp_path / "store").create().store
    (tmp_path / "files").mkdir()
    (tmp_path / "problems.jsonl").write_text('{"prompt": "1 + 1"}\n')
    (tmp_path / "problems.txt").write_text("1 + 1")
    for step in (10, 20):
        (tmp_path / "files" / "model.safetensors").write_bytes(b"w" * step)
        transfer.upload(
            store, Catalog(store, "t"), files_below(tmp_path / "files"), PolicyVersion(0, step), time.time(), {}
        )
    return store


@pytest.fixture
def evaluate(parent: Store, monkeypatch: pytest.MonkeyPatch, grpo_orch: Cli) -> Cli:
    """`grpo-orch eval RUN ...`, without a terminal."""
    monkeypatch.setattr("sys.stdin", io.StringIO())
    return lambda *words: grpo_orch("eval", parent.url, *words)


def url_of(parent: Store, problems: Dataset, *subjects: Subject, rows: int | None = None, **changes: Any) -> str:
    """Where the evaluation of these is kept."""
    record = documents.read_run(parent)
    asked = subjects or find_subjects(parent, ["20"], base=True)
    return run_of(parent, replace(record, spec=replace(record.spec, **changes)), asked, problems, rows)[0].url


def stored(parent: Store, subjects: list[str], problems: Dataset) -> Store:
    """What an evaluation of these leaves, its evaluator being done."""
    record = documents.read_run(parent)
    found = find_subjects(parent, [one for one in subjects if one != "base"], base="base" in subjects)
    store, made = run_of(parent, record, found, problems, None)
    documents.create_run(store, made)
    for at, subject in enumerate(subjects):
        right = 40 + 30 * at
        verdicts = ["correct"] * right + ["wrong"] * 20 + ["unreadable"] * (80 - right)
        scores: list[float | None] = [1.0 if one == "correct" else 0.0 for one in verdicts]
        columns, tokens = {"right": scores}, [7] * len(scores)
        made_of = EvaluationResult(SCHEMA, subject, columns, "right", "right", verdicts, tokens, cut=3)
        evaluations.evaluated(subject).write(store, made_of)
    return store


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "has no trainer.eval_dataset; name held-out problems with --dataset"),
        (("--dataset", "missing.jsonl"), "--dataset missing.jsonl: no such file or folder"),
        (("--dataset", "missing.jsonl.gz"), "--dataset missing.jsonl.gz: no such file or folder"),
        (("--dataset", "problems.txt"), "--dataset problems.txt: unknown file type; expected one of .json"),
        (("--dataset", "problems.jsonl", "--step", "7"), "no checkpoint 7; available: 0-10, 0-20"),
        (("--dataset", "problems.jsonl", "--step", "seven"), "'seven' is not a checkpoint"),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(
    parent: Store, evaluate: Cli, arguments: tuple[str, ...], said: str
) -> None:
    code, out, err = evaluate(*arguments)
    assert (code, out, err.count("\n")) == (exit_codes.USAGE, "", 1)
    assert said in err
    assert parent.folders("evaluations") == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_is_an_answer_and_pins_nothing(parent: Store, evaluate: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    code, out, err = evaluate("--dataset", "problems.jsonl")
    assert code == exit_codes.FAILED
    assert "USD/h" in err, "what it costs is said first, and not where results go"
    assert out.strip() == ""
    assert not any(one.pinned for one in Catalog(parent, "test").newest().checkpoints)


def test_eval_without_terminal_refuses_to_ask(evaluate: Cli) -> None:
    answer = evaluate("--dataset", "problems.jsonl")
    assert answer.code == exit_codes.USAGE
    assert answer.line == "cannot ask without a terminal; pass --yes to start without asking"


def test_stored_results_are_shown_side_by_side(parent: Store, evaluate: Cli, tmp_path: Path) -> None:
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


def test_each_evaluation_has_its_store_and_repeats_share_it(parent: Store) -> None:
    subjects, here = find_subjects(parent, ["20", "10", "10"], base=True), Dataset(path="a")
    assert [one.name for one in subjects] == ["base", "0-10", "0-20"]
    fleet = FleetPolicy(dead_man_min=1.0)
    policies = PoliciesSpec(fleet=fleet)
    same = {
        url_of(parent, here, *subjects),
        # With keys that change no answer.
        url_of(parent, here, *subjects, notify=Notify(command=("tell",)), metrics_port=9000, policies=policies),
    }
    others = {
        url_of(parent, here, *subjects, rows=5),
        url_of(parent, here, *subjects[:2]),
        url_of(parent, Dataset(path="b"), *subjects),
    }
    assert (len(same), len(same | others)) == (1, 4)
    assert all(url.startswith(f"{parent.url}/evaluations/base") for url in same | others)


def test_changed_problems_or_rewards_make_another_evaluation(parent: Store, tmp_path: Path) -> None:
    reward = documents.read_run(parent).spec.trainer.reward_funcs[0].rpartition(".")[0]
    code, problems = tmp_path / f"{reward.replace('.', '/')}.py", tmp_path / "problems.jsonl"
    code.parent.mkdir(parents=True, exist_ok=True)
    urls = []
    for written in ("", "def f(**_): ...\n"):
        code.write_text(written)
        for row in ('{"prompt": "1 + 1"}\n', '{"prompt": "1 + 2"}\n'):
            problems.write_text(row)
            urls += [url_of(parent, named) for named in (Dataset(path=str(problems)), Dataset(path="."))]
    assert len(set(urls)) == 8
    problems.write_text('{"prompt": "1 + 1"}\n')
    code.write_text("")
    told = Dataset(path=str(problems), prompt=f"{'Think well and ' * 20}say {{prompt}}.")  # no module's name
    assert url_of(parent, told) not in urls
    assert url_of(parent, Dataset(path=str(problems))) == urls[0]


def test_changed_tools_or_packages_make_another_evaluation(parent: Store, tmp_path: Path) -> None:
    (tmp_path / "envs" / "below").mkdir(parents=True)
    code = [tmp_path / name for name in ("tools.py", "envs/__init__.py", "envs/below/rungs.py")]
    for file in code:
        file.touch()
    urls = [url_of(parent, Dataset(path="p"))]
    for file in code:
        file.write_text("# another")
        urls.append(url_of(parent, Dataset(path="p")))
    (tmp_path / "notes.md").write_text("no code")
    assert url_of(parent, Dataset(path="p")) == urls[-1]
    assert len(set(urls)) == 4


def test_many_policies_make_no_name_that_a_file_system_refuses(parent: Store) -> None:
    subjects = [Subject(f"0-{step}", "m", "d") for step in range(1000, 1100)]
    urls = [url_of(parent, Dataset(path="a"), *some) for some in (subjects, subjects[:-1])]
    assert len(set(urls)) == 2
    assert max(len(url.rpartition("/")[2]) for url in urls) < 100


def test_hub_dataset_uses_its_test_split_and_the_runs_mapping(parent: Store) -> None:
    run = documents.read_run(parent).spec
    trained = Dataset(path="openai/gsm8k", name="main", revision="r", prompt="{question}", weight=2.0)
    asked = replace(run, trainer=replace(run.trainer, dataset=(trained, Dataset(path="other", weight=1.0))))
    expected = Dataset(path="openai/gsm8k", name="main", revision="r", split="test", prompt="{question}")
    assert find_problems(asked, "openai/gsm8k") == expected
    held_out = Dataset(path="some/held-out", split="test", prompt="{question}")
    assert find_problems(asked, held_out.path) == held_out


def test_problems_in_a_run_folder_behind_a_link_are_in_it(parent: Store, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    run = replace(documents.read_run(parent).spec, cloud="sky", workdir=str(tmp_path / "link"))
    assert find_problems(run, "problems.jsonl") == Dataset(path="problems.jsonl")


def evaluation(parent: Store, *steps: str, rows: int) -> tuple[Store, Evaluation]:
    """As `eval` begins it, up to its machines."""
    record, subjects = documents.read_run(parent), find_subjects(parent, steps, base=True)
    store, made = run_of(parent, record, subjects, Dataset(path="a"), rows)
    begun = Evaluation(parent.url, pin(parent, subjects), rows)
    documents.create_run(store, replace(made, evaluation=begun))
    return store, begun


def finish(store: Store, begun: Evaluation) -> None:
    """As its evaluator and its daemon do in the end."""
    for one in begun.subjects:
        found = EvaluationResult(SCHEMA, one.name, {"r": [1.0]}, "r", "", ["correct"], [1], cut=0)
        evaluations.evaluated(one.name).write(store, found)
    unpin(begun)


def pinned(parent: Store) -> list[str]:
    return [one.version for one in Catalog(parent, "test").newest().checkpoints if one.pinned]


def test_checkpoint_stays_until_its_last_evaluation_is_done(parent: Store) -> None:
    one, other, third = (evaluation(parent, *of, rows=n) for n, of in enumerate((["20"], ["10", "20"], ["20"]), 1))
    finish(*one)
    assert pinned(parent) == ["0-10", "0-20"]
    finish(*third)
    assert pinned(parent) == ["0-10", "0-20"]
    finish(*other)
    assert pinned(parent) == []


def test_users_pinned_checkpoint_stays_pinned(parent: Store) -> None:
    Catalog(parent, "test").pin(time.time(), PolicyVersion(0, 20), pinned=True)
    for rows in (1, 2):
        finish(*evaluation(parent, "10", "20", rows=rows))
        assert pinned(parent) == ["0-20"]


def test_checkpoint_retired_during_the_question_is_one_line(parent: Store) -> None:
    subjects = find_subjects(parent, ["10", "20"], base=True)

    def without_the_last(present: Revision) -> Revision:
        return replace(present, checkpoints=present.checkpoints[:1])

    Catalog(parent, "test").change(time.time(), without_the_last)
    with pytest.raises(Stop, match="0-20: retired in the meantime; `grpo-orch checkpoints ls"):
        pin(parent, subjects)
    assert pinned(parent) == []


def test_newest_checkpoint_is_not_one_rolled_back_from(parent: Store) -> None:
    assert [one.name for one in find_subjects(parent, [NEWEST], base=False)] == ["0-20"]
    write_fork(parent, Fork(1, "0-10", {}, (), "diverged"))
    assert [one.name for one in find_subjects(parent, [NEWEST], base=False)] == ["0-10"]
    assert [one.name for one in find_subjects(parent, ["20"], base=False)] == ["0-20"], "asked for by its name"
    write_fork(parent, Fork(2, None, {}, (), "from the start"))
    with pytest.raises(Stop, match="no checkpoint yet"):
        find_subjects(parent, [NEWEST], base=True)
