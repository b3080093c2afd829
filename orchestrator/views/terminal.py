"""The live view in a terminal, and plain lines where the output is none.

Drawn for 80 x 24: what the run is doing, whether it learns, who works, what happened last. No information is in a
colour alone.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from checkpoint.records.metrics import logged
from orchestrator.views.lineage import start_words
from orchestrator.views.model import FleetView, MembershipView, MoneyView, NodeView, RunView
from orchestrator.views.numbers import NOT_KNOWN, clock, duration, short, sparkline, usd
from orchestrator.views.weights import stages_words, weights_words
from policies.detect.divergence import Health
from policies.model.phases import TERMINAL_RUN
from policies.model.vocabulary import NodePhase, RollbackStage, RunPhase

REFRESH_S = 0.5
SPARK_WIDTH = 22
NODES_SHOWN = 8
EVENTS_MIN = 3
MEMBERSHIP_SHOWN = 3  # where there is room
LINES_BESIDE = 12  # of 24: everything but health, nodes, members and events
HEALTH_WIDTH = 68  # beside its first word
HEALTH_LINES = 2  # for what the detectors say

RUN_STYLES = {
    RunPhase.STARTING: "yellow",
    RunPhase.TRAINING: "green",
    RunPhase.FINISHED: "bold green",
    RunPhase.STOPPING: "yellow",
    RunPhase.STOPPED: "magenta",
    RunPhase.FAILED: "bold red",
    RunPhase.PAUSED: "bold yellow",
    RunPhase.GAVE_UP: "bold red",
}
NODE_STYLES = {
    NodePhase.REQUESTED: "cyan",
    NodePhase.BOOTING: "yellow",
    NodePhase.SERVING: "green",
    NodePhase.DRAINING: "magenta",
    NodePhase.TERMINATING: "magenta",
    NodePhase.GONE: "red",
    NodePhase.REFUSED: "red",
}
_TROUBLE_FIRST = [p for p in NodePhase if p is not NodePhase.SERVING] + [NodePhase.SERVING]


def render(view: RunView, height: int = 24) -> RenderableType:
    """Draw the view in at most `height` lines of at least 80 columns."""
    health = _health_lines(view)
    shown = NODES_SHOWN - len(health)
    nodes = min(len(view.nodes), shown) + (len(view.nodes) > shown)
    blank = Text("")
    parts: list[RenderableType] = [_header(view), _progress(view), blank, _figures(view)]
    parts += [*health, blank, _nodes(view, shown), blank]
    room = height - LINES_BESIDE - len(health) - nodes
    count = min(MEMBERSHIP_SHOWN, room - EVENTS_MIN - 1)
    changes = view.membership[-count:] if count > 0 else ()
    if changes:
        parts += [_membership(changes), blank]
        room -= len(changes) + 1
    return Group(*parts, _events(view, max(EVENTS_MIN, room)))


def watch(
    get_view: Callable[[], RunView],
    wait: Callable[[float], bool],
    console: Console | None = None,
) -> RunView:
    """Show the run until it is over, and return the last view.

    Args:
        get_view: looks at the run.
        wait: waits for so many seconds, and returns True to stop watching: `threading.Event().wait`.
        console: where to; on anything but a terminal one plain line for each change is printed.

    Ctrl-C is the caller's: KeyboardInterrupt passes, the terminal restored.
    """
    console = console or Console()
    if not console.is_terminal:
        return _follow(get_view, wait, console)
    view = get_view()
    with Live(render(view, console.height), console=console, auto_refresh=False) as live:
        while not view.over and not wait(REFRESH_S):
            view = get_view()
            live.update(render(view, console.height), refresh=True)
        live.update(render(view, console.height), refresh=True)
    return view


def changes(before: RunView | None, view: RunView) -> list[str]:
    """Return a plain line for each event and the step that are new since `before`."""
    known = {(line.type, line.number, line.index) for line in before.events} if before else set()
    fresh = [line for line in view.events if (line.type, line.number, line.index) not in known]
    told = [f"{clock(line.time_s)} {line.text}" for line in fresh]
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


def _header(view: RunView) -> RenderableType:
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    phase = Text(f" {view.phase.upper().replace('_', ' ')} ", style=f"{RUN_STYLES[view.phase]} reverse")
    line.add_row(Text(view.name, style="bold"), phase, Text(_headline(view), style="dim"))
    return line


def _headline(view: RunView) -> str:
    """What matters most right now, in a few words."""
    if view.phase in TERMINAL_RUN or view.phase is RunPhase.STOPPING:
        return view.reason
    if not view.daemon.alive:
        return f"no controller; `grpo-orch resume {view.store}`"
    if view.rollback is not None and view.rollback.stage is not RollbackStage.PROBATION:
        return f"rolling back to {start_words(view.rollback.start)}"
    if view.phase is RunPhase.TRAINING and view.activity:
        waiting = f", {view.requests_waiting} requests wait" if view.requests_waiting else ""
        slow = ", the store is slow" if view.store_slow else ""
        return f"trainer is {view.activity}{waiting}{slow}"
    return view.reason or "waiting for the trainer's first heartbeat"


def _progress(view: RunView) -> RenderableType:
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right")
    total = view.max_steps or 1
    bar = ProgressBar(total=total, completed=view.step, complete_style=RUN_STYLES[view.phase], style="grey30")
    words = [f"step {view.step} of {view.max_steps}" if view.max_steps else "no step yet"]
    if view.timeline:
        words.append(f"timeline {view.timeline}")
    if view.step_s is not None:
        words.append(f"{view.step_s:.1f} s a step")
    if view.eta_s:
        words.append(f"{duration(view.eta_s)} to go")
    line.add_row(bar, " · ".join(words))
    return line


def _figures(view: RunView) -> RenderableType:
    grid = Table.grid(padding=(0, 1), expand=True)
    for width in (6, 7):
        grid.add_column(width=width, no_wrap=True)
    grid.add_column(width=SPARK_WIDTH, no_wrap=True)
    grid.add_column(width=11, no_wrap=True, style="dim")
    grid.add_column(width=10, no_wrap=True)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    rewards, kls = logged(view.recent, "reward"), logged(view.recent, "kl")
    above = view.health.health is Health.TRIPPED or _is_above_limit(view)
    hot = "bold red" if above else "yellow"
    limit = f"limit {view.kl_limit:.3g}" if view.kl_limit is not None else ""
    daemon = view.daemon
    steered = (
        f"{daemon.host}/{daemon.pid}" if daemon.alive else Text("none", style="" if view.over else "bold red")
    )
    saved = f"{view.checkpoint.version}, {duration(view.checkpoint.age_s)} ago" if view.checkpoint else "none yet"
    age = Text(saved, "yellow" if view.store_slow else "")
    spark = Text(sparkline(rewards, SPARK_WIDTH), "green")
    grid.add_row("reward", Text(short(view.reward), "bold"), spark, "", "checkpoint", age)
    spark = Text(sparkline(kls, SPARK_WIDTH), hot)
    grid.add_row("kl", Text(short(view.kl), "bold red" if above else "bold"), spark, limit, "controller", steered)
    waiting = "no gateway" if view.requests_waiting is None else f"{view.requests_waiting} waiting"
    grid.add_row("tokens", Text(short(view.tokens_per_s), "bold"), "a second", waiting, "price", _price(view))
    return grid


def _is_above_limit(view: RunView) -> bool:
    return view.kl is not None and view.kl_limit is not None and view.kl > view.kl_limit


def _health_lines(view: RunView) -> list[RenderableType]:
    """What the weights take; where not all is well, what is off, how far a rollback is, what is not bought."""
    health, rollback, told = view.health, view.rollback, list[Text]()
    if health.health is not Health.HEALTHY:
        word = "diverged" if health.health is Health.TRIPPED else "watched"
        style = "bold red" if health.health is Health.TRIPPED else "yellow"
        since = f"since step {health.onset_step}, seen at step {health.step}"
        words = f"{since}: {'; '.join(health.evidence)}" if health.evidence else since
        fitting = textwrap.wrap(words, HEALTH_WIDTH, max_lines=HEALTH_LINES, placeholder=" …")
        told = [Text(f"{word if place == 0 else '':<10} {line}", style) for place, line in enumerate(fitting)]
    if rollback is not None:
        passed_s = duration(view.now_s - rollback.since_s)
        start = rollback.start or "the start"
        words = f"timeline {rollback.timeline}, from {start}, {rollback.text} ({passed_s})"
        told.append(Text(f"{'rollback':<10} {words}", "cyan", no_wrap=True, overflow="ellipsis"))
    stages = stages_words({node.node: node.stage for node in view.nodes if node.stage is not None})
    for place, line in enumerate(stages):
        words = f"{'' if place else 'coming':<10} {line}"
        told.append(Text(words, "yellow", no_wrap=True, overflow="ellipsis"))
    for one in view.not_bought:
        wait_s = duration(max(0.0, one.tried_again_s - view.now_s))
        words = f"{one.kind}, one is tried in {wait_s}: {one.reason}"
        fitting = textwrap.wrap(words, HEALTH_WIDTH, max_lines=HEALTH_LINES, placeholder=" …")
        told += [
            Text(f"{'not bought' if place == 0 else '':<10} {line}", "bold red")
            for place, line in enumerate(fitting)
        ]
    if view.fleet is not None and view.fleet.fixed_s is not None:
        told.insert(0, Text(f"{'step':<10} {_fleet(view.fleet)}", "dim", no_wrap=True, overflow="ellipsis"))
    if view.money.spent_usd > 0:
        told.insert(0, Text(f"{'money':<10} {_money(view.money)}", no_wrap=True, overflow="ellipsis"))
    if view.weights is not None:
        words = f"{'weights':<10} {weights_words(view.weights)}"
        told.insert(0, Text(words, "dim", no_wrap=True, overflow="ellipsis"))
    return [*told]


def _fleet(fleet: FleetView) -> str:
    cheapest = "prices not known" if fleet.cheapest is None else f"{fleet.cheapest:.1f} nodes cheapest"
    split = f"{short(fleet.fixed_s)} s + {short(fleet.generation_node_s)} node-seconds generating"
    return f"{split} · {cheapest}, {fleet.nodes} wanted"


def _money(money: MoneyView) -> str:
    words = [f"{usd(money.spent_usd)} spent" + (f" of {usd(money.budget_usd)}" if money.budget_usd else "")]
    if money.usd_per_step is not None:
        words.append(f"{usd(money.usd_per_step)} a step")
    if money.usd_per_million_tokens is not None:
        words.append(f"{usd(money.usd_per_million_tokens)}/M tokens")
    if money.forecast_usd is not None:
        words.append(f"{usd(money.forecast_usd)} at the end")
    return " · ".join(words)


def _price(view: RunView) -> str:
    there = (NodePhase.BOOTING, NodePhase.SERVING, NodePhase.DRAINING, NodePhase.TERMINATING)
    total = sum(node.price_usd_per_h for node in view.nodes if node.phase in there)
    return f"${total:.2f} an hour"


def _nodes(view: RunView, most: int) -> RenderableType:
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("node", ratio=1, no_wrap=True)
    for title, width in (("phase", 11), ("for", 9), ("market", 9), ("policy", 7)):
        table.add_column(title, no_wrap=True, min_width=width)  # so that nothing jumps when a word gets longer
    table.add_column("restarts", no_wrap=True, justify="right")
    table.add_column("$/h", no_wrap=True, justify="right")
    if not view.nodes:
        table.add_row(Text("none yet", style="dim"))
    shown = _worth_showing(view.nodes, most)
    for node in shown:
        table.add_row(*_node_cells(view, node))
    if len(view.nodes) > len(shown):
        table.add_row(Text(f"and {len(view.nodes) - len(shown)} more", style="dim"))
    return table


def _worth_showing(nodes: Sequence[NodeView], most: int) -> list[NodeView]:
    """All where there is room, else those in trouble first; in the view's own order."""
    first = sorted(nodes, key=lambda node: _TROUBLE_FIRST.index(node.phase))[:most]
    return [node for node in nodes if node in first]


