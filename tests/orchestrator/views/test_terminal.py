"""The live view, drawn at 80 columns, and plain lines where there is no terminal."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from grpo_orch.orchestrator.views.formatting import clock, duration, short, sparkline, usd
from grpo_orch.orchestrator.views.screen import Screen, changes, watch
from grpo_orch.orchestrator.views.view_model import (
    HealthView,
    NodeState,
    NodeView,
    RollbackView,
    RunView,
    StoppedKindView,
)
from grpo_orch.policies.detect.divergence import Health
from grpo_orch.policies.model.vocabulary import Cause, NodePhase, RollbackStage, RunPhase
from grpo_orch.policies.serving.gateway_status import GatewayStatus, MemberStatus
from grpo_orch.policies.serving.joining import BASE_MODEL, ENGINE, Stage
from tests.generators.views_world import T0, run_view, training


@pytest.fixture
def view(tmp_path: Path) -> RunView:
    world = training(tmp_path)
    world.moves(41, "rollout-1-i1", NodePhase.GONE, "preempted")
    world.asks_for(41, "rollout-1-i2")
    member = MemberStatus("rollout-0-i1", "boot", "127.0.0.1:1", "0-10", True, False, 0, 0.1)
    return run_view(world.store, T0 + 42, GatewayStatus("boot", "0-10", [member], requests_waiting=3))


def drawn(view: RunView, width: int = 80) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(Screen(view))
    return console.export_text().splitlines()


def line_with(lines: list[str], word: str) -> str:
    """The line's words, one blank between them."""
    return " ".join(next(line for line in lines if line.startswith(word)).split())


def test_view_describes_the_run_in_80_columns(view: RunView) -> None:
    lines = drawn(view)
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    assert lines[0].split()[:2] == ["digits", "TRAINING"]
    assert "trainer is generating, 3 requests waiting" in lines[0]
    assert "step 10 of 40 · 2.0 s a step · 1:00 min left" in lines[1]
    assert line_with(lines, "reward") == "reward 1 ▁▂▃▃▄▅▆▆▇█ checkpoint 0-5, 7 s ago"
    assert line_with(lines, "kl") == "kl 0.1 ▁▂▃▃▄▅▆▆▇█ limit 0.52 daemon another-host.invalid/42"
    assert line_with(lines, "tokens") == "tokens 50 a second 3 waiting price $8.10 an hour"
    assert line_with(lines, "money") == "money $0.10 spent · $0.24 at the end · $0.0608 saved · $0.0102 a step"
    assert line_with(lines, "trainer-0-i1") == "trainer-0-i1 serving 0-10 – 7.20 on demand 32 s"
    assert line_with(lines, "rollout-0-i1") == "rollout-0-i1 idle 0-10 – 0.90 spot 32 s"
    assert line_with(lines, "rollout-1-i2") == "rollout-1-i2 requested – – 0.00 spot 1 s"
    assert line_with(lines, "1 serving") == "1 serving · 1 idle · 1 requested"
    assert lines[-1].rstrip().endswith("rollout-1-i2 was requested on spot: first")


def test_view_shows_what_is_not_bought_and_why(view: RunView) -> None:
    reason = "3 in a row came to nothing: no work seen within 900 s (`policies.boot_timeout_s`)"
    stopped = StoppedKindView("rollout on spot", reason, T0, T0 + 642, 1)
    lines = drawn(replace(view, buying_stopped=(stopped,)))
    place = next(place for place, line in enumerate(lines) if line.startswith("not bought"))
    assert " ".join(" ".join(lines[place : place + 2]).split()) == (
        f"not bought rollout on spot, next test machine in 10:00 min: {reason}"
    )
    assert max(map(len, lines)) <= 80


def test_view_shows_how_to_resume_without_a_daemon(view: RunView) -> None:
    orphaned = replace(view, daemon=replace(view.daemon, alive=False))
    assert "no daemon; run: grpo-orch resume memory://" in drawn(orphaned, width=120)[0]


