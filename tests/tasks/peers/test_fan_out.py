"""The rig of `benchmarks.rig.weights.fan_out` takes every answer for one, and waits for none for ever."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.rig.weights.fan_out import answer
from tests.budget import HANG_S


def node(program: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-X", "faulthandler", "-c", program]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_twenty_seconds_are_an_answer() -> None:
    with node("print(20.4, flush=True); input()") as one:
        assert answer(one, HANG_S) == "20.4"
        one.kill()


def test_a_node_that_says_nothing_is_named_and_ended() -> None:
    with node("input()") as one, pytest.raises(SystemExit, match=f"node {one.pid} says nothing within 0.1 s"):
        answer(one, 0.1)


def test_a_node_that_ended_is_named() -> None:
    with node("") as one, pytest.raises(SystemExit, match=f"node {one.pid} ended"):
        answer(one, HANG_S)
