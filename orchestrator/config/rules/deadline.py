"""`policies.fleet.deadline`: a time as users write it, in the one form that is stored, `2026-11-30T18:00:00Z`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from orchestrator.config.foreign_keys import grpo_table
from orchestrator.config.problems import Findings, KeyPath
from orchestrator.config.structure import shown
from policies.control.fleet.markets import market_of, may_stand_in
from policies.model.spec import RunSpec, generates_itself
from policies.model.vocabulary import Market, Role

KEY: KeyPath = ("policies", "fleet", "deadline")
EXPECTED = "expected a date and a time with its zone, as in 2026-11-30T18:00+01:00"
STORED = "%Y-%m-%dT%H:%M:%SZ"


def write_out_deadline(data: dict[str, Any], now_s: float, findings: Findings) -> None:
    """Replace the deadline by its stored form. Without a zone it is in UTC, as YAML has it."""
    policies = data.get("policies")
    fleet = policies.get("fleet") if isinstance(policies, dict) else None
    if not isinstance(fleet, dict) or (named := fleet.get("deadline")) is None:
        return
    time = _read(named)
    if time is None:
        findings.add(KEY, f"{EXPECTED}, got {shown(named)}")
        del fleet["deadline"]
        return
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
        findings.notice(KEY, "names no zone, and is read as UTC; write it as in 2026-11-30T18:00+01:00")
    if time.timestamp() <= now_s:
        now = datetime.fromtimestamp(now_s, UTC).strftime(STORED)
        findings.add(KEY, f"has passed: {named} is before now, {now}; expected a time to come")
    fleet["deadline"] = time.astimezone(UTC).strftime(STORED)


def _read(named: Any) -> datetime | None:
    """The time; None where it is none, or a day alone, of which nobody knows which hour is meant."""
    text = named.strip() if isinstance(named, str) else ""
    try:
        time = datetime.fromisoformat(text)
        time.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return time if ":" in text and time.year >= 1970 else None


def note_deadline(spec: RunSpec, findings: Findings) -> None:
    """Note what stands in the way of keeping it."""
    if spec.policies.fleet.deadline is None:
        return
    steps = spec.grpo.get("max_steps")
    if int(grpo_table().default("max_steps") if steps is None else steps) <= 0:
        why = "without grpo.max_steps nobody knows how many steps there are before the trainer has read its data"
        findings.notice(KEY, f"cannot be judged before the run trains, nor be sure to be kept: {why}")
    if generates_itself(spec):
        findings.notice(KEY, "cannot be kept by buying more: with replicas: 0 there are no rollout nodes")
    elif market_of(Role.ROLLOUT, spec) is Market.SPOT and not may_stand_in(spec):
        why = "rollout.resources names spot (`use_spot`), so no machine on demand is bought"
        findings.notice(KEY, f"is kept only while spot can be had: {why}")
