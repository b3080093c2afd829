"""The live screen: what the run is doing, whether it learns, what it costs, its machines, what happened last.

Drawn within the given columns and lines; where there are not enough, what a person needs least is left out. No
information is in a colour alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from shlex import quote

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from checkpoint.records.metrics import StepTiming, logged
from orchestrator.views.measured import AT_WORK, NodeState, StepSplit, stages_words, timing_words, weights_words
from orchestrator.views.model import FleetView, MoneyView, NodeView, RunView, deadline_words, is_late
from orchestrator.views.words import (
    LABEL,
    NOT_KNOWN,
    clock,
    cut,
    duration,
    fit,
    in_lines,
    joined,
    labelled,
    left,
    plain,
    right,
    short,
    sparkline,
    start_words,
    usd,
    wrap,
)
from policies.detect.divergence import Health
from policies.model.phases import TERMINAL_RUN
from policies.model.vocabulary import NodePhase, Role, RollbackStage, RunPhase

# The top: what the run is doing, how far it is, and whether it learns.

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


# Facts of a line or two: trouble, dollars, a step's time, weights, joining nodes.

TROUBLE_LINES = 2
STEP_BAR_MIN, STEP_BAR_MOST = 8, 60  # cells


def trouble(view: RunView, width: int) -> list[Text]:
    """Where not all is well: what is off, how far a rollback is, what is not bought and why."""
    health, rollback, told = view.health, view.rollback, list[Text]()
    if health.health is not Health.HEALTHY:
        tripped = health.health is Health.TRIPPED
        since = f"since step {health.onset_step}, seen at step {health.step}"
        words = f"{since}: {'; '.join(health.evidence)}" if health.evidence else since
        label, style = ("diverged", "bold red") if tripped else ("watched", "yellow")
        told += labelled(label, words, width, TROUBLE_LINES, style)
    if rollback is not None:
        passed_s = duration(view.now_s - rollback.since_s)
        words = f"timeline {rollback.timeline}, from {rollback.start or 'the start'}, {rollback.text} ({passed_s})"
        told += labelled("rollback", words, width, TROUBLE_LINES, "cyan")
    for one in view.not_bought:
        wait_s = duration(max(0.0, one.tried_again_s - view.now_s))
        words = f"{one.kind}, one is tried in {wait_s}: {one.reason}"
        told += labelled("not bought", words, width, TROUBLE_LINES, "bold red")
    return told


def money(view: MoneyView, width: int) -> list[Text]:
    """Dollars: spent, at the end, saved, a step; whole figures only."""
    if view.spent_usd <= 0:
        return []
    words = [f"{usd(view.spent_usd)} spent" + (f" of {usd(view.budget_usd)}" if view.budget_usd else "")]
    if view.forecast_usd is not None:
        words.append(f"{usd(view.forecast_usd)} at the end")
    if (saved_usd := view.all_on_demand_usd - view.spent_usd) >= 0.005:
        words.append(f"{usd(saved_usd)} saved")
    if view.usd_per_step is not None:
        words.append(f"{usd(view.usd_per_step)} a step")
    if view.usd_per_million_tokens is not None:
        words.append(f"{usd(view.usd_per_million_tokens)}/M tokens")
    return labelled("money", joined(words, width - LABEL), width)


def deadline(view: RunView, width: int) -> list[Text]:
    """How far the run is on the way to its deadline."""
    words = deadline_words(view)
    if not words:
        return []
    return labelled("deadline", joined(words, width - LABEL), width, style="yellow" if is_late(view) else "")


def step(split: StepSplit | None, width: int) -> list[Text]:
    """Where a step's time goes: one bar, whose parts are told apart by what fills them, not by colour alone."""
    if split is None or split.step_s <= 0:
        return []
    parts = [
        ("█", "green", "generate", split.generate_s),
        ("▓", "blue", "train", split.train_s),
        ("▒", "magenta", "publish", split.publish_s),
        ("░", "red", "wait", split.wait_s),
    ]
    parts = [part for part in parts if part[3] >= 0.0005 * split.step_s]
    keys = [f" {glyph} {name} {short(seconds)} s" for glyph, _, name, seconds in parts]
    room = min(STEP_BAR_MOST, width - LABEL - sum(map(cell_len, keys)))
    line = Text(left("step", LABEL), no_wrap=True)
    if room >= STEP_BAR_MIN:
        done, end_s = 0, 0.0
        for glyph, style, _, seconds in parts:
            end_s += seconds
            end = round(room * end_s / split.step_s)
            line.append(glyph * (end - done), style)
            done = end
    elif sum(map(cell_len, keys)) > width - LABEL:
        return labelled("step", joined([key.strip() for key in keys], width - LABEL), width)
    for key, (_, style, _, _) in zip(keys, parts, strict=True):
        line.append(key[:2], style).append(key[2:])
    return [cut(line, width)]


