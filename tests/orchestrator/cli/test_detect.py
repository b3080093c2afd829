"""`grpo-orch detect` on every kind of file in which runs leave their metrics, and on files that are none."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.orchestrator.cli.detect import Detection, to_json
from grpo_orch.orchestrator.traces.formats import NotATrace
from grpo_orch.orchestrator.traces.read import EXPECTED_IN_FOLDER, Trace, read_traces
from grpo_orch.policies.detect.divergence import Health, Point, Verdict
from tests.generators.metric_files import FORMATS, ONSET, Rows, json_lines, run, state
from tests.rigs.command_line import Answer, Cli

TOLD = """
file run points unit health reason tripped trip_step onset_step target_step evidence columns columns_unused
looked_at error
"""
KEYS = tuple(TOLD.split())
RECORDED = Path(__file__).parents[2] / "policies" / "detect" / "traces"
TRIPPED = 3


class Told(Answer):
    """What `detect` says."""

    @property
    def found(self) -> list[dict[str, Any]]:
        """What a program reads, of files that could all be read."""
        read: list[dict[str, Any]] = json.loads(self.out)
        assert self.err == ""
        assert self.code == (TRIPPED if any(one["tripped"] for one in read) else 0)
        assert all(tuple(one) == KEYS for one in read)
        return read

    @property
    def lines(self) -> list[str]:
        """What a person reads, without its columns."""
        assert self.err == ""
        return [" ".join(line.split()) for line in self.out.splitlines()]

    @property
    def words(self) -> str:
        """The same without line ends."""
        return " ".join(self.out.split())

    @property
    def line(self) -> str:
        """What a user's mistake is told as: one line, exit code 2, and no traceback."""
        assert self.code == 2
        assert self.err.count("\n") == 1, self.err
        return self.err.rstrip("\n")


