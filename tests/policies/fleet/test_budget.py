"""What a run has cost, and whether a machine more fits."""

from __future__ import annotations

from grpo_orch.policies.fleet.budget import TEARDOWN_S, Spending, on_demand_usd, spent_usd
from grpo_orch.policies.model.events import Event, MachineBought, NodeMoved, NodeRequested
from grpo_orch.policies.model.fold import fold
from grpo_orch.policies.model.state import Money, RunState
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Refusal, Role
from grpo_orch.policies.tick.snapshot import Snapshot
from tests.stand_ins.world import capped


def excess(usd: float | None, usd_per_h: float | None, spent_usd: float = 0.0) -> str:
    """Which cap a trainer at 36 USD an hour exceeds, once a node at 3.6 is added."""
    state = RunState(money=Money(spent_usd=spent_usd))
    spending = Spending(state, Snapshot(0.0, prices={}), capped(usd, usd_per_h))
    spending.add(Role.TRAINER, 36.0)
    return spending.refusal(Role.ROLLOUT, "node", 3.6)


def test_budget_reserves_running_cost_until_teardown() -> None:
    reserve = 36 * (900 + TEARDOWN_S) / 3600 + 3.6 * TEARDOWN_S / 3600
    assert excess(100 + reserve + 0.01, None, 100.0) == ""
    assert "budget.usd" in excess(100 + reserve - 0.01, None, 100.0)


def test_hourly_cap_limits_concurrent_machines() -> None:
    assert excess(None, 39.6, 1e6) == ""
    assert "39.60 USD an hour" in excess(None, 39.5)


def test_without_caps_everything_fits() -> None:
    assert excess(None, None, 1e9) == ""


def test_machine_counts_at_its_cap_until_its_price_is_known() -> None:
    asked = NodeRequested("rollout-0-i1", Role.ROLLOUT, "rollout-0", 1, Market.SPOT, "first", max_usd_per_h=9.0)
    other = NodeRequested("rollout-1-i1", Role.ROLLOUT, "rollout-1", 1, Market.SPOT, "first", max_usd_per_h=9.0)
    history: list[tuple[int, float, tuple[Event, ...]]] = [(1, 0.0, (asked, other))]
    assert spent_usd(fold(history), 3600.0) == 18.0
    history.append((2, 600.0, (NodeMoved("rollout-1-i1", NodePhase.REFUSED, "none", Refusal.NO_CAPACITY),)))
    history.append((3, 600.0, (NodeMoved("rollout-0-i1", NodePhase.BOOTING, "there"),)))
    history.append((4, 600.0, (MachineBought("rollout-0-i1", Market.SPOT, "here", 2.0, 8.0),)))
    assert spent_usd(fold(history), 3600.0) == 2.0
    history.append((5, 7200.0, (NodeMoved("rollout-0-i1", NodePhase.GONE, "preempted"),)))
    assert (spent_usd(fold(history), 1e9), on_demand_usd(fold(history), 1e9)) == (4.0, 16.0)