def timing(view: StepTiming | None, width: int) -> list[Text]:
    """What generation and training take of a step, and what each side is idle."""
    return (
        [] if view is None else labelled("median", joined(timing_words(view), width - LABEL), width, style="dim")
    )


def fleet(view: FleetView | None, width: int) -> list[Text]:
    """What the size of the fleet follows from."""
    if view is None or view.fixed_s is None:
        return []
    cheapest = "prices not known" if view.cheapest is None else f"{view.cheapest:.1f} nodes cheapest"
    split = f"{short(view.fixed_s)} s + {short(view.generation_node_s)} node-seconds generating"
    words = [split, f"{cheapest}, {view.nodes} wanted"]
    plan = labelled("plan", view.reason.partition("; a step is")[0], width, style="dim")
    return [*labelled("fleet", joined(words, width - LABEL), width, style="dim"), *plan]


def weights(view: RunView, width: int) -> list[Text]:
    """What the newest policy took to reach the nodes."""
    return [] if view.weights is None else labelled("weights", weights_words(view.weights), width, style="dim")


def coming(view: RunView, width: int) -> list[Text]:
    """What nodes fetch or start that are of no use yet."""
    stages = stages_words({node.node: node.stage for node in view.nodes if node.stage is not None})
    return [
        line
        for place, words in enumerate(stages)
        for line in labelled("" if place else "coming", words, width, style="yellow")
    ]


# The machines: a line each; of more than fit, groups and counts.

GROUP_NAME = 32  # cells, at most
# What a state is drawn with; what matters more comes first.
LOOKS = {
    NodeState.SERVING: "green",
    NodeState.IDLE: "green",
    NodeState.LOST: "red",
    NodeState.REFUSED: "red",
    NodeState.DRAINING: "magenta",
    NodeState.LOADING: "blue",
    NodeState.BOOTING: "yellow",
    NodeState.REQUESTED: "cyan",
    NodeState.TERMINATING: "magenta",
    NodeState.GONE: "dim",
}
_TROUBLE_FIRST = {state: place for place, state in enumerate(LOOKS) if state not in AT_WORK}
COUNTS_LINES = 2


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of the table, its cells in words; `nodes` are whom it is about."""

    nodes: Sequence[NodeView]
    name: str
    state: str
    style: str
    policy: str
    tokens: str
    price: str
    market: str
    since: str


def machines(view: RunView, width: int, most: int) -> list[Text]:
    """At most so many lines: a head, the machines, and how many there are of each state."""
    if not view.nodes:
        return [Text(fit("no machines yet", width), "dim")]
    counts = _counts(view, width)[: max(1, most - 2)]
    table = _table(_rows(view, most - 1 - len(counts)), width) if most > 2 else []
    return [*table, *counts]


def _rows(view: RunView, most: int) -> list[_Row]:
    """All where there is room; else the trainer and those in trouble first, and the others in groups."""
    if len(view.nodes) <= most:
        return [_row(view, node) for node in view.nodes]
    by_trouble = sorted(
        view.nodes, key=lambda one: (one.role is not Role.TRAINER, _TROUBLE_FIRST.get(one.state, len(LOOKS)))
    )
    troubled = sum(one.role is Role.TRAINER or one.state in _TROUBLE_FIRST for one in view.nodes)
    singles = by_trouble[: max(min(troubled, (most + 1) // 2), most - len(_pools(view.nodes)))]
    chosen = {one.node for one in singles}
    groups = _pools([one for one in view.nodes if one.node not in chosen])
    room = most - len(singles)
    if len(groups) > room:
        kept, rest = groups[: max(0, room - 1)], groups[max(0, room - 1) :]
        groups = [*kept, ("elsewhere", [one for _, nodes in rest for one in nodes])][: max(0, room)]
    return [
        *(_row(view, one) for one in view.nodes if one.node in chosen),
        *(_group(name, nodes) for name, nodes in groups),
    ]


def _pools(nodes: Sequence[NodeView]) -> list[tuple[str, list[NodeView]]]:
    """The machines of each pool, the largest first."""
    found = defaultdict[str, list[NodeView]](list)
    for one in nodes:
        place, _, machine = one.pool.partition(" ")
        found[f"{place.rpartition('/')[2]} {machine}" if one.pool else one.market.replace("_", " ")].append(one)
    return sorted(found.items(), key=lambda one: -len(one[1]))


def _row(view: RunView, node: NodeView) -> _Row:
    several = node.engines > 1 and node.phase is NodePhase.SERVING
    state = f"{node.state} {node.engines_serving}/{node.engines}" if several else node.state
    unfit = node.unfit and not node.engines_serving
    return _Row(
        nodes=(node,),
        name=node.node,
        state=state,
        style="bold red" if unfit else LOOKS[node.state],
        policy="unfit" if unfit else (node.policy or NOT_KNOWN),
        tokens=short(node.tokens_per_s),
        price=f"{node.price_usd_per_h:.2f}",
        market=node.market.replace("_", " "),
        since=duration(view.now_s - node.since_s),
    )


def _group(name: str, nodes: Sequence[NodeView]) -> _Row:
    serving = sum(one.state in AT_WORK for one in nodes)
    policies = Counter(one.policy for one in nodes if one.policy).most_common(1)
    rates = [one.tokens_per_s for one in nodes if one.tokens_per_s is not None]
    return _Row(
        nodes=nodes,
        name=f"{len(nodes)} more: {name}",
        state=f"{serving} at work",
        style="green" if serving == len(nodes) else "yellow",
        policy=policies[0][0] or NOT_KNOWN if policies else NOT_KNOWN,
        tokens=short(sum(rates)) if rates else NOT_KNOWN,
        price=f"{sum(one.price_usd_per_h for one in nodes):.2f}",
        market="",
        since="",
    )


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    words: Sequence[str]
    pad: Callable[[str, int], str]
    least: int = 0

    @property
    def width(self) -> int:
        return max(self.least, *map(cell_len, (self.title, *self.words)))

    def at(self, place: int | None) -> str:
        """A row's, or the title."""
        return self.pad(self.title if place is None else self.words[place], self.width)


