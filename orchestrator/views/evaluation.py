"""What an evaluation found, policy beside policy: for people a table, for programs the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from checkpoint.records.evaluated import Evaluated
from orchestrator.views.words import NOT_KNOWN
from policies.evaluation import intervals
from policies.evaluation.intervals import Estimate
from policies.evaluation.judging import Verdict

SAID = {
    Verdict.CORRECT: "correct",
    Verdict.WRONG: "right form, wrong",
    Verdict.UNREADABLE: "unreadable",
    Verdict.UNSCORED: "not scored",
}


def table(found: Sequence[Evaluated]) -> Table:
    """Shares and mean rewards with their intervals; the last column is the last policy against the first."""
    apart = len(found) > 1
    title = f"greedy, {len(found[0].verdicts)} problems, 95 % intervals"
    made = Table("", *(one.subject for one in found), *(["difference"] if apart else []), title=title)
    for kind in _kinds(found):
        named = SAID[kind] if kind is not Verdict.WRONG or found[0].readable_by else "wrong"
        cells = [_percent(intervals.share(one.verdicts.count(kind), len(one.verdicts))) for one in found]
        if apart:
            first, last = ([one == kind for one in of.verdicts] for of in (found[0], found[-1]))
            cells.append(_percent(intervals.shares_apart(first, last), signed=True))
        made.add_row(named, *cells)
    made.add_section()
    for name in found[0].scores:
        cells = [_number(_mean(one.scores[name])) for one in found]
        if apart:
            cells.append(_number(_means_apart(found[0].scores[name], found[-1].scores[name]), signed=True))
        made.add_row(name, *cells)
    made.add_section()
    lengths = [[float(tokens) for tokens in one.tokens] for one in found]
    cells = [_number(intervals.mean(one)) for one in lengths]
    if apart:
        cells.append(_number(intervals.means_apart(lengths[0], lengths[-1]), signed=True))
    made.add_row("tokens", *cells)
    made.add_row("cut off", *(f"{one.cut}" for one in found), *([""] if apart else []))
    return made


def to_json(found: Sequence[Evaluated], store: str) -> dict[str, Any]:
    """The same for programs; shares from 0 to 1."""
    told: dict[str, Any] = {
        "store": store,
        "problems": len(found[0].verdicts),
        "judged_by": found[0].judged_by,
        "readable_by": found[0].readable_by,
        "policies": {one.subject: _policy(one) for one in found},
    }
    if len(found) > 1:
        told["difference"] = _difference(found[0], found[-1])
    return told


def _policy(one: Evaluated) -> dict[str, Any]:
    count = len(one.verdicts)
    return {
        "shares": {kind: asdict(intervals.share(one.verdicts.count(kind), count)) for kind in Verdict},
        "rewards": {name: _plain(_mean(scores)) for name, scores in one.scores.items()},
        "tokens": asdict(intervals.mean([float(tokens) for tokens in one.tokens])),
        "cut": one.cut,
    }


def _difference(first: Evaluated, last: Evaluated) -> dict[str, Any]:
    def apart(kind: Verdict) -> Estimate:
        return intervals.shares_apart([v == kind for v in first.verdicts], [v == kind for v in last.verdicts])

    rewards = {name: _plain(_means_apart(first.scores[name], last.scores[name])) for name in first.scores}
    shares = {kind: asdict(apart(kind)) for kind in Verdict}
    return {"of": [first.subject, last.subject], "shares": shares, "rewards": rewards}


def _kinds(found: Sequence[Evaluated]) -> list[Verdict]:
    """Those that can be told apart here, and of the last what there is."""
    there = {verdict for one in found for verdict in one.verdicts}
    kinds = [Verdict.CORRECT, Verdict.WRONG]
    if found[0].readable_by:
        kinds.append(Verdict.UNREADABLE)
    return [*kinds, *([Verdict.UNSCORED] if Verdict.UNSCORED in there else [])]


def _mean(scores: Sequence[float | None]) -> Estimate | None:
    there = [one for one in scores if one is not None]
    return intervals.mean(there) if there else None


def _means_apart(before: Sequence[float | None], after: Sequence[float | None]) -> Estimate | None:
    """Over what has a score on both sides."""
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    return intervals.means_apart([a for a, _ in pairs], [b for _, b in pairs]) if pairs else None


def _plain(one: Estimate | None) -> dict[str, float] | None:
    return None if one is None else asdict(one)


def _percent(one: Estimate, *, signed: bool = False) -> str:
    sign = "+" if signed else ""
    return f"{100 * one.value:{sign}.1f} % ({100 * one.low:{sign}.1f} to {100 * one.high:{sign}.1f})"


def _number(one: Estimate | None, *, signed: bool = False) -> str:
    if one is None:
        return NOT_KNOWN
    sign = "+" if signed else ""
    return f"{one.value:{sign}.3f} ({one.low:{sign}.3f} to {one.high:{sign}.3f})"
