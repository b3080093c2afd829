"""`grpo-orch detect` on every kind of file in which runs leave their metrics, and on files that are none."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from matplotlib import image

from orchestrator.cli import main
from orchestrator.views.detection import Detection, to_json
from orchestrator.views.traces import Trace
from policies.detect.divergence import Health, Point, Verdict
from tests.generators.metric_files import FORMATS, ONSET, Rows, json_lines, repr_log, run, state

KEYS = ["file", "points", "tripped", "trip_step", "onset_step", "target_step", "evidence"]


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def found(self) -> list[dict[str, Any]]:
        assert (self.code, self.err) == (0, ""), self.err
        read: list[dict[str, Any]] = json.loads(self.out)
        return read

    @property
    def line(self) -> str:
        """What a user's mistake is told as: one line, exit code 2, and no traceback."""
        assert (self.code, self.out) == (2, "")
        assert self.err.count("\n") == 1, self.err
        return self.err.rstrip("\n")


Cli = Callable[..., Answer]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """`grpo-orch detect ...` in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["grpo-orch", "detect", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        return Answer(int(ended.value.code or 0), told.out, told.err)

    yield call
    structlog.reset_defaults()


@pytest.mark.parametrize("written", FORMATS.values(), ids=FORMATS)
def test_every_format_is_read_alike(written: Callable[[Rows], str], cli: Cli) -> None:
    Path("bad").write_text(written(run(diverges=True)))
    Path("good").write_text(written(run(diverges=False)))
    bad, good = cli("bad", "good", "-o", "json", "--save-steps", "50").found
    assert (list(bad), list(good)) == (KEYS, KEYS)
    assert (bad["file"], bad["points"], bad["tripped"]) == ("bad", 300, True)
    assert ONSET < bad["trip_step"] <= ONSET + 25
    assert 150 < bad["onset_step"] <= ONSET
    assert bad["target_step"] == (bad["onset_step"] - 1) // 50 * 50
    assert bad["evidence"]
    assert good == dict.fromkeys(KEYS) | {"file": "good", "points": 300, "tripped": False, "evidence": []}


@pytest.mark.parametrize(
    ("written", "options", "every"), [("state", (), 40), ("state", ("--save-steps", "7"), 40), ("lines", (), 1)]
)
def test_the_target_is_a_checkpoint_that_the_run_has(
    written: str, options: tuple[str, ...], every: int, cli: Cli
) -> None:
    rows = run(diverges=True)
    Path("run").write_text(state(rows, save_steps=40) if written == "state" else json_lines(rows))
    (found,) = cli("run", "-o", "json", *options).found
    assert found["target_step"] == (found["onset_step"] - 1) // every * every


def test_a_checkpoint_of_the_onset_itself_is_no_target(cli: Cli) -> None:
    Path("run").write_text(json_lines(run(diverges=True)))
    onset = cli("run", "-o", "json").found[0]["onset_step"]
    assert cli("run", "-o", "json", "--save-steps", str(onset)).found[0]["target_step"] == 0
    assert cli("run", "-o", "json", "--save-steps", str(onset - 1)).found[0]["target_step"] == onset - 1


def test_the_table_says_what_was_found_and_that_kl_is_missing(cli: Cli) -> None:
    Path("bad").write_text(state(run(diverges=True), save_steps=25))
    Path("no kl").write_text(
        json_lines([{"step": row["step"], "reward": row["reward"]} for row in run(diverges=False)])
    )
    (found,) = cli("bad", "-o", "json").found
    lines = [" ".join(line.split()) for line in cli("bad", "no kl").out.splitlines()]
    steps = f"{found['trip_step']} {found['onset_step']} {found['target_step']}"
    assert lines[:3] == [
        "file points KL health trip onset target",
        f"bad 300 logged tripped {steps}",
        "no kl 300 not logged healthy – – –",
    ]
    assert lines[3:5] == ["", "bad"]
    assert "Wrote detect.png" in lines
    assert all(" ".join(sentence.split()) in " ".join(lines) for sentence in found["evidence"])


def test_a_run_that_ends_under_watch_says_so_and_has_no_target() -> None:
    watched = Verdict(Health.WATCH, step=300, onset_step=290, evidence=("KL rises",))
    found = to_json(Detection("run", Trace((Point(300, {"kl": 1.0}),)), watched, None))
    assert found == dict.fromkeys(KEYS) | {
        "file": "run",
        "points": 1,
        "tripped": False,
        "evidence": ["on watch at its end, step 300, since step 290", "KL rises"],
    }


def test_the_limit_is_for_kl_above_the_start(cli: Cli) -> None:
    rows = [{**row, "kl": 1.0 + (0.9 if row["step"] > 100 else 0.0)} for row in run(diverges=False)]
    Path("run").write_text(json_lines(rows))
    assert not cli("run", "-o", "json", "--limit", "5").found[0]["tripped"]
    found = cli("run", "-o", "json", "--limit", "0.1").found[0]
    assert found["tripped"]
    assert found["onset_step"] <= 100 < found["trip_step"]


def test_the_picture_has_a_column_a_file(cli: Cli) -> None:
    Path("bad").write_text(state(run(diverges=True)))
    Path("$\\frac$ [red]").write_text(repr_log(run(diverges=False), quoted=True))
    Path("odd").write_text(json_lines([{"step": 1, "kl": 1e308, "reward": None}, {"step": 10**11, "kl": -1e308}]))
    assert cli("bad", "--out", "one.png").code == 0
    assert cli("bad", "$\\frac$ [red]", "odd", "--out", "three.png").code == 0
    one, three = image.imread("one.png"), image.imread("three.png")
    assert three.shape[1] > 2 * one.shape[1]
    assert len(np.unique(one.reshape(-1, one.shape[2]), axis=0)) > 100
    assert sorted(os.listdir()) == ["$\\frac$ [red]", "bad", "odd", "one.png", "three.png"]


def test_a_program_gets_no_picture_that_it_did_not_ask_for(cli: Cli) -> None:
    Path("run").write_text(state(run(diverges=False)))
    assert cli("run", "-o", "json").found
    assert os.listdir() == ["run"]
    assert cli("run", "-o", "json", "--out", "asked.png").found
    assert Path("asked.png").exists()


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b" \n\n", "it is empty"),
    "binary": (b"\x89PNG\r\n\x1a\n\0\0\0", "it is no text"),
    "prose.txt": (
        "nothing but prose: {kl} is 0,1 – and 'loss' is high\n".encode(),
        "no metrics of training found",
    ),
    "configuration.json": (b'{"beta": 0.04, "learning_rate": 1e-6}', "no metrics of training found"),
    "cut.json": (b'{"log_history": [{"kl": 0.1, \n"step"', "as JSON: line 2, column 7: "),
    "deep.json": (b"[" * 100_000, "as JSON: too deep"),
    "digits.json": (b'{"steps": [' + b"9" * 5000 + b"]}", "as JSON: a number too long"),
    "no-rows.json": (b'{"log_history": [1, null, "kl"]}', "no metrics of training found"),
    "no-history.json": (b'{"log_history": {"kl": 1}}', "no metrics of training found"),
    "header.csv": (b"step,kl,loss\n", "no metrics of training found"),
    "wide.csv": (b'step,kl\n1,"' + b"x" * 200_000, "as CSV: field larger than field limit"),
    "held-out.jsonl": (b'{"step": 5, "eval_reward": 0.5}\n', "no metrics of training found"),
    "latin-1": (b"\xe9\xe8 kl\xff\n", "no metrics of training found"),
    "[bold]odd": (b"x", "no metrics of training found"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_trace_is_named_in_one_line_and_nothing_is_written(name: str, cli: Cli) -> None:
    data, says = BROKEN[name]
    Path(name).write_bytes(data)
    Path("good.json").write_text(state(run(diverges=False)))
    before = sorted(os.listdir())
    answer = cli("good.json", name)
    assert answer.line.startswith(f"{name}: ")
    assert says in answer.line
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("missing",), "missing: No such file or directory"),
        (("folder",), "folder: Is a directory"),
        (("good", "--limit", "0"), "--limit 0: expected a number above 0"),
        (("good", "--limit", "nan"), "--limit nan: expected a number above 0"),
        (("good", "--save-steps", "0"), "--save-steps 0: expected a whole number above 0"),
        (("good", "--out", "nowhere/x.png"), "nowhere/x.png: No such file or directory"),
        (("good", "--out", "folder"), "folder: Is a directory"),
    ],
)
def test_a_users_mistake_is_one_line(words: tuple[str, ...], says: str, cli: Cli) -> None:
    Path("good").write_text(state(run(diverges=False)))
    Path("folder").mkdir()
    assert cli(*words).line == says
