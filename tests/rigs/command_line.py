"""`grpo-orch` in the test's own process, as a user has it: words in; an exit code and what is printed out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import structlog


class Answer(NamedTuple):
    """How the command ended, and what it said on stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """What a user's mistake is told as: one line, and no traceback."""
        assert self.out == ""
        assert self.err.count("\n") == 1, self.err
        return self.err.rstrip("\n")


Cli = Callable[..., Answer]


@pytest.fixture
def grpo_orch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """Call with the command's words."""
    from grpo_orch.orchestrator.cli import main  # half a second, and not in the nodes' environment

    def call(*words: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["grpo-orch", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        assert "Traceback" not in told.err
        code = ended.value.code
        return Answer(code if isinstance(code, int) else int(code is not None), told.out, told.err)

    yield call
    structlog.reset_defaults()  # the command has given it this test's stderr
