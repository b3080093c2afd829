"""The weather that real runs met: each launch, refusal, notice, loss and return of a machine, from the journal.

One JSON object a line, to be learnt from and replayed:
`{"time_s": 1.7e9, "what": "launch", "node": "rollout-0-i1", "role": "rollout", "market": "spot",
"where": "aws/us-east-1/us-east-1a H100:8", "usd_per_h": 2.1, "after_s": 61.0, "why": ""}`. `after_s` counts from
the request; `where` and `usd_per_h` are empty and 0 where the cloud did not say. A refusal has the zone that was
asked, where one was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from orchestrator.simulate.weather import ZONES, Weather, Zone
from policies.ledger.accounting import History
from policies.model.events import MachineBought, NodeMoved, NodeRequested
from policies.model.vocabulary import Market, NodePhase, Role

LAUNCH, REFUSAL, NOTICE, LOSS, RETURN = "launch", "refusal", "notice", "loss", "return"
KINDS = (LAUNCH, REFUSAL, NOTICE, LOSS, RETURN)
GAP_S = 60.0
MINUTES_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class Met:
    """One thing that a run met. `role` and `market` as in the journal."""

    time_s: float
    what: str
    node: str
    role: str
    market: str
    where: str
    usd_per_h: float
    after_s: float
    why: str


def recorded(history: History) -> list[Met]:
    """Return what a run met, in the order of its journal."""
    asked: dict[str, tuple[float, NodeRequested]] = {}
    there: dict[str, Met] = {}  # by node: its launch
    phases: dict[str, NodePhase] = {}
    found: list[Met] = []
    for _, time_s, events in history:
        for event in events:
            match event:
                case NodeRequested():
                    asked[event.node] = (time_s, event)
                case NodeMoved() if event.node in asked:
                    at_s, request = asked[event.node]
                    what = _what(event, phases.get(event.node), event.node in there)
                    phases[event.node] = event.phase
                    if what is None:
                        continue
                    after_s = time_s - at_s
                    met = Met(
                        time_s, what, event.node, request.role, request.market, "", 0.0, after_s, event.reason
                    )
                    if request.pool is not None:
                        met = replace(met, where=f"{request.pool.place} {request.pool.machine}")
                    if launched := there.get(event.node):
                        met = replace(met, market=launched.market, where=launched.where)
                    if what == LAUNCH:
                        met = replace(met, why="")
                        there[event.node] = met
                    found.append(met)
                case MachineBought() if event.node in there:
                    before = there[event.node]
                    known = replace(
                        before, market=event.market, where=event.where, usd_per_h=event.price_usd_per_h
                    )
                    found[found.index(before)] = there[event.node] = known
                case _:
                    pass  # nothing else tells of the weather
    return found


def _what(move: NodeMoved, before: NodePhase | None, came: bool) -> str | None:
    match move.phase:
        case NodePhase.REFUSED:
            return REFUSAL
        case NodePhase.BOOTING | NodePhase.SERVING if not came:
            return LAUNCH
        case NodePhase.DRAINING if move.reason == "the cloud will take it back":
            return NOTICE
        case NodePhase.GONE if came:
            return RETURN if before is NodePhase.TERMINATING else LOSS
        case _:
            return None


def to_plain(met: Met) -> dict[str, Any]:
    return asdict(met)


def replayed(lines: Iterable[Mapping[str, Any]], nodes: int) -> Weather:
    """Return weather in which a run of `nodes` would meet the same: of spot machines alone.

    A refusal, a notice or a loss shows that a zone has no more than what is held; the next launch there shows that
    it has again. A refusal that names no zone is every zone's. Raises KeyError, TypeError, ValueError for what is
    no such line.
    """
    spot = [one for one in lines if one["market"] == Market.SPOT and one["role"] == Role.ROLLOUT]
    if not spot:
        raise ValueError("no spot machine was asked for")
    spot.sort(key=lambda one: float(one["time_s"]))  # of several runs, one file after the other
    zones = sorted({_zone(one) for one in spot} - {""}) or [ZONES[0]]
    begin_s, end_s = float(spot[0]["time_s"]), float(spot[-1]["time_s"])
    return tuple(_replayed_zone(name, spot, nodes, begin_s, end_s) for name in zones)


def _replayed_zone(name: str, spot: Sequence[Mapping[str, Any]], nodes: int, begin_s: float, end_s: float) -> Zone:
    counts: list[int] = []
    held: set[str] = set()
    now = nodes
    for one in spot:
        if _zone(one) not in ("", name):
            continue
        counts += [now] * (minutes(float(one["time_s"]) - begin_s) - len(counts))
        if one["what"] == LAUNCH:
            held.add(one["node"])
            now = nodes
        elif one["what"] == RETURN:
            held.discard(one["node"])
        else:
            held.discard(one["node"])
            now = len(held)
    counts += [now] * (minutes(end_s - begin_s) + 1 - len(counts))
    return Zone(name, GAP_S, tuple(counts))


def minutes(seconds: float) -> int:
    """Whole minutes of a time within a trace. Raises OverflowError, ValueError for what no trace lasts."""
    if (found := int(seconds / GAP_S)) > MINUTES_MAX:
        raise ValueError(f"it lasts {found} minutes; are its times in seconds?")
    return found


def _zone(one: Mapping[str, Any]) -> str:
    return str(one["where"]).partition(" ")[0]
