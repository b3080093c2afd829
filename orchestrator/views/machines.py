"""The machines on the live screen: a line each with its last hour; of more than fit, groups and counts."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from orchestrator.views.measured import AT_WORK, LANE_S, LaneState, cells, shares_at_work, span_of
from orchestrator.views.model import NodeView, RunView
from orchestrator.views.screen import cut, fit, in_lines, left, right
from orchestrator.views.words import NOT_KNOWN, duration, short
from policies.model.vocabulary import NodePhase, Role

STRIP_MIN, STRIP_WANTED, STRIP_MOST = 6, 20, 60  # cells: of ten minutes, three, one
GROUP_NAME = 32  # cells, at most
# What a state is drawn with: no information is in a colour alone. What matters more comes first.
LOOKS = {
    LaneState.SERVING: ("█", "green"),
    LaneState.IDLE: ("░", "green"),
    LaneState.LOST: ("×", "red"),
    LaneState.REFUSED: ("!", "red"),
    LaneState.DRAINING: (">", "magenta"),
    LaneState.LOADING: ("▒", "blue"),
    LaneState.BOOTING: (":", "yellow"),
    LaneState.REQUESTED: ("·", "cyan"),
    LaneState.TERMINATING: (")", "magenta"),
    LaneState.GONE: (" ", "dim"),
}
_SHARES = " ▁▂▃▄▅▆▇█"
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
    """At most so many lines: a head, the machines, and how many there are of each state, which is also the key."""
    if not view.nodes:
        return [Text(fit("no machines yet", width), "dim")]
    counts = _counts(view, width)[: max(1, most - 2)]
    table = _table(view, _rows(view, most - 1 - len(counts)), width) if most > 2 else []
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
        style="bold red" if unfit else LOOKS[node.state][1],
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


def _table(view: RunView, rows: Sequence[_Row], width: int) -> list[Text]:
    name, state, strip, ends = _columns(rows, width)
    span_s = span_of((one.lane for one in view.nodes), view.now_s)
    span = "hour" if span_s == LANE_S else f"{span_s / 60:.0f} min"
    hour = f" {left(f'last {span}' if strip > len(span) + 4 else span, strip)}" if strip else ""
    title = f"{name.at(None)} {state.at(None)}{hour}{''.join(f' {end.at(None)}' for end in ends)}"
    lines = [Text(title, "dim", no_wrap=True)]
    for place, row in enumerate(rows):
        line = Text(name.at(place), no_wrap=True).append(" ").append(state.at(place), row.style)
        if strip:
            line.append(" ").append_text(_strip(view, row.nodes, strip, span_s))
        lines.append(line.append("".join(f" {end.at(place)}" for end in ends)))
    for line in lines:
        line.rstrip()
    return [cut(line, width) for line in lines]


def _columns(rows: Sequence[_Row], width: int) -> tuple[_Column, _Column, int, list[_Column]]:
    """Name, state, how long the strip is, and those after it that there is room for."""
    singles = max((cell_len(row.name) for row in rows if len(row.nodes) == 1), default=0)
    most = max(singles, GROUP_NAME)
    name = _Column("node", [fit(row.name, most) for row in rows], left)
    state = _Column("state", [row.state for row in rows], left, 8)
    ends = [
        (_Column("policy", [row.policy for row in rows], left), STRIP_MIN),
        (_Column("tok/s", [row.tokens for row in rows], right), STRIP_MIN),
        (_Column("$/h", [row.price for row in rows], right), STRIP_MIN),
        (_Column("market", [row.market for row in rows], left), STRIP_WANTED),
        (_Column("for", [row.since for row in rows], right, 8), STRIP_WANTED),
    ]
    room = width - name.width - 1 - state.width - 1
    kept = list[_Column]()
    for end, strip in ends:
        if room - end.width - 1 < strip:
            break
        room -= end.width + 1
        kept.append(end)
    return name, state, min(STRIP_MOST, room) if room >= STRIP_MIN else 0, kept


def _strip(view: RunView, nodes: Sequence[NodeView], count: int, span_s: float) -> Text:
    """Draw what one machine did; for several, the share of them that served."""
    line = Text()
    if len(nodes) == 1:
        for state in cells(nodes[0].lane, nodes[0].state, view.now_s, count, span_s):
            line.append(*(LOOKS[state] if state is not None else (" ", "")))
        return line
    shares = shares_at_work([one.lane for one in nodes], view.now_s, count, span_s)
    # Rounded up: one that works is seen among a thousand.
    return line.append("".join(_SHARES[math.ceil(8 * share)] for share in shares), "green")


def _counts(view: RunView, width: int) -> list[Text]:
    """How many machines are at what, each with what its state is drawn with."""
    found = Counter(one.state for one in view.nodes)
    told = [f"{LOOKS[state][0]} {found[state]} {state}".strip() for state in LOOKS if found[state]]
    return [Text(line, "dim", no_wrap=True) for line in in_lines(told, width, COUNTS_LINES)]
