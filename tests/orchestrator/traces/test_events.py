"""TensorBoard's event files, written by TensorBoard's own writers."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary import Writer
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from grpo_orch.orchestrator.traces.formats import TENSORBOARD_NEEDED, NotATrace
from grpo_orch.orchestrator.traces.read import read_traces

Rows = Sequence[tuple[int, Mapping[str, float]]]
ROWS: Rows = [(step, {"train/kl": step / 8, "train/reward": 0.5, "eval/loss": 0.25}) for step in range(5, 101, 5)]


def write_simple(folder: Path, rows: Rows) -> None:
    """As torch's SummaryWriter does, which transformers and verl use: an event a value, a plain number in it."""
    writer = EventFileWriter(str(folder))
    for step, values in rows:
        for tag, value in values.items():
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(wall_time=1e9 + step, step=step, summary=summary))
    writer.close()


def write_tensors(folder: Path, rows: Rows) -> None:
    """As TensorFlow's and JAX's do."""
    writer = Writer(str(folder))
    for step, values in rows:
        for tag, value in values.items():
            writer.add_scalar(tag, np.float32(value), step)
    writer.close()


@pytest.mark.parametrize("write", [write_simple, write_tensors])
def test_a_file_and_its_folder_are_the_same_run(write: Callable[[Path, Rows], None], tmp_path: Path) -> None:
    write(tmp_path, ROWS)
    (file,) = tmp_path.iterdir()
    for path in (file, tmp_path):
        (one,) = read_traces(path)
        assert one.run == ""
        assert [point.step for point in one.points] == [step for step, _ in ROWS]
        assert one.points[1].values == {"kl": 1.25, "reward": 0.5, "eval_loss": 0.25}


def test_each_folder_of_a_folder_is_a_run(tmp_path: Path) -> None:
    write_simple(tmp_path / "runs" / "first", ROWS)
    write_simple(tmp_path / "runs" / "second", ROWS[:4])
    (tmp_path / "runs" / "notes.txt").write_text("no events")
    found = {one.run: len(one.points) for one in read_traces(tmp_path)}
    assert found == {"runs/first": 20, "runs/second": 4}


def test_a_restart_adds_a_file_to_its_runs_folder(tmp_path: Path) -> None:
    write_simple(tmp_path / "a", ROWS)
    write_simple(tmp_path / "b", [(step, {"train/kl": 9.0}) for step in range(50, 121, 5)])
    (again,) = (tmp_path / "b").iterdir()
    again.rename(tmp_path / "a" / "events.out.tfevents.9999999999.host.1.0")
    (one,) = read_traces(tmp_path)
    assert {point.step: point.values["kl"] for point in one.points} == {
        step: step / 8 if step < 50 else 9.0 for step in range(5, 121, 5)
    }


def test_a_file_that_was_cut_off_is_read_to_where_it_is_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_simple(tmp_path, [*ROWS, (105, {"train/kl": math.nan})])
    (file,) = tmp_path.iterdir()
    assert read_traces(file)[0].points[-1].values == {"kl": None}
    file.write_bytes(file.read_bytes()[:-7])
    assert [point.step for point in read_traces(file)[0].points] == [step for step, _ in ROWS]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("data", [b"", b"prose, no events\n" * 9, b"\0" * 99])
def test_a_file_that_holds_no_events_is_refused_in_a_line(
    data: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "events.out.tfevents.1.host"
    file.write_bytes(data)
    with pytest.raises(NotATrace, match=r"^no metrics of training found; expected "):
        read_traces(file)
    assert capfd.readouterr() == ("", "")


def test_missing_reader_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_simple(tmp_path, ROWS)
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    with pytest.raises(NotATrace) as refused:
        read_traces(tmp_path)
    assert str(refused.value) == TENSORBOARD_NEEDED