def test_kl_above_its_limit_is_red(view: RunView) -> None:
    def styled(kl: float) -> str:
        console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system="standard")
        with console.capture() as captured:
            console.print(Screen(replace(view, kl=kl)))
        return captured.get()

    red = "\x1b[1;31m"
    assert red not in styled(0.51)
    assert f"{red}0.53" in styled(0.53)


WATCHED = HealthView(Health.WATCH, 9, 7, ("KL 3.21, 41 times its calm level [of] 0.078", "reward 0.1"))
ROLLBACK = RollbackView(
    timeline=1,
    cause=Cause.DIVERGED,
    reason="diverged since step 7",
    from_step=10,
    start="0-5",
    stage=RollbackStage.FORKED,
    since_s=T0 + 38,
    probation_until_step=15,
    text="is waiting for the old trainer to stop",
)


def test_view_shows_problems_and_their_reasons(view: RunView) -> None:
    lines = drawn(replace(view, health=WATCHED))
    assert (max(map(len, lines)), len(lines) <= 24) == (80, True)
    at = next(place for place, line in enumerate(lines) if line.startswith("watch "))
    told = " ".join(" ".join(lines[at : at + 2]).split())
    assert told == (
        "watch since step 7, detected at step 9: KL 3.21, 41 times its calm level [of] 0.078; reward 0.1"
    )
    assert not any(line.startswith(("watch ", "diverged", "rollback")) for line in drawn(view))
    without = replace(WATCHED, health=Health.TRIPPED, evidence=())
    assert (
        line_with(drawn(replace(view, health=without)), "diverged") == "diverged since step 7, detected at step 9"
    )


def test_view_shows_the_progress_of_a_rollback(view: RunView) -> None:
    lines = drawn(replace(view, rollback=ROLLBACK, timeline=1))
    assert "rolling back to checkpoint 0-5" in lines[0]
    assert "step 10 of 40 · timeline 1" in lines[1]
    assert line_with(lines, "rollback") == (
        "rollback timeline 1, from 0-5, is waiting for the old trainer to stop (4 s)"
    )
    probation = replace(ROLLBACK, stage=RollbackStage.PROBATION, text="is on probation until step 15")
    lines = drawn(replace(view, rollback=probation))
    assert "trainer is generating" in lines[0]
    assert "is on probation until step 15" in line_with(lines, "rollback")


def test_of_a_large_fleet_the_nodes_in_trouble_are_shown(view: RunView) -> None:
    def node(index: int) -> NodeView:
        state = NodeState.BOOTING if index == 57 else NodeState.SERVING
        return replace(view.nodes[1], slot=f"rollout-{index}", node=f"rollout-{index}-i1", state=state)

    lines = drawn(replace(view, nodes=tuple(node(index) for index in range(64))))
    assert len(lines) <= 24
    assert line_with(lines, "rollout-57-i1").split()[1] == "booting"
    assert line_with(lines, "63 serving").startswith("63 serving")
    shown = sum(line.startswith("rollout-") for line in lines)
    assert any(line.rstrip() == f"{64 - shown} more" for line in lines)


def test_markup_in_foreign_text_is_only_text(view: RunView) -> None:
    wild = replace(view.events[-1], text="took [red]node[/blue]")
    assert any("took [red]node[/blue]" in line for line in drawn(replace(view, events=(wild,))))
    out = io.StringIO()
    last = replace(view, events=(wild,), recent=())
    watch(showing([last]), lambda _: True, Console(width=80, file=out))
    assert out.getvalue().endswith("took [red]node[/blue]\n")


def test_only_news_is_printed(view: RunView) -> None:
    first = changes(None, view)
    assert first[-1].endswith("step 10/40 reward 1 kl 0.1")
    assert len(first) == len(view.events) + 1
    assert changes(view, view) == []
    later = replace(view, recent=(*view.recent, replace(view.recent[-1], step=11, values={"kl": 0.1})))
    assert [line.split(" ", 1)[1] for line in changes(view, later)] == ["step 11/40 reward – kl 0.1"]
    told = replace(view, events=view.events[:-1])
    assert [line.split(" ", 1)[1] for line in changes(told, view)] == [view.events[-1].text]


