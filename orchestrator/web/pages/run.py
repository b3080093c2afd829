"""The pages of the run as a whole: its course, checkpoints, rollbacks, money and diary."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from orchestrator.views.events import event_json
from orchestrator.views.model import to_json
from orchestrator.views.words import (
    change_words,
    changes_of,
    kept_as,
    skipped_of,
    skipped_words,
    stage_words,
    start_words,
)
from orchestrator.web.page import Asked, Page
from orchestrator.web.watch import Look
from policies.ledger.abandoned import abandoned
from policies.ledger.rentals import spent_over_time
from policies.model.events import BudgetSet, Diverged

# The first page: how the run goes, on one axis, and what happened last.


def _run(look: Look, _: Asked) -> dict[str, Any]:
    return {"run": to_json(look.view)}


RUN = Page("/", _run, "run.html", "Run")


# The stored checkpoints, and why each of them stays.


def _checkpoints(look: Look, _: Asked) -> dict[str, Any]:
    reasons = kept_as(look.checkpoints, look.record.spec, look.state.forks, look.trainer)
    listed = [
        {
            "version": one.version,
            "created_at_s": one.created_at_s,
            "size_bytes": one.size_bytes,
            "pinned": one.pinned,
            "kept_as": list(reasons[one.at]),
        }
        for one in reversed(look.checkpoints)
    ]
    return {"checkpoints": listed}


CHECKPOINTS = Page("/checkpoints", _checkpoints, "checkpoints.html", "Checkpoints")


# Each rollback with its evidence: what was seen, where it went back to, what it changed, how it went.


def _rollbacks(look: Look, _: Asked) -> dict[str, Any]:
    return {"rollbacks": look.once("rollbacks", lambda: _all_rollbacks(look))}


def _all_rollbacks(look: Look) -> list[dict[str, Any]]:
    state = look.state
    seen = [event for _, _, events in look.history for event in events if isinstance(event, Diverged)]
    befores = [None, *(one.fork for one in state.rollbacks)]
    found = []
    for one, before, lost in zip(state.rollbacks, befores, abandoned(look.rows, state.rollbacks), strict=False):
        trips = [event for event in seen if event.timeline == (0 if before is None else before.timeline)]
        changed = [
            change_words(changes_of(one.fork, before, look.record.spec.grpo)),
            skipped_words(skipped_of(one.fork, before)),
        ]
        found.append(
            {
                "timeline": one.fork.timeline,
                "cause": one.cause,
                "reason": one.fork.reason,
                "from_step": one.from_step,
                "start": start_words(one.fork.start),
                "changed": "; ".join(part for part in changed if part) or "the sampling seeds alone",
                "evidence": list(trips[-1].evidence) if trips else [],
                "onset_step": trips[-1].onset_step if trips else None,
                "steps_abandoned": lost.steps,
                "tokens_abandoned": lost.tokens,
                "outcome": stage_words(one)
                if one.passed or one is state.rollbacks[-1]
                else "was left by the next",
            }
        )
    return found[::-1]


ROLLBACKS = Page("/rollbacks", _rollbacks, "rollbacks.html", "Rollbacks")


# What the run costs: spent, by what it was for and over time; what it would have been on demand, a step, and at
# the end as it goes now.
MONEY_POINTS = 400


def _money(look: Look, _: Asked) -> dict[str, Any]:
    money = look.view.money
    return {
        "money": asdict(money),
        "over_time": look.once("dollars", lambda: _over_time(look)),
    }


def _over_time(look: Look) -> dict[str, Any]:
    """By what it was for, columns of at most MONEY_POINTS; the budgets from when on; the end as it goes now."""
    now_s, money = look.view.now_s, look.view.money
    spent = [asdict(at) for at in spent_over_time(look.history, now_s, look.controllers)]
    times_s = np.array([at.pop("time_s") for at in spent])
    drawn_s = times_s if len(spent) <= MONEY_POINTS else np.linspace(times_s[0], times_s[-1], MONEY_POINTS)
    columns = {name: np.array([at[name] for at in spent]) for name in (spent[0] if spent else ())}
    eta_s, forecast = look.view.eta_s, money.forecast_usd
    return {
        "x": drawn_s.tolist(),
        "usd": {
            name.removesuffix("_usd").replace("_", " "): np.interp(drawn_s, times_s, column).round(4).tolist()
            for name, column in columns.items()
        },
        "budget": _budgets(look),
        "forecast": None if forecast is None or eta_s is None else {"time": now_s + eta_s, "usd": forecast},
    }


def _budgets(look: Look) -> list[tuple[float, float]]:
    """From when on each was, seconds since the epoch, and USD."""
    first = look.record.spec.budget.usd
    since_s = look.history[0][1] if look.history else look.view.now_s
    found = [] if first is None else [(since_s, first)]
    found += [
        (at_s, event.usd) for _, at_s, events in look.history for event in events if isinstance(event, BudgetSet)
    ]
    return found


MONEY = Page("/money", _money, "money.html", "Money")


# The journal as a diary: the newest first, a page at a time, by kind and by word.
DIARY_LINES = 200
FAR = 10**9


def _diary(look: Look, asked: Asked) -> dict[str, Any]:
    kind, word = asked.text("kind"), asked.text("word")
    first = asked.whole("first", 0, 0, FAR)
    found = [
        line
        for line in reversed(look.diary)
        if (not kind or line.type == kind) and word.casefold() in line.text.casefold()
    ]
    return {
        "lines": [event_json(line) for line in found[first : first + DIARY_LINES]],
        "first": first,
        "total": len(found),
        "kinds": look.once("kinds", lambda: sorted({line.type for line in look.diary})),
        "kind": kind,
        "word": word,
        "on_a_page": DIARY_LINES,
    }


DIARY = Page("/diary", _diary, "diary.html", "Diary")
