"""How `up` and `resume` end before the run is watched."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.cli.steering import start
from policies.model import exit_codes
from tests.generators.views_world import World
from tests.rigs.command_line import Cli


def test_an_interrupt_while_the_daemon_comes_up_says_that_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grpo_orch: Cli
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path))
    monkeypatch.setattr(start, "start_daemon", interrupted)
    url = World().store.url
    stopped = grpo_orch("resume", "-d", url)
    assert stopped.code == exit_codes.FAILED
    shows, ends = f"`grpo-orch status -w {url}` shows it", f"`grpo-orch down {url}` ends it"
    assert stopped.line == f"digits is begun, and goes on by itself; {shows}, {ends}"