def _table(rows: Sequence[_Row], width: int) -> list[Text]:
    name, state, ends = _columns(rows, width)
    lines = [Text(f"{name.at(None)} {state.at(None)}{''.join(f' {end.at(None)}' for end in ends)}", "dim")]
    for place, row in enumerate(rows):
        line = Text(name.at(place), no_wrap=True).append(" ").append(state.at(place), row.style)
        lines.append(line.append("".join(f" {end.at(place)}" for end in ends)))
    for line in lines:
        line.rstrip()
    return [cut(line, width) for line in lines]


def _columns(rows: Sequence[_Row], width: int) -> tuple[_Column, _Column, list[_Column]]:
    """Name, state, and those after them that there is room for."""
    singles = max((cell_len(row.name) for row in rows if len(row.nodes) == 1), default=0)
    most = max(singles, GROUP_NAME)
    name = _Column("node", [fit(row.name, most) for row in rows], left)
    state = _Column("state", [row.state for row in rows], left, 8)
    ends = [
        _Column("policy", [row.policy for row in rows], left),
        _Column("tok/s", [row.tokens for row in rows], right),
        _Column("$/h", [row.price for row in rows], right),
        _Column("market", [row.market for row in rows], left),
        _Column("for", [row.since for row in rows], right, 8),
    ]
    room = width - name.width - 1 - state.width - 1
    kept = list[_Column]()
    for end in ends:
        room -= end.width + 1
        if room < 0:
            break
        kept.append(end)
    return name, state, kept


def _counts(view: RunView, width: int) -> list[Text]:
    """How many machines there are of each state."""
    found = Counter(one.state for one in view.nodes)
    told = [f"{found[state]} {state}" for state in LOOKS if found[state]]
    return [Text(line, "dim", no_wrap=True) for line in in_lines(told, width, COUNTS_LINES)]


# The whole screen.

HEIGHT = 24
MACHINES_LEAST = 5  # lines: their head, three, and the counts
MACHINES_SHARE = 2 / 3  # of what is left for them and for what happened, at most
EVENTS_LEAST = 3
TOLD = 11  # cells: a time of day, or how long ago
BLANK = Text("")


class Screen:
    """A view of a run, for rich: as wide as the console, at most `height` lines."""

    def __init__(self, view: RunView, height: int = HEIGHT) -> None:
        self._view = view
        self._height = height

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        yield from drawn(self._view, options.max_width, self._height)