Detect = Callable[..., Told]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grpo_orch: Cli) -> Detect:
    """`grpo-orch detect ...` in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: Told(*grpo_orch("detect", *words))


# traces/test_read.py has what is read of the other formats.
@pytest.mark.parametrize(
    "written",
    [FORMATS[name] for name in ("trainer_state.json", "logged floats", "logged strings", "nested JSON lines")],
)
def test_formats_are_judged_alike(written: Callable[[Rows], str], cli: Detect) -> None:
    Path("bad").write_text(written(run(diverges=True)))
    Path("good").write_text(written(run(diverges=False)))
    bad, good = cli("bad", "good", "-o", "json", "--save-steps", "50").found
    assert (bad["file"], bad["points"], bad["health"], bad["tripped"]) == ("bad", 300, "tripped", True)
    assert ONSET < bad["trip_step"] <= ONSET + 25
    assert 150 < bad["onset_step"] <= ONSET
    saved_before = (bad["onset_step"] - 1) // 50 * 50
    assert bad["target_step"] == (None if bad["unit"] == "record" else saved_before)
    assert bad["evidence"]
    looked_at, taken = good.pop("looked_at"), good.pop("columns")
    assert {"kl", "reward"} <= taken.keys()
    told = {"file": "good", "points": 300, "health": "healthy", "tripped": False, "evidence": []}
    unknown = {"looked_at": None, "columns": None, "unit": None, "columns_unused": None}
    assert {**good, **unknown} == dict.fromkeys(KEYS) | told
    assert looked_at["kl"] == {"points": 300, "start": pytest.approx(0.05, 0.2), "end": pytest.approx(0.05, 0.2)}
    assert looked_at["reward"]["end"] == pytest.approx(0.6, 0.1)


@pytest.mark.parametrize(
    ("written", "options", "every"), [("state", (), 40), ("state", ("--save-steps", "7"), 40), ("lines", (), 1)]
)
def test_the_target_is_a_checkpoint_that_the_run_has(
    written: str, options: tuple[str, ...], every: int, cli: Detect
) -> None:
    rows = run(diverges=True)
    Path("run").write_text(state(rows, save_steps=40) if written == "state" else json_lines(rows))
    (found,) = cli("run", "-o", "json", *options).found
    assert found["target_step"] == (found["onset_step"] - 1) // every * every


def test_a_checkpoint_of_the_onset_itself_is_no_target(cli: Detect) -> None:
    Path("run").write_text(json_lines(run(diverges=True)))
    onset = cli("run", "-o", "json").found[0]["onset_step"]
    assert cli("run", "-o", "json", "--save-steps", str(onset)).found[0]["target_step"] == 0
    assert cli("run", "-o", "json", "--save-steps", str(onset - 1)).found[0]["target_step"] == onset - 1


def test_declared_task_changes_are_no_fall(cli: Detect) -> None:
    rows = [{"step": step, "reward": min(0.8, 0.1 + step / 100) if step <= 100 else 0.1} for step in range(1, 301)]
    Path("run").write_text(json_lines(rows))
    assert "--task-change" in cli("run").words
    assert not cli("run", "-o", "json", "--task-change", "50", "--task-change", "101").found[0]["tripped"]


def test_the_table_has_a_line_a_run_and_below_it_why(cli: Detect) -> None:
    Path("bad").write_text(state(run(diverges=True), save_steps=25))
    Path("good").write_text(json_lines(run(diverges=False)))
    bad, good = cli("bad", "good", "-o", "json").found
    answer = cli("bad", "good")
    assert answer.code == TRIPPED
    steps = f"{bad['trip_step']} {bad['onset_step']} {bad['target_step']}"
    assert answer.lines[:3] == [
        "run points KL at end health trip onset target",
        f"bad 300 {bad['looked_at']['kl']['end']:.3g} tripped {steps}",
        f"good 300 {good['looked_at']['kl']['end']:.3g} healthy – – –",
    ]
    assert answer.lines[3:5] == ["", "bad"]
    assert all(sentence in answer.words for sentence in bad["evidence"])
    assert "2 runs: 1 tripped, 1 healthy" in answer.lines
    assert cli("good").code == 0


def test_healthy_run_reports_the_checked_signals(cli: Detect) -> None:
    rows = [{**row, "reward": 0.31 + 0.5 * row["step"] / 300} for row in run(diverges=False)]
    thin = [{k: v for k, v in row.items() if k != "entropy" or row["step"] % 10 == 0} for row in rows]
    Path("run").write_text(json_lines(thin))
    assert (
        "- checked 300 points of KL, reward, gradient norm, completion length and 30 points of entropy: "
        "KL ended at 0.0504, reward rose from 0.317 to 0.805"
    ) in cli("run").words
    Path("flat").write_text(state(run(diverges=False)))
    assert "reward stayed at about 0.601" in cli("flat").words
    seen = cli("run", "-o", "json").found[0]["looked_at"]
    assert list(seen) == ["kl", "reward", "grad_norm", "entropy", "completions/mean_length"]
    assert seen["entropy"]["points"] == 30


def only(*names: str) -> list[dict[str, float]]:
    return [{name: row[name] for name in ("step", *names)} for row in run(diverges=False)]


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (
            only("loss"),
            "neither KL nor reward was logged; TRL logs `kl` if beta is above 0, and always logs `reward`",
        ),
        (only("grad_norm", "entropy"), "neither KL nor reward was logged"),
        ([{**row, "kl": 0.0} for row in only("loss")], "KL is always 0 and no reward was logged"),
        (
            only("reward")[:13],
            "only 13 points of KL or reward, 14 are needed: try again later, or log more often",
        ),
        (only("kl")[:1], "only 1 point of KL or reward, 14 are needed"),
    ],
)
def test_too_little_data_gives_no_verdict(rows: list[dict[str, float]], why: str, cli: Detect) -> None:
    Path("run").write_text(json_lines(rows))
    answer = cli("run")
    assert answer.code == 0
    assert f"run {len(rows)} " in answer.lines[1]
    assert " unknown – – –" in answer.lines[1]
    assert why in answer.words
    (found,) = cli("run", "-o", "json").found
    assert (found["health"], found["tripped"]) == ("unknown", False)
    assert why in found["reason"]


@pytest.mark.parametrize("rows", [only("kl"), only("reward"), only("reward")[:14]])
def test_kl_or_reward_is_enough_to_be_called_healthy(rows: list[dict[str, float]], cli: Detect) -> None:
    Path("run").write_text(json_lines(rows))
    (found,) = cli("run", "-o", "json").found
    assert (found["health"], found["reason"]) == ("healthy", None)


def test_divergence_without_kl_and_reward_is_found(cli: Detect) -> None:
    Path("run").write_text(
        json_lines([{**row, "loss": math.nan if row["step"] > 3 else 0.1} for row in only("loss")[:9]])
    )
    (found,) = cli("run", "-o", "json").found
    assert (found["health"], found["reason"]) == ("tripped", None)


def test_run_ending_under_watch_reports_it_without_target() -> None:
    watched = Verdict(Health.WATCH, step=300, onset_step=290, evidence=("KL rises",))
    found = to_json(Detection("run", Trace((Point(300, {"kl": 1.0}),)), watched, None, None, {}, None))
    assert found == dict.fromkeys(KEYS) | {
        "file": "run",
        "points": 1,
        "unit": "step",
        "columns": {},
        "columns_unused": [],
        "health": "watch",
        "tripped": False,
        "evidence": ["possible divergence at its end, step 300, since step 290", "KL rises"],
        "looked_at": {},
    }


def test_numbers_are_written_as_people_do(cli: Detect) -> None:
    rows = [{**row, "kl": row["kl"] * (0.1 if row["step"] > ONSET else 1)} for row in run(diverges=True)]
    Path("run").write_text(json_lines(rows))
    answer = cli("run", *map(str, RECORDED.glob("*.jsonl")))
    told = cli("run", *map(str, RECORDED.glob("*.jsonl")), "-o", "json").found
    sentences = [answer.words, *(sentence for one in told for sentence in one["evidence"])]
    assert not [told for told in sentences if re.search(r"\de[+-]?\d", told)]


def test_target_is_any_step_without_a_known_save_interval(cli: Detect) -> None:
    Path("run").write_text(json_lines(run(diverges=True)))
    assert "--save-steps N" in cli("run").words
    assert "--save-steps N" not in cli("run", "--save-steps", "10").words


def test_the_limit_is_for_kl_above_the_start(cli: Detect) -> None:
    rows = [{**row, "kl": 1.0 + (0.9 if row["step"] > 100 else 0.0)} for row in run(diverges=False)]
    Path("run").write_text(json_lines(rows))
    assert not cli("run", "-o", "json", "--limit", "5").found[0]["tripped"]
    found = cli("run", "-o", "json", "--limit", "0.1").found[0]
    assert found["tripped"]
    assert found["onset_step"] <= 100 < found["trip_step"]


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b" \n\n", "the file is empty"),
    "binary": (b"\x89PNG\r\n\x1a\n\0\0\0", "the file is not text"),
    "cut.json": (b'{"log_history": [{"kl": 0.1, \n"step"', "as JSON: line 2, column 7: "),
    "deep.json": (b"[" * 100_000, "as JSON: nested too deeply"),
    "digits.json": (b'{"steps": [' + b"9" * 5000 + b"]}", "as JSON: a number is too long"),
    "header.csv": (b"step,kl,loss\n", "no metrics of training found"),
    "wide.csv": (b'step,kl\n1,"' + b"x" * 200_000, "as CSV: field larger than field limit"),
    "[bold]odd": (b"x", "no metrics of training found"),
}


def test_file_named_in_another_encoding_is_judged(cli: Detect) -> None:
    Path(os.fsdecode(b"caf\xe9.json")).write_text(state(run(diverges=False)))
    answer = cli("caf\udce9.json")
    assert answer.code == 0


@pytest.mark.parametrize("name", BROKEN)
def test_file_without_trace_is_named_and_others_are_judged(name: str, cli: Detect) -> None:
    data, says = BROKEN[name]
    Path(name).write_bytes(data)
    Path("good.json").write_text(state(run(diverges=False)))
    answer = cli(name, "good.json", "-o", "json")
    assert answer.line.startswith(f"{name}: ")
    assert says in answer.line
    broken, good = json.loads(answer.out)
    assert broken == dict.fromkeys(KEYS) | {"file": name, "error": answer.line.removeprefix(f"{name}: ")}
    assert (good["file"], good["health"], good["error"]) == ("good.json", "healthy", None)


def test_a_trip_outweighs_a_file_that_cannot_be_read(cli: Detect) -> None:
    Path("bad").write_text(state(run(diverges=True)))
    for words in (("missing", "bad"), ("bad", "missing")):
        answer = cli(*words)
        assert (answer.code, answer.err.count("\n")) == (TRIPPED, 1)
        assert " tripped " in answer.out


def test_runs_of_one_file_are_judged_separately(cli: Detect) -> None:
    Path("both").write_text(json_lines([*run(diverges=False), *run(diverges=True)]))
    good, bad = cli("both", "-o", "json").found
    assert [(one["file"], one["run"], one["health"]) for one in (good, bad)] == [
        ("both", "1", "healthy"),
        ("both", "2", "tripped"),
    ]
    answer = cli("both")
    assert [line.split()[0] for line in answer.lines[1:3]] == ["both#1", "both#2"]
    assert answer.code == TRIPPED


def test_kl_summed_over_completions_is_recognised(cli: Detect) -> None:
    rows = [{"step": row["step"], "objective/kl": 50 * row["kl"]} for row in run(diverges=False)]
    Path("ppo").write_text(json_lines(rows))
    assert (
        "checked 300 points of KL of whole completions: KL of whole completions ended at 2.52" in cli("ppo").words
    )
    assert cli("ppo", "-o", "json").found[0]["health"] == "healthy"


def test_where_no_file_can_be_read_nothing_is_written(cli: Detect) -> None:
    assert (cli("missing").out, os.listdir()) == ("", [])
    answer = cli("missing", "-o", "json")
    assert (answer.code, len(json.loads(answer.out)), os.listdir()) == (2, 1, [])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("missing",), "missing: No such file or directory"),
        (("folder",), f"folder: no metrics of training found; {EXPECTED_IN_FOLDER}"),
        (("good", "--limit", "0"), "--limit 0: expected a number above 0"),
        (("good", "--limit", "nan"), "--limit nan: expected a number above 0"),
        (("good", "--save-steps", "0"), "--save-steps 0: expected a whole number above 0"),
    ],
)
def test_a_users_mistake_is_one_line(words: tuple[str, ...], says: str, cli: Detect) -> None:
    Path("good").write_text(state(run(diverges=False)))
    Path("folder").mkdir()
    assert cli(*words).line == says


# Logs of other frameworks: names, nulls, records without steps, any content.

FOREIGN = Path(__file__).parent / "foreign_logs"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOREIGN.glob("names-*")))
def test_names_of_other_frameworks_are_recognised(name: str, cli: Detect) -> None:
    [found] = cli(str(FOREIGN / f"{name}.jsonl"), "-o", "json").found
    assert found["tripped"]
    assert {"kl", "reward", "grad_norm"} <= found["columns"].keys()
    assert (found["unit"], found["target_step"]) == ("step", 27)


@pytest.mark.parametrize("name", ["loss-null", "kl-null", "gradnorm-null", "kl-and-gradnull", "wandb-tojson-nan"])
def test_columns_that_were_never_logged_do_not_trip(name: str, cli: Detect) -> None:
    [found] = cli(str(FOREIGN / f"{name}.jsonl"), "-o", "json").found
    assert found["health"] == "healthy"


def test_bar_total_numbers_records_written_in_blocks(cli: Detect) -> None:
    [found] = cli(str(FOREIGN / "collapsed-in-blocks.log"), "-o", "json").found
    assert (found["points"], found["unit"]) == (40, "step")
    assert found["trip_step"] % 5 == 0
    assert 0 < found["target_step"] < found["onset_step"] < found["trip_step"] <= 100


def test_log_without_steps_counts_records_and_names_no_target(cli: Detect) -> None:
    rows = [{"kl": 0.01 if at < 60 else math.exp(at - 60), "reward": 0.5} for at in range(80)]
    Path("log").write_text("".join(f"{row}\n" for row in rows))
    [found] = cli("log", "-o", "json").found
    assert (found["tripped"], found["unit"], found["target_step"]) == (True, "record", None)
    assert "record" in found["evidence"][0]


def test_lists_of_rewards_are_averaged(cli: Detect) -> None:
    rows = [{"step": at, "reward": [0.0, 1.0, 0.5], "kl": 0.01} for at in range(1, 31)]
    Path("log").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    [found] = cli("log", "-o", "json").found
    assert found["looked_at"]["reward"] == {"points": 30, "start": 0.5, "end": 0.5}


def test_wandb_run_file_is_refused_with_a_command_to_read_it(tmp_path: Path) -> None:
    file = tmp_path / "run-abc.wandb"
    file.write_bytes(b":W&B\xbe\xee\x00" + bytes(100))
    with pytest.raises(NotATrace, match=r"wandb\.Api\(\)\.run\('ENTITY/PROJECT/RUN'\)"):
        read_traces(file)


def test_message_for_no_metrics_lists_the_columns(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text('{"step": 1, "speed": 3.0, "wattage": 4}\n' * 3)
    with pytest.raises(NotATrace, match="columns seen: speed, wattage;"):
        read_traces(file)


def test_reader_that_raises_costs_its_file_alone(cli: Detect, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> Any:
        if path.name == "bad":
            raise KeyError("column")
        return read_traces(path)

    monkeypatch.setattr("grpo_orch.orchestrator.cli.detect.read_traces", broken)
    Path("bad").write_text("x")
    bad, good = json.loads(cli("bad", str(FOREIGN / "names-art.jsonl"), "-o", "json").out)
    assert bad["error"] == "cannot be read: KeyError: 'column'"
    assert good["tripped"]
