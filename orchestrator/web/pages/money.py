"""What the run costs: spent, by what it was for and over time; what it would have been on demand, a step, and at
the end as it goes now."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from orchestrator.web.page import Asked, Page
from orchestrator.web.watch import Look
from policies.ledger.rentals import spent_over_time
from policies.model.events import BudgetSet

POINTS = 400


def _data(look: Look, _: Asked) -> dict[str, Any]:
    money = look.view.money
    return {
        "money": asdict(money),
        "over_time": look.once("dollars", lambda: _over_time(look)),
    }


def _over_time(look: Look) -> dict[str, Any]:
    """By what it was for, columns of at most POINTS; the budgets from when on; the end as it goes now."""
    now_s, money = look.view.now_s, look.view.money
    spent = [asdict(at) for at in spent_over_time(look.history, now_s, look.controllers)]
    times_s = np.array([at.pop("time_s") for at in spent])
    drawn_s = times_s if len(spent) <= POINTS else np.linspace(times_s[0], times_s[-1], POINTS)
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


PAGE = Page("/money", _data, "money.html", "Money")
