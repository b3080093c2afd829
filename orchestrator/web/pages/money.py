"""What the run costs: spent, what it would have been on demand, a step, and at the end as it goes now."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from orchestrator.web.page import Asked, Page
from orchestrator.web.watch import Look


def _data(look: Look, _: Asked) -> dict[str, Any]:
    money = look.view.money
    return {"money": {**asdict(money), "saved_usd": max(0.0, money.all_on_demand_usd - money.spent_usd)}}


PAGE = Page("/money", _data, "money.html", "Money")
