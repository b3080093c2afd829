"""What a run is doing, how far it is, and whether it learns: the top of the screen."""

from __future__ import annotations

from shlex import quote

from rich.cells import cell_len
from rich.text import Text

from checkpoint.records.metrics import logged
from orchestrator.views.model import RunView
from orchestrator.views.terminal.lines import cut, joined, labelled, left, plain, wrap
from orchestrator.views.words import duration, short, sparkline, start_words, usd
from policies.detect.divergence import Health
from policies.model.phases import TERMINAL_RUN
from policies.model.vocabulary import NodePhase, RollbackStage, RunPhase

HEADLINE_LINES = 3  # below the name, where it does not fit beside it
BAR_MIN = 10  # cells
SPARK_MIN, SPARK_MOST = 8, 22

RUN_STYLES = {
    RunPhase.STARTING: "yellow",
    RunPhase.TRAINING: "green",
    RunPhase.PARKED: "cyan",
    RunPhase.FINISHED: "bold green",
    RunPhase.STOPPING: "yellow",
    RunPhase.STOPPED: "magenta",
    RunPhase.FAILED: "bold red",
    RunPhase.PAUSED: "bold yellow",
    RunPhase.GAVE_UP: "bold red",
}
THERE = (NodePhase.BOOTING, NodePhase.SERVING, NodePhase.DRAINING, NodePhase.TERMINATING)


def head(view: RunView, width: int) -> list[Text]:
    """Name, phase and what matters most right now; how far it is."""
    phase = f" {view.phase.upper().replace('_', ' ')} "
    first = Text(no_wrap=True)
    first.append(view.name, "bold").append("  ").append(phase, f"{RUN_STYLES[view.phase]} reverse")
    said = plain(_headline(view))
    below: list[str] = []
    if cell_len(said) <= width - first.cell_len - 2:
        first.append("  ").append(said, "dim")
    else:
        below = wrap(said, width, HEADLINE_LINES)
    return [cut(first, width), *(Text(line, "dim", no_wrap=True) for line in below), _progress(view, width)]


def _headline(view: RunView) -> str:
    """What matters most right now, in a few words."""
    if view.phase in TERMINAL_RUN or view.phase is RunPhase.STOPPING:
        return view.reason
    if not view.daemon.alive:
        return f"no controller; `grpo-orch resume {quote(view.store)}`"
    if view.rollback is not None and view.rollback.stage is not RollbackStage.PROBATION:
        return f"rolling back to {start_words(view.rollback.start)}"
    if view.phase is RunPhase.TRAINING and view.activity:
        waiting = f", {view.requests_waiting} requests wait" if view.requests_waiting else ""
        slow = ", the store is slow" if view.store_slow else ""
        return f"trainer is {view.activity}{waiting}{slow}"
    if view.parked_s is not None:
        return f"for {duration(view.parked_s)}: {view.reason}"
    return view.reason or "waiting for the trainer's first heartbeat"


def _progress(view: RunView, width: int) -> Text:
    words = [f"step {view.step} of {view.max_steps}" if view.max_steps else "no step yet"]
    if view.timeline:
        words.append(f"timeline {view.timeline}")
    if view.step_s is not None:
        words.append(f"{view.step_s:.1f} s a step")
    if view.eta_s:
        words.append(f"{duration(view.eta_s)} to go")
    said = joined(words, width)
    room = width - cell_len(said) - 2
    if room < BAR_MIN:
        return Text(said, no_wrap=True)
    done = round(room * min(1.0, max(0.0, view.step / view.max_steps))) if view.max_steps else 0
    line = Text(no_wrap=True)
    line.append("━" * done, RUN_STYLES[view.phase]).append("─" * (room - done), "grey30")
    return line.append(f"  {said}")


def figures(view: RunView, width: int) -> list[Text]:
    """Reward, KL and tokens with their curves; beside them checkpoint, controller and price, or below where the
    screen is narrow."""
    beside = _beside(view)
    values = [short(view.reward), short(view.kl), short(view.tokens_per_s)]
    limit = f"limit {view.kl_limit:.3g}" if view.kl_limit is not None else ""
    queue = "no gateway" if view.requests_waiting is None else f"{view.requests_waiting} waiting"
    extras = ["", limit, queue]
    value_width, extra_width = max(7, *map(cell_len, values)), max(11, *map(cell_len, extras))
    first = 7 + value_width + 1
    second = (
        extra_width + 1 + max(len(label) for label, _, _ in beside) + 1 + max(cell_len(v) for _, v, _ in beside)
    )
    spark = min(SPARK_MOST, width - first - 1 - second)
    wide = spark >= SPARK_MIN
    if not wide:
        spark = max(0, min(SPARK_MOST, width - first - 1 - extra_width))
    curves = [sparkline(logged(view.recent, name), spark) if spark else "" for name in ("reward", "kl")]
    above = view.health.health is Health.TRIPPED or _is_above_limit(view)
    styles = [
        ("bold", "green"),
        ("bold red" if above else "bold", "bold red" if above else "yellow"),
        ("bold", ""),
    ]
    lines = []
    for place, label in enumerate(("reward", "kl", "tokens")):
        line = Text(left(label, 7), no_wrap=True).append(left(values[place], value_width + 1), styles[place][0])
        line.append(left([*curves, "a second"[:spark]][place], spark + 1), styles[place][1])
        line.append(left(extras[place], extra_width + 1), "dim" if place == 1 else "")
        if wide:
            name, value, style = beside[place]
            line.append(left(name, 11)).append(value, style)
        line.rstrip()
        lines.append(cut(line, width))
    return (
        lines
        if wide
        else [*lines, *(one for name, value, style in beside for one in labelled(name, value, width, 2, style))]
    )


def _beside(view: RunView) -> list[tuple[str, str, str]]:
    """Label, value and style."""
    daemon, none = view.daemon, "" if view.over else "bold red"
    steered = f"{daemon.host}/{daemon.pid}" if daemon.alive else "none"
    saved = f"{view.checkpoint.version}, {duration(view.checkpoint.age_s)} ago" if view.checkpoint else "none yet"
    rate = usd(sum(node.price_usd_per_h for node in view.nodes if node.phase in THERE))
    return [
        ("checkpoint", saved, "yellow" if view.store_slow else ""),
        ("controller", plain(steered), "" if daemon.alive else none),
        ("price", f"{rate} an hour", ""),
    ]


def _is_above_limit(view: RunView) -> bool:
    return view.kl is not None and view.kl_limit is not None and view.kl > view.kl_limit
