"""A log that a call of SkyPilot's writes, read as lines; SkyPilot itself is in `test_skypilot.py`."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from orchestrator.clouds.protocol import CloudUnavailable
from orchestrator.clouds.sky.calls import lines_from
from tests.budget import HANG_S


def test_lines_come_while_the_call_writes() -> None:
    was_read = threading.Event()

    def call(sink: io.TextIOBase) -> None:
        print("\x1b[36m(daemon)\x1b[0m one\n", end="", file=sink, flush=True)
        assert was_read.wait(HANG_S)
        print("two\r\n", end="", file=sink)

    lines = lines_from("n-1", call)
    assert next(lines) == "(daemon) one"
    was_read.set()
    assert list(lines) == ["two"]


def test_a_failure_is_told_after_what_was_written_and_tracebacks_stay_whole() -> None:
    def call(sink: io.TextIOBase) -> None:
        sink.write("one\n")
        sys.tracebacklimit = 0
        raise ValueError("no route\nto host")

    lines = lines_from("n-1", call)
    assert next(lines) == "one"
    with pytest.raises(CloudUnavailable, match="the log of n-1 broke off: no route"):
        next(lines)
    assert not hasattr(sys, "tracebacklimit")
