"""Metrics as read from files: every format alike, and whatever else is in a file read or refused."""

from __future__ import annotations

import gzip
import io
import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_orch.checkpoint.records.metrics import NONFINITE, MetricsRow
from grpo_orch.checkpoint.store.codec import to_json
from grpo_orch.orchestrator.traces.formats import NotATrace
from grpo_orch.orchestrator.traces.read import Trace, read_traces
from grpo_orch.policies.detect.divergence import Point
from tests.generators.metric_files import FORMATS, json_lines, run, state


def points(text: str, name: str = "file") -> tuple[Point, ...]:
    return trace(text, name).points


def trace(text: str, name: str = "file") -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text)
        (one,) = read_traces(path)
        assert one.run == ""
        return one


def test_values_and_steps_come_through_as_logged() -> None:
    rows = run(diverges=True, every=10)
    wanted = [{k: v for k, v in row.items() if k not in ("epoch", "step")} for row in rows]
    for name, written in FORMATS.items():
        if name in ("logged strings", "nested JSON lines"):
            continue
        found = points(written(rows))
        counted = name == "logged floats"
        assert [point.step for point in found] == [at + 1 if counted else 10 * (at + 1) for at in range(30)], name
        assert [point.values for point in found] == wanted, name


def test_save_steps_of_a_state_are_used_if_whole() -> None:
    rows = run(diverges=False, every=10)
    assert trace(state(rows, save_steps=40)).save_steps == 40
    assert trace(state(rows, save_steps=0.1)).save_steps is None


def test_nan_is_distinguished_from_nothing_logged() -> None:
    in_json = '{"step": 1, "kl": NaN, "loss": 1%s, "grad_norm": null, "reward": 0.5}\n' % ("0" * 400)
    in_python = "{'kl': nan, 'loss': 'inf', 'grad_norm': None, 'reward': np.float64(0.5)}\n"
    ours = to_json(
        MetricsRow(0, 1, 1e9, 1, {"reward": 0.5, **{f"{NONFINITE}{n}": 1.0 for n in ("kl", "loss", "grad_norm")}})
    )
    in_a_table = "step,kl,loss,grad_norm,reward,entropy\n1,nan,-inf,NaN,0.5,\n"
    for text in (in_json, in_python, in_a_table):
        assert points(text) == (Point(1, {"kl": None, "loss": None, "grad_norm": None, "reward": 0.5}),), text
    [own] = points(ours.decode())  # which were not finite for certain
    assert {name: str(value) for name, value in own.values.items()} == {
        **dict.fromkeys(("kl", "loss", "grad_norm"), "nan"),
        "reward": "0.5",
    }


@pytest.mark.parametrize("step", [None, "first", 1e300, math.nan, True])
def test_where_no_row_has_a_step_they_are_counted(step: Any) -> None:
    rows = [{"step": step, "kl": 0.1}, {"step": step, "kl": 0.2}]
    assert points(json_lines(rows)) == (Point(1, {"kl": 0.1}), Point(2, {"kl": 0.2}))


def test_rows_of_one_step_share_a_point() -> None:
    train, held_out = {"kl": 0.1, "reward": 0.5}, {"eval_reward": 0.7, "eval_kl": 0.2}
    both = train | held_out
    with_steps = [{"step": 5, **train}, {"step": 5, **held_out}, {"step": 6, **train}]
    assert points(json_lines(with_steps)) == (Point(5, both), Point(6, train))
    assert points("".join(f"{row}\n" for row in (train, held_out, train))) == (Point(1, both), Point(2, train))
    empty = {"step": 5, "kl": None, "reward": None, "gpu": 0.9}  # a table with a row for everything
    assert points(json_lines([{"step": 5, **train}, empty])) == (Point(5, train),)
    spoken = '{"step": 5, "kl": 0.1, "reward": 0.5, "completion": "one\u2028two\x85"}\n'
    assert points(spoken) == (Point(5, train),)
    prefixed = [{"train/global_step": 5, "_step": 9, "train/kl": 0.1, "train/reward": 0.5, "eval/reward": 0.7}]
    assert points(json_lines(prefixed)) == (Point(5, {"kl": 0.1, "reward": 0.5, "eval_reward": 0.7}),)


def test_new_timeline_replaces_abandoned_steps() -> None:
    rows = [
        MetricsRow(0, 1, 1.0, 1, {"kl": 0.1}),
        MetricsRow(0, 2, 1.0, 1, {"kl": 9.0}),
        MetricsRow(0, 3, 1.0, 1, {"kl": 9.0}),
    ]
    rows += [MetricsRow(1, 2, 1.0, 1, {"kl": 0.2})]
    text = b"\n".join(map(to_json, rows)).decode()
    assert points(text) == (Point(1, {"kl": 0.1}), Point(2, {"kl": 0.2}))


