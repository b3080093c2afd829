"""How watching a run ends, and its start: what is said, and with which exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_orch.orchestrator.cli import start
from grpo_orch.orchestrator.cli.look import attach, ctrl_c
from grpo_orch.orchestrator.cli.options import Stop
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import RunMoved
from grpo_orch.policies.model.vocabulary import RunPhase
from tests.generators.views_world import World
from tests.rigs.command_line import Cli
from tests.rigs.locales import ASCII_LOCALE


def ended(phase: RunPhase, reason: str) -> World:
    """A run that diverged at step 10, and ended so."""
    world = World()
    world.starts()
    world.diverges(20, onset_step=7, step=10)
    world.happens(21, RunMoved(phase, reason))
    return world


def watched(world: World) -> Stop:
    with pytest.raises(Stop) as stop:
        attach(world.store)
    assert "\n" not in str(stop.value)
    return stop.value


class Swallows:
    """Ctrl-C is pressed while Python runs a destructor, which drops the exception."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_in_a_destructor_ends_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: dropped.append(found.exc_type))

    def watch() -> None:
        with ctrl_c() as pressed:
            Swallows()
            assert pressed.wait(0)

    with pytest.raises(KeyboardInterrupt):
        watch()
    assert dropped == [KeyboardInterrupt]


def test_abandoned_run_has_its_own_exit_code() -> None:
    world = ended(RunPhase.GAVE_UP, "diverged at step 10, and was rolled back 3 times; last healthy: the start")
    stop = watched(world)
    assert stop.exit_code == exit_codes.GAVE_UP == 79
    assert str(stop) == (
        "digits gave up: diverged at step 10, and was rolled back 3 times; last healthy: the start; "
        f"continue with: grpo-orch rollback --set KEY=NUMBER {world.store.url}"
    )


@pytest.mark.parametrize(
    ("phase", "reason", "told"),
    [
        (
            RunPhase.PAUSED,
            "diverged since step 7; `grpo-orch rollback` goes back to checkpoint 0-5",
            "is paused: {reason}; continue with: grpo-orch rollback {url}",
        ),
        (
            RunPhase.FAILED,
            "out of memory",
            "failed: {reason}; fix the cause (a changed run.yaml needs a new run, with another `storage:`), "
            "then continue with: grpo-orch resume {url}",
        ),
    ],
)
def test_paused_or_failed_run_shows_how_to_continue(phase: RunPhase, reason: str, told: str) -> None:
    world = ended(phase, reason)
    stop = watched(world)
    assert stop.exit_code == exit_codes.FAILED
    assert str(stop) == f"digits {told.format(reason=reason, url=world.store.url)}"


def test_a_run_that_ended_well_is_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    world = World()
    world.starts()
    world.happens(20, RunMoved(RunPhase.FINISHED, "the last step"))
    attach(world.store)
    assert "faults survived" in capsys.readouterr().out


def test_locale_without_a_character_prints_a_replacement() -> None:
    shows = "from grpo_orch.orchestrator import cli; cli.app = lambda: cli.console.print('━ done'); cli.main()"
    ascii_alone = {**os.environ, "PYTHONIOENCODING": "ascii"}
    told = subprocess.run(
        [sys.executable, "-c", shows], env=ascii_alone, capture_output=True, text=True, check=False
    )
    assert (told.stdout, told.returncode) == ("? done\n", 0)


def test_name_in_utf8_is_read_in_an_ascii_locale(tmp_path: Path) -> None:
    (tmp_path / "grün").mkdir()
    missing = tmp_path / "grün" / "run.yaml"
    command = [
        sys.executable,
        "-c",
        "from grpo_orch.orchestrator import cli; cli.main()",
        "validate",
        str(missing),
    ]
    told = subprocess.run(command, env={**os.environ, **ASCII_LOCALE}, capture_output=True, check=False)
    assert told.stderr.decode("ascii").startswith(f"{tmp_path}/gr\\xfcn/run.yaml: no such file")


def test_interrupt_during_daemon_start_reports_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grpo_orch: Cli
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path))
    monkeypatch.setattr(start, "start_daemon", interrupted)
    url = World().store.url
    stopped = grpo_orch("resume", "-d", url)
    assert stopped.code == exit_codes.INTERRUPTED
    hint = f"watch it with `grpo-orch status -w {url}`, stop it with `grpo-orch down {url}`"
    assert stopped.line == f"digits has started and keeps running in the background; {hint}"
