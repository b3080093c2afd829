"""On which market a role's machines are bought, by run.yaml."""

from __future__ import annotations

from typing import Any

from policies.model.spec import RunSpec
from policies.model.vocabulary import Market, Role


def market_of(role: Role, spec: RunSpec) -> Market:
    """Rollout nodes are bought on spot unless `use_spot: false`, the trainer on demand unless `use_spot: true`."""
    resources = spec.trainer.resources if role is Role.TRAINER else spec.rollout.resources
    spot = bool(resources.get("use_spot", role is Role.ROLLOUT))
    return Market.SPOT if spot else Market.ON_DEMAND


def may_stand_in(spec: RunSpec) -> bool:
    """Whether rollout nodes may be on demand while spot cannot be had: run.yaml names no market for them."""
    resources = spec.rollout.resources
    entries: list[dict[str, Any]] = [*resources.get("any_of", ()), *resources.get("ordered", ())]
    return not any("use_spot" in one for one in (resources, *entries))
