"""Calls that may never be answered: who asks has a deadline, the request is called off; and their logs."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from grpo_orch.orchestrator.clouds.protocol import CloudUnavailable
from grpo_orch.orchestrator.clouds.sky.calls import Call, lines_from
from tests.budget import HANG_S


class Server:
    """Takes requests, answers when told to, and knows what was cancelled."""

    def __init__(self) -> None:
        self.may_submit, self.may_answer = threading.Event(), threading.Event()
        self.fetched: list[str] = []
        self.cancelled = threading.Event()

    def call(self) -> Call[str]:
        return Call(self.submit, self.fetch, self.cancel)

    def submit(self) -> str:
        assert self.may_submit.wait(HANG_S)
        return "id"

    def fetch(self, request: str) -> str:
        self.fetched.append(request)
        assert self.may_answer.wait(HANG_S)
        return "answer"

    def cancel(self, request: str) -> None:
        assert request == "id"
        self.cancelled.set()
        self.may_answer.set()  # a cancelled request is answered


def test_the_answer() -> None:
    server = Server()
    server.may_submit.set()
    server.may_answer.set()
    assert server.call().result(HANG_S) == "answer"
    assert not server.cancelled.is_set()


def test_late_answer_is_not_awaited_and_its_request_cancelled() -> None:
    server = Server()
    server.may_submit.set()
    with pytest.raises(TimeoutError):
        server.call().result(0.05)
    assert server.cancelled.wait(HANG_S)  # a moment later, where the deadline came before the request


def test_request_after_the_deadline_is_cancelled_too() -> None:
    server = Server()
    with pytest.raises(TimeoutError):
        server.call().result(0.05)
    assert not server.cancelled.is_set()
    server.may_submit.set()
    assert server.cancelled.wait(HANG_S)
    assert server.fetched == []


def test_an_error_is_the_callers_and_tracebacks_stay_whole() -> None:
    def fail() -> str:
        sys.tracebacklimit = 0
        raise KeyError("no such cluster")

    with pytest.raises(KeyError):
        Call(fail, lambda _: None, lambda _: None).result(HANG_S)
    assert not hasattr(sys, "tracebacklimit")


def test_hanging_cancellation_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_orch.orchestrator.clouds.sky.calls.CANCEL_TIMEOUT_S", 0.05)
    server = Server()
    server.may_submit.set()
    cancelled = threading.Event()

    def cancel(_: str) -> None:
        server.may_answer.wait(HANG_S)
        cancelled.set()

    with pytest.raises(TimeoutError):
        Call(server.submit, server.fetch, cancel).result(0.05)
    assert not cancelled.is_set()
    server.may_answer.set()


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


def test_failure_follows_its_log_and_tracebacks_stay_whole() -> None:
    def call(sink: io.TextIOBase) -> None:
        sink.write("one\n")
        sys.tracebacklimit = 0
        raise ValueError("no route\nto host")

    lines = lines_from("n-1", call)
    assert next(lines) == "one"
    with pytest.raises(CloudUnavailable, match="cannot read the log of n-1: no route"):
        next(lines)
    assert not hasattr(sys, "tracebacklimit")