def _node_cells(view: RunView, node: NodeView) -> list[RenderableType]:
    return [
        node.node,
        Text(_phase(node), style=NODE_STYLES[node.phase]),
        duration(view.now_s - node.since_s),
        node.market.replace("_", " "),
        _policy(node),
        Text(str(node.restarts), style="yellow" if node.restarts else "dim"),
        f"{node.price_usd_per_h:.2f}",
    ]


def _policy(node: NodeView) -> Text:
    """What it holds; of a machine whose engines do not all fail, those that do are missing in its phase."""
    if node.unfit and not node.engines_serving:
        return Text("unfit", style="bold red")
    return Text(node.policy or NOT_KNOWN)


def _phase(node: NodeView) -> str:
    """`serving`, and of several engines how many do: `serving 7/8`."""
    several = node.engines > 1 and node.phase is NodePhase.SERVING
    return f"{node.phase} {node.engines_serving}/{node.engines}" if several else node.phase


def _membership(changes: Sequence[MembershipView]) -> RenderableType:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="dim", no_wrap=True, min_width=9)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for change in changes:
        table.add_row(f"{duration(change.ago_s)} ago", Text(change.reason))
    return table


def _events(view: RunView, count: int) -> RenderableType:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for line in view.events[-count:]:
        table.add_row(clock(line.time_s), Text(line.text))
    return table
