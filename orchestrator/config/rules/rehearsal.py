"""The `rehearse` section: faults as a user writes them, in the shape of `policies.model.spec.Rehearsal`.

faults:
  - {at_step: 5, kill: rollout-0}
  - {at_step: 9, preempt: rollouts, notice_s: 5}
  - {at_step: 12, kill: daemon, for_s: 3}
  - {at_step: 14, no_capacity: rollouts, for_s: 10}
prices:
  trainer: {on_demand_usd_per_h: 4.1, spot_usd_per_h: 1.4}
"""

from __future__ import annotations

import re
from typing import Any

from orchestrator.config.problems import Findings, KeyPath, did_you_mean, unknown_key
from orchestrator.config.structure import Kind, mismatch, shown

KEYS = ("faults", "prices")
TARGETS = {
    "kill": ("rollout-N", "rollouts", "trainer", "trainer-0", "gateway", "daemon"),
    "preempt": ("rollout-N", "rollouts", "trainer-0"),
    "no_capacity": ("rollout-N", "rollouts", "trainer-0"),
}
# Stands in for a fault that was reported, so that the others keep their places.
_REPORTED = {"fault": "kill", "at_step": 0}
_NODE = re.compile(r"^rollout-(0|[1-9][0-9]{0,5})$")


def write_out_rehearsal(data: dict[str, Any], replicas_max: int | None, findings: Findings) -> None:
    """Replace `data["rehearse"]` by its long form. `replicas_max` bounds the rollout nodes that can be named."""
    section = data.get("rehearse")
    if section is None:
        return
    here: KeyPath = ("rehearse",)
    if message := mismatch(section, Kind("dict")):
        findings.add(here, message + "; its keys are " + ", ".join(KEYS))
        del data["rehearse"]
        return
    if data.get("cloud", "local") != "local":
        findings.add(
            here, "faults are rehearsed on the local cloud alone; set cloud: local or remove this section"
        )
    for key in section.keys() - set(KEYS):
        findings.add((*here, key), unknown_key(key, KEYS))
    data["rehearse"] = _prices(section.get("prices"), findings)
    data["rehearse"]["faults"] = _faults(section.get("faults"), replicas_max, findings)


def _faults(faults: Any, replicas_max: int | None, findings: Findings) -> list[dict[str, Any]]:
    here: KeyPath = ("rehearse", "faults")
    if message := mismatch(faults, Kind("list | None")):
        findings.add(here, message)
        return []
    found = []
    for index, fault in enumerate(faults or ()):
        plain = None
        if message := mismatch(fault, Kind("dict")):
            findings.add((*here, index), f"{message}, as in {{at_step: 5, kill: rollout-0}}")
        else:
            plain = _fault(fault, (*here, index), replicas_max, findings)
        found.append(plain or _REPORTED)
    return found


def _fault(
    fault: dict[str, Any], path: KeyPath, replicas_max: int | None, findings: Findings
) -> dict[str, Any] | None:
    kinds = [key for key in fault if key in TARGETS]
    if len(kinds) != 1:
        unknown = [key for key in fault if key not in ("at_step", "for_s", "notice_s", *TARGETS)]
        near = did_you_mean(unknown[0], TARGETS) if unknown else ""
        findings.add(path, f"expected exactly one of {', '.join(TARGETS)} in a fault{near}")
        return None
    kind = kinds[0]
    takes = ["at_step", kind]
    if kind == "preempt":
        takes.append("notice_s")
    if kind == "no_capacity" or fault[kind] == "daemon":
        takes.append("for_s")
    for key in fault.keys() - set(takes):
        findings.add((*path, key), unknown_key(key, takes))
    if "at_step" not in fault:
        findings.missing((*path, "at_step"), "missing; expected the step after which the fault is done")
        return None
    if message := _target_problem(kind, fault[kind], replicas_max):
        findings.add((*path, kind), message)
        return None
    findings.rename((*path, kind), (*path, "target"))
    times = {key: value for key, value in fault.items() if key in takes and key != kind}
    return {"fault": kind, "target": fault[kind], **times}


def _target_problem(kind: str, target: Any, replicas_max: int | None) -> str:
    expected = "expected one of " + ", ".join(TARGETS[kind])
    if not isinstance(target, str):
        return f"{expected}, got {shown(target)}"
    node = _NODE.match(target)
    if replicas_max == 0 and (node or target == "rollouts"):
        return "there are no rollout nodes: rollout.replicas is 0"
    if node:
        if replicas_max is not None and int(node[1]) >= replicas_max:
            return f"there is no {target}; the last is rollout-{replicas_max - 1}, by rollout.replicas.max"
        return ""
    if target in TARGETS[kind] and target != "rollout-N":
        return ""
    return f"{expected}, got {shown(target)}{did_you_mean(target, TARGETS[kind])}"


def _prices(prices: Any, findings: Findings) -> dict[str, Any]:
    """`prices.trainer` becomes `trainer_prices`; what is in it is checked with the rest of the structure."""
    here: KeyPath = ("rehearse", "prices")
    if message := mismatch(prices, Kind("dict | None")):
        findings.add(here, message)
        return {}
    found = {}
    for role, value in (prices or {}).items():
        if role not in ("trainer", "rollout"):
            findings.add((*here, role), unknown_key(role, ("trainer", "rollout")))
            continue
        better = ("rehearse", f"{role}_prices")
        findings.rename((*here, role), better)
        for key in value if isinstance(value, dict) else ():
            findings.rename((*here, role, key), (*better, key))
        found[f"{role}_prices"] = value
    return found
