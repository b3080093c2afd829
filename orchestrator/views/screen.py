"""The live screen: what the run is doing, whether it learns, what it costs, its machines, and recent events.

It fits the given columns and lines; if they are too few, the least important parts are left out. No information is
shown by colour alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from grpo_orch.checkpoint.records.metrics import StepTiming, logged
from grpo_orch.orchestrator.views.events import EventLine
from grpo_orch.orchestrator.views.formatting import (
    LABEL,
    UNKNOWN_TEXT,
    align_left,
    align_right,
    clock,
    cut,
    duration,
    fit,
    in_lines,
    joined,
    labelled,
    plain,
    short,
    sparkline,
    usd,
    wrap,
)
from grpo_orch.orchestrator.views.view_model import (
    AT_WORK,
    MoneyView,
    NodeState,
    NodeView,
    RunView,
    headline,
    stages_words,
    timing_words,
    troubles,
    weights_words,
)
from grpo_orch.policies.detect.divergence import Health
from grpo_orch.policies.model.vocabulary import NodePhase, Role, RunPhase

# The top: what the run is doing, its progress, and whether it learns.

HEADLINE_LINES = 3  # below the name, if it does not fit next to it
BAR_MIN = 10  # cells
SPARK_MIN, SPARK_MAX = 8, 22

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
LIVE_PHASES = (NodePhase.BOOTING, NodePhase.SERVING, NodePhase.DRAINING, NodePhase.TERMINATING)


def head(view: RunView, width: int) -> list[Text]:
    """Draw name, phase, headline and progress."""
    phase = f" {view.phase.upper().replace('_', ' ')} "
    first = Text(no_wrap=True)
    first.append(view.name, "bold").append("  ").append(phase, f"{RUN_STYLES[view.phase]} reverse")
    words = plain(headline(view))
    below: list[str] = []
    if cell_len(words) <= width - first.cell_len - 2:
        first.append("  ").append(words, "dim")
    else:
        below = wrap(words, width, HEADLINE_LINES)
    return [cut(first, width), *(Text(line, "dim", no_wrap=True) for line in below), _progress(view, width)]


def _progress(view: RunView, width: int) -> Text:
    words = [f"step {view.step} of {view.max_steps}" if view.max_steps else "no step yet"]
    if view.timeline:
        words.append(f"timeline {view.timeline}")
    if view.step_s is not None:
        words.append(f"{view.step_s:.1f} s a step")
    if view.eta_s:
        words.append(f"{duration(view.eta_s)} left")
    progress = joined(words, width)
    bar_width = width - cell_len(progress) - 2
    if bar_width < BAR_MIN:
        return Text(progress, no_wrap=True)
    done = round(bar_width * min(1.0, max(0.0, view.step / view.max_steps))) if view.max_steps else 0
    line = Text(no_wrap=True)
    line.append("━" * done, RUN_STYLES[view.phase]).append("─" * (bar_width - done), "grey30")
    return line.append(f"  {progress}")


def figures(view: RunView, width: int) -> list[Text]:
    """Draw reward, KL and tokens with their curves, and checkpoint, controller and price next to or below them."""
    facts = _facts(view)
    values = [short(view.reward), short(view.kl), short(view.tokens_per_s)]
    limit = f"limit {view.kl_limit:.3g}" if view.kl_limit is not None else ""
    queue = "no gateway" if view.requests_waiting is None else f"{view.requests_waiting} waiting"
    extras = ["", limit, queue]
    value_width, extra_width = max(7, *map(cell_len, values)), max(11, *map(cell_len, extras))
    first = 7 + value_width + 1
    second = extra_width + 1 + max(len(label) for label, _, _ in facts) + 1 + max(cell_len(v) for _, v, _ in facts)
    spark = min(SPARK_MAX, width - first - 1 - second)
    is_wide = spark >= SPARK_MIN
    if not is_wide:
        spark = max(0, min(SPARK_MAX, width - first - 1 - extra_width))
    curves = [sparkline(logged(view.recent, name), spark) if spark else "" for name in ("reward", "kl")]
    above = view.health.health is Health.TRIPPED or _is_above_limit(view)
    styles = [
        ("bold", "green"),
        ("bold red" if above else "bold", "bold red" if above else "yellow"),
        ("bold", ""),
    ]
    lines = []
    for index, label in enumerate(("reward", "kl", "tokens")):
        line = Text(align_left(label, 7), no_wrap=True)
        line.append(align_left(values[index], value_width + 1), styles[index][0])
        line.append(align_left([*curves, "a second"[:spark]][index], spark + 1), styles[index][1])
        line.append(align_left(extras[index], extra_width + 1), "dim" if index == 1 else "")
        if is_wide:
            name, value, style = facts[index]
            line.append(align_left(name, 11)).append(value, style)
        line.rstrip()
        lines.append(cut(line, width))
    if not is_wide:
        for name, value, style in facts:
            lines += labelled(name, value, width, 2, style)
    return lines


def _facts(view: RunView) -> list[tuple[str, str, str]]:
    """Return label, value and style of each fact."""
    daemon, missing_style = view.daemon, "" if view.over else "bold red"
    controller = f"{daemon.host}/{daemon.pid}" if daemon.alive else "none"
    saved = f"{view.checkpoint.version}, {duration(view.checkpoint.age_s)} ago" if view.checkpoint else "none yet"
    rate = usd(sum(node.price_usd_per_h for node in view.nodes if node.phase in LIVE_PHASES))
    return [
        ("checkpoint", saved, "yellow" if view.store_slow else ""),
        ("daemon", plain(controller), "" if daemon.alive else missing_style),
        ("price", f"{rate} an hour", ""),
    ]


def _is_above_limit(view: RunView) -> bool:
    return view.kl is not None and view.kl_limit is not None and view.kl > view.kl_limit


# Facts of a line or two: problems, dollars, step times, weights, joining nodes.

TROUBLE_LINES = 2
TROUBLE_STYLES = {"diverged": "bold red", "watch": "yellow", "rollback": "cyan", "not bought": "bold red"}


def trouble(view: RunView, width: int) -> list[Text]:
    """Draw problems."""
    return [
        line
        for label, words in troubles(view)
        for line in labelled(label, words, width, TROUBLE_LINES, TROUBLE_STYLES[label])
    ]


def money(view: MoneyView, width: int) -> list[Text]:
    """Draw dollars: spent, at the end, saved, a step. Figures that do not fit are left out."""
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


def timing(view: StepTiming | None, width: int) -> list[Text]:
    """Draw the seconds of generation and training in a step, and the idle time of each side."""
    words = [] if view is None else timing_words(view)
    return labelled("median", joined(words, width - LABEL), width, style="dim")


def weights(view: RunView, width: int) -> list[Text]:
    """Draw the time that the newest policy took to reach the nodes."""
    return [] if view.weights is None else labelled("weights", weights_words(view.weights), width, style="dim")


def plan(view: RunView, width: int) -> list[Text]:
    """Draw why the fleet has its nodes."""
    return labelled("plan", plain(view.plan), width, most=2, style="dim") if view.plan else []


def joining(view: RunView, width: int) -> list[Text]:
    """Draw what joining nodes are fetching or starting."""
    stages = stages_words({node.node: node.stage for node in view.nodes if node.stage is not None})
    return [
        line
        for index, words in enumerate(stages)
        for line in labelled("" if index else "joining", words, width, style="yellow")
    ]


# The machines: one line each.

# The style of each state, the most important state first.
STATE_STYLES = {
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
_TROUBLE_FIRST = {state: rank for rank, state in enumerate(STATE_STYLES) if state not in AT_WORK}
COUNTS_LINES = 2


def machines(view: RunView, width: int, most: int) -> list[Text]:
    """Draw at most `most` lines: a head, the machines, and the count of each state.

    If the machines are too many, the trainer and those in trouble come first, and the last line counts the others.
    """
    if not view.nodes:
        return [Text(fit("no machines yet", width), "dim")]
    counts = _counts(view, width)[: max(1, most - 2)]
    free = most - 1 - len(counts)
    if free <= 0:
        return counts
    nodes = list(view.nodes)
    if len(nodes) > free:
        nodes = sorted(nodes, key=_rank)[: free - 1]
    more = [f"{len(view.nodes) - len(nodes)} more"] if len(nodes) < len(view.nodes) else []
    return [
        *(_table(view, nodes, width) if nodes else []),
        *(Text(fit(words, width), "dim") for words in more),
        *counts,
    ]


def _rank(node: NodeView) -> tuple[bool, int]:
    return node.role is not Role.TRAINER, _TROUBLE_FIRST.get(node.state, len(STATE_STYLES))


def _state(node: NodeView) -> str:
    counts_engines = node.engines > 1 and node.phase is NodePhase.SERVING
    return f"{node.state} {node.engines_serving}/{node.engines}" if counts_engines else node.state


def _is_unfit(node: NodeView) -> bool:
    return bool(node.unfit) and not node.engines_serving


def _table(view: RunView, nodes: Sequence[NodeView], width: int) -> list[Text]:
    """Draw node, state, and as many further columns as fit."""
    policies = ["unfit" if _is_unfit(node) else (node.policy or UNKNOWN_TEXT) for node in nodes]
    columns = [
        ("node", [node.node for node in nodes], align_left),
        ("state", [_state(node) for node in nodes], align_left),
        ("policy", policies, align_left),
        ("tok/s", [short(node.tokens_per_s) for node in nodes], align_right),
        ("$/h", [f"{node.price_usd_per_h:.2f}" for node in nodes], align_right),
        ("market", [node.market.replace("_", " ") for node in nodes], align_left),
        ("for", [duration(view.now_s - node.since_s) for node in nodes], align_right),
    ]
    lines = [Text("", "dim"), *(Text(no_wrap=True) for _ in nodes)]
    styles = ["", *("bold red" if _is_unfit(node) else STATE_STYLES[node.state] for node in nodes)]
    used = 0
    for title, words, pad in columns:
        column_width = max(map(cell_len, (title, *words))) + 1
        if title not in ("node", "state") and used + column_width > width + 1:
            break
        for line, word, style in zip(lines, (title, *words), styles, strict=True):
            line.append(pad(word, column_width - 1) + " ", style if title == "state" else "")
        used += column_width
    for line in lines:
        line.rstrip()
    return [cut(line, width) for line in lines]


def _counts(view: RunView, width: int) -> list[Text]:
    """Draw the number of machines in each state."""
    found = Counter(node.state for node in view.nodes)
    counts = [f"{found[state]} {state}" for state in STATE_STYLES if found[state]]
    return [Text(line, "dim", no_wrap=True) for line in in_lines(counts, width, COUNTS_LINES)]


# The whole screen.

HEIGHT = 24
MACHINES_MIN = 5  # lines: the head, three machines, and the counts
MACHINES_SHARE = 2 / 3  # maximum share of the lines for machines and events
EVENTS_MIN = 3
TIME_WIDTH = 11  # cells of the time before an event
BLANK = Text("")


class Screen:
    """A rich renderable of a run: as wide as the console, at most `height` lines."""

    def __init__(self, view: RunView, height: int = HEIGHT) -> None:
        self._view = view
        self._height = height

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        yield from drawn(self._view, options.max_width, self._height)


class _FreeLines:
    """The unused lines of the screen."""

    def __init__(self, height: int) -> None:
        self.count = max(0, height)

    def take(self, lines: Sequence[Text], keep: int = 0) -> list[Text]:
        """Use up and return the first of `lines`, as many as fit while `keep` lines stay free."""
        taken = list(lines[: max(0, self.count - keep)])
        self.count -= len(taken)
        return taken


def drawn(view: RunView, width: int, height: int) -> list[Text]:
    """Return the lines of the screen from the top. Parts take their lines in the order of importance."""
    free = _FreeLines(height)
    top = free.take(head(view, width))
    troubles = free.take(trouble(view, width))
    curves = free.take(figures(view, width), EVENTS_MIN)
    keep = min(MACHINES_MIN, len(view.nodes) + 2) + EVENTS_MIN
    dollars = free.take(money(view.money, width), keep)
    times = free.take(timing(view.step_timing, width), keep)
    stages = free.take(joining(view, width), keep)
    details = free.take(weights(view, width), keep) + free.take(plan(view, width), keep)
    blanks = free.take([BLANK] * 3, keep)
    nodes = free.take(machines(view, width, _machine_lines(view, free.count)))
    events = _events(view, width, free.count)
    gap = [blanks[:1] for blanks in (blanks, blanks[1:], blanks[2:])]
    facts = [*curves, *dollars, *times, *details, *troubles, *stages]
    return [*top, *gap[2], *facts, *gap[0], *nodes, *gap[1], *events]


def _machine_lines(view: RunView, free: int) -> int:
    """Return the number of lines for the machines."""
    most = max(min(MACHINES_MIN, free), free - max(EVENTS_MIN, round((1 - MACHINES_SHARE) * free)))
    return min(len(view.nodes) + 2, most)


def _events(view: RunView, width: int, count: int) -> list[Text]:
    shown = view.events[-count:] if count > 0 else ()
    return [_event(line, width) for line in shown]


def _event(event: EventLine, width: int) -> Text:
    if width < 2 * TIME_WIDTH:
        return Text(fit(event.text, width), no_wrap=True)
    time = align_left(clock(event.time_s), TIME_WIDTH)
    return Text(time, "dim", no_wrap=True).append(fit(event.text, width - TIME_WIDTH), "not dim")


# Watching: the screen is redrawn repeatedly; plain lines are printed if the output is not a terminal.

REFRESH_S = 0.5


def watch(
    get_view: Callable[[], RunView],
    wait: Callable[[float], bool],
    console: Console | None = None,
) -> RunView:
    """Show the run until it is over, and return the last view.

    Args:
        get_view: reads the run.
        wait: waits for the given seconds; returns True to stop watching, as `threading.Event().wait` does.
        console: prints one plain line for each change if it is not a terminal that supports drawing.

    On Ctrl-C the terminal is restored and KeyboardInterrupt is raised.
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
    found = [f"{clock(line.time_s)} {plain(line.text)}" for line in fresh]
    newest = _newest(view)
    if newest is not None and (before is None or _newest(before) != newest):
        step, reward, kl = newest
        of = f"/{view.max_steps}" if view.max_steps else ""
        found.append(f"{clock(view.now_s)} step {step}{of} reward {short(reward)} kl {short(kl)}")
    return found


def _newest(view: RunView) -> tuple[int, float | None, float | None] | None:
    """Return step, reward and KL of the newest row. An evaluation may still add to that row."""
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