@pytest.fixture(autouse=True)
def a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests run in."""
    monkeypatch.setenv("TERM", "xterm")


def showing(views: list[RunView]) -> Callable[[], RunView]:
    left = iter(views)
    return lambda: next(left)


def ended(view: RunView) -> RunView:
    return replace(view, phase=RunPhase.FINISHED, daemon=replace(view.daemon, alive=False))


@pytest.mark.parametrize("terminal", [True, False])
def test_watching_ends_with_the_run_and_waits_between_looks(view: RunView, terminal: bool) -> None:
    out, waits = io.StringIO(), list[float]()
    console = Console(width=80, height=24, file=out, force_terminal=terminal, color_system=None)

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return False

    last = watch(showing([view, view, ended(view)]), wait, console)
    assert last.over
    assert waits == [0.5, 0.5]
    assert ("FINISHED" in out.getvalue()) is terminal
    assert out.getvalue().count("step 10/40 reward 1") == (0 if terminal else 1)


def test_plain_terminal_gets_lines_while_the_run_continues(view: RunView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = io.StringIO()
    watch(showing([view]), lambda _: True, Console(width=80, file=out, force_terminal=True))
    assert "step 10/40 reward 1" in out.getvalue()


def test_ctrl_c_reaches_the_caller_and_cursor_returns(view: RunView) -> None:
    out = io.StringIO()

    def interrupted(_: float) -> bool:
        raise KeyboardInterrupt

    console = Console(width=80, height=24, file=out, force_terminal=True)
    with pytest.raises(KeyboardInterrupt):
        watch(showing([view]), interrupted, console)
    assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")


def test_a_sparkline_has_room_for_any_number_of_values() -> None:
    assert all(len(sparkline([float(n) for n in range(count)], 22)) == min(count, 22) for count in range(300))


def test_numbers_for_people() -> None:
    assert [duration(s) for s in (0, 59.4, 59.6, 187, 7380, 345600)] == [
        "0 s",
        "59 s",
        "1:00 min",
        "3:07 min",
        "2:03 h",
        "4.0 d",
    ]
    assert [short(v) for v in (None, 0.0, 0.12345, 1e-6, 123456.0)] == ["–", "0", "0.123", "0.000001", "123,456"]
    assert [usd(v) for v in (0.0, 0.0123, 0.1, 1234.5)] == ["$0.00", "$0.0123", "$0.10", "$1,234.50"]


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e300, -1e300, 2.0**63])
def test_times_outside_the_calendar_are_written(value: float) -> None:
    assert all(write(value) for write in (clock, duration))


def test_negative_last_step_draws_an_empty_bar(view: RunView) -> None:
    """transformers' `max_steps` is -1 where epochs decide."""
    assert "━" not in "".join(drawn(replace(view, max_steps=-1)))


def test_view_shows_the_progress_of_joining_nodes(view: RunView) -> None:
    stages = [Stage(BASE_MODEL, 52_000_000_000, 141_000_000_000), Stage(ENGINE, 0, 141_000_000_000), Stage(ENGINE)]
    nodes = [replace(view.nodes[1], node=f"rollout-{i}-i1", stage=stage) for i, stage in enumerate(stages)]
    lines = drawn(replace(view, nodes=tuple(nodes)))
    told = lines[next(place for place, line in enumerate(lines) if line.startswith("joining")) :][:3]
    assert [line.strip() for line in told] == [
        "joining    rollout-1-i1 is starting vLLM, 131.3 GiB",
        "rollout-2-i1 is starting vLLM",
        "rollout-0-i1 is fetching the base model, 48.4 GiB of 131.3 GiB (37%)",
    ]
    more = drawn(replace(view, nodes=(*nodes, replace(nodes[0], node="rollout-3-i1"))))
    assert any(line.strip() == "and 2 more" for line in more)
    assert max(map(len, more)) <= 80
    assert len(more) <= 24