class _Room:
    """The lines that are left of a screen."""

    def __init__(self, height: int) -> None:
        self.left = max(0, height)

    def take(self, lines: Sequence[Text], keep: int = 0) -> list[Text]:
        """As many of them as there is room for beside `keep` more."""
        taken = list(lines[: max(0, self.left - keep)])
        self.left -= len(taken)
        return taken


def drawn(view: RunView, width: int, height: int) -> list[Text]:
    """The lines of the screen from the top. What is asked for room first is needed most."""
    room = _Room(height)
    top = room.take(head(view, width))
    troubles = room.take(trouble(view, width))
    curves = room.take(figures(view, width), EVENTS_LEAST)
    keep = min(MACHINES_LEAST, len(view.nodes) + 2) + EVENTS_LEAST
    dollars = room.take(money(view.money, width), keep)
    dollars += room.take(deadline(view, width), keep)
    parts = room.take(step(view.step_split, width), keep)
    parts += room.take(timing(view.step_timing, width), keep)
    joining = room.take(coming(view, width), keep)
    beside = room.take(weights(view, width), keep) + room.take(fleet(view.fleet, width), keep)
    blanks = room.take([BLANK] * 3, keep)
    nodes = room.take(machines(view, width, _machine_lines(view, room.left)))
    events = _events(view, width, room.left)
    gap = [blanks[:1] for blanks in (blanks, blanks[1:], blanks[2:])]
    facts = [*curves, *dollars, *parts, *beside, *troubles, *joining]
    return [*top, *gap[2], *facts, *gap[0], *nodes, *gap[1], *events]


def _machine_lines(view: RunView, room: int) -> int:
    """How many lines the machines have."""
    most = max(min(MACHINES_LEAST, room), room - max(EVENTS_LEAST, round((1 - MACHINES_SHARE) * room)))
    return min(len(view.nodes) + 2, most)


def _events(view: RunView, width: int, count: int) -> list[Text]:
    shown = view.events[-count:] if count > 0 else ()
    return [_told(clock(line.time_s), line.text, width) for line in shown]


def _told(when: str, words: str, width: int) -> Text:
    before = left(when, TOLD)
    if width < 2 * TOLD:
        return Text(fit(words, width), no_wrap=True)
    return Text(before, "dim", no_wrap=True).append(fit(words, width - len(before)), "not dim")


# Watching: the screen drawn again and again, or plain lines where the output is no terminal.

REFRESH_S = 0.5


def watch(
    get_view: Callable[[], RunView],
    wait: Callable[[float], bool],
    console: Console | None = None,
) -> RunView:
    """Show the run until it is over, and return the last view.

    Args:
        get_view: looks at the run.
        wait: waits for so many seconds, and returns True to stop watching: `threading.Event().wait`.
        console: where to; on anything but a terminal that can be drawn on, one plain line for each change is
            printed.

    Ctrl-C is the caller's: KeyboardInterrupt passes, the terminal restored.
    """
    console = console or Console()
    if not console.is_terminal or console.is_dumb_terminal:
        return _follow(get_view, wait, console)
    view = get_view()
    with Live(Screen(view, console.height), console=console, auto_refresh=False) as live:
        while not view.over and not wait(REFRESH_S):
            view = get_view()
            live.update(Screen(view, console.height), refresh=True)
        live.update(Screen(view, console.height), refresh=True)
    return view


def changes(before: RunView | None, view: RunView) -> list[str]:
    """Return a plain line for each event and the step that are new since `before`."""
    known = {(line.type, line.number, line.index) for line in before.events} if before else set()
    fresh = [line for line in view.events if (line.type, line.number, line.index) not in known]
    told = [f"{clock(line.time_s)} {plain(line.text)}" for line in fresh]
    newest = _newest(view)
    if newest is not None and (before is None or _newest(before) != newest):
        step, reward, kl = newest
        of = f"/{view.max_steps}" if view.max_steps else ""
        told.append(f"{clock(view.now_s)} step {step}{of} reward {short(reward)} kl {short(kl)}")
    return told


def _newest(view: RunView) -> tuple[int, float | None, float | None] | None:
    """What a plain line tells of the newest row, which an evaluation may still add to."""
    row = view.recent[-1] if view.recent else None
    return None if row is None else (row.step, row.values.get("reward"), row.values.get("kl"))


def _follow(get_view: Callable[[], RunView], wait: Callable[[float], bool], console: Console) -> RunView:
    before: RunView | None = None
    while True:
        view = get_view()
        for line in changes(before, view):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if view.over or wait(REFRESH_S):
            return view
        before = view