SCRAPS = st.sampled_from(
    [
        *"{}[]'\",/1\r\n",
        "'kl': ",
        '"kl": ',
        "nan",
        "1e400",
        "kl,step\n",
        "a - train/kl,Step\n",
        "step:",
        " - ",
        " | ",
        "{'kl': 1}",
        "{'kl': 1, 'run': 'a'}",
        "  3%|▎  | 5/9 [",
        "(a pid=1) ",
        "\x1b[0m",
    ]
)
TEXTS = st.one_of(st.binary(max_size=300), st.lists(SCRAPS | st.text(max_size=5), max_size=40).map("".join))
JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["log_history", "kl", "step", "values", "timeline", "reward", "run"]), inner
        )
    ),
    max_leaves=20,
)


def read_anything(data: bytes, name: str = "file") -> None:
    """Read it, or have it refused in one line; what is read is in order and finite."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        try:
            found = read_traces(path)
        except NotATrace as error:
            refused = str(error)
        else:
            assert len({one.run for one in found}) == len(found) > 0
            for one in found:
                steps = [point.step for point in one.points]
                assert steps == sorted(set(steps))
                values = [value for point in one.points for value in point.values.values()]
                assert all(value is None or math.isfinite(value) for value in values)
            return
        assert refused
        assert "\n" not in refused


@given(TEXTS)
@settings(max_examples=300, deadline=None)
def test_any_file_content_is_read_or_refused(scraps: bytes | str) -> None:
    read_anything(scraps if isinstance(scraps, bytes) else scraps.encode(errors="surrogatepass"))


@given(JSONS)
@settings(max_examples=300, deadline=None)
def test_any_json_document_is_read_or_refused(document: Any) -> None:
    read_anything(json.dumps(document).encode(), "file.json")


@given(st.sampled_from([b"SQLite format 3\0", b"\x1f\x8b", b""]), st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_any_claimed_format_is_read_or_refused(magic: bytes, rest: bytes) -> None:
    read_anything(magic + rest)
    read_anything(magic + rest, "events.out.tfevents.1.host")


@given(st.lists(st.dictionaries(st.sampled_from(["kl", "reward", "step", "grad_norm"]), st.floats()), min_size=1))
@settings(max_examples=100, deadline=None)
def test_all_that_json_lines_hold_is_found_again(rows: list[Mapping[str, float]]) -> None:
    rows = [{**row, "loss": 0.0, "step": at} for at, row in enumerate(rows, start=1)]
    wanted = [
        {name: value if math.isfinite(value) else None for name, value in row.items() if name != "step"}
        for row in rows
    ]
    assert [dict(point.values) for point in points("".join(json.dumps(row) + "\n" for row in rows))] == wanted


def test_compressed_file_is_read_and_a_cut_one_refused(tmp_path: Path) -> None:
    rows = run(diverges=False)
    packed = gzip.compress(json_lines(rows).encode())
    whole, half = tmp_path / "log.jsonl.gz", tmp_path / "half.gz"
    whole.write_bytes(packed)
    half.write_bytes(packed[: len(packed) // 2])
    assert [len(one.points) for one in read_traces(whole)] == [300]
    with pytest.raises(NotATrace, match=r"^as gzip: Compressed file ended"):
        read_traces(half)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_log_with_windows_line_ends_and_encodings(encoding: str, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_bytes("".join(f"{{'loss': 0.1, 'kl': 0.{at}}} ▁█\r\n" for at in range(1, 6)).encode(encoding))
    (one,) = read_traces(log)
    assert [point.values["kl"] for point in one.points] == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_standard_input_is_a_file_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json_lines(run(diverges=False)).encode())))
    (one,) = read_traces(Path("-"))
    assert (one.run, len(one.points)) == ("", 300)


def test_of_a_folder_the_newest_state_is_read(tmp_path: Path) -> None:
    rows = run(diverges=False)
    for number in (20, 100, "none"):
        (tmp_path / f"checkpoint-{number}").mkdir()
    (tmp_path / "checkpoint-20" / "trainer_state.json").write_text(state(rows[:20]))
    (tmp_path / "checkpoint-100" / "trainer_state.json").write_text(state(rows[:100], save_steps=20))
    (one,) = read_traces(tmp_path)
    assert (one.points[-1].step, one.save_steps) == (100, 20)
    (tmp_path / "trainer_state.json").write_text(state(rows))
    assert read_traces(tmp_path)[0].points[-1].step == 300
    (tmp_path / "trainer_state.json").write_text(state(rows[:50]))  # of a run that then went on
    assert read_traces(tmp_path)[0].points[-1].step == 100


@pytest.mark.parametrize(
    "name", ["trainer_log.jsonl", "logging.jsonl", "files/wandb-history.jsonl", "files/output.log"]
)
def test_of_a_folder_without_a_state_its_log_is_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(NotATrace, match=r"^no metrics of training found; expected trainer_state\.json, "):
        read_traces(tmp_path)
    (tmp_path / "files").mkdir()
    (tmp_path / name).write_text(json_lines(run(diverges=False)))
    (one,) = read_traces(tmp_path)
    assert len(one.points) == 300
