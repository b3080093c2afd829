"""GPUs: those of a node against what works on it; this machine's against the nodes of the local cloud."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.config.effective import EffectiveRun
from orchestrator.config.problems import Findings
from policies.control.fleet.fill import wanted_slots
from policies.model.gpus import VISIBLE, DriverFailed, asks_for_gpus, engine_gpus, gpus_of, named_gpus
from policies.model.spec import RunSpec
from policies.model.vocabulary import Role


def engine_fits(run: EffectiveRun, findings: Findings) -> None:
    """An engine larger than its node never starts."""
    named, takes = named_gpus(run.at("rollout", "resources") or {}), engine_gpus(run.at("rollout", "vllm") or {})
    if named is not None and takes > named:
        message = f"a node has {_gpus(named)}, and with these rollout.vllm flags its engine takes {takes}"
        findings.add(("rollout", "resources", "accelerators"), f"{message}; expected at least as many")


def local_nodes_have_their_own(run: EffectiveRun, findings: Findings) -> None:
    """The local cloud gives each node other GPUs; one list for all nodes of a section would undo that."""
    if run.at("cloud") == "sky":
        return
    for section in ("trainer", "rollout"):
        if run.at(section, "env", VISIBLE) is not None:
            message = "each node is given its own GPUs; remove this, and say how many in resources.accelerators"
            findings.add((section, "env", VISIBLE), message)


def check_local_gpus(spec: RunSpec, gpus_here: Callable[[], int], findings: Findings) -> None:
    """Report a driver that fails where GPUs are asked for, and what this machine's GPUs do not suffice for.

    Args:
        gpus_here: how many this machine has, 0 where it has none; may raise DriverFailed.
    """
    try:
        here = gpus_here()
    except DriverFailed as error:
        asking = [role for role, _, _ in wanted_slots(spec) if asks_for_gpus(role, spec)]
        if asking:
            message = f"{error}; expected a driver that works, or {asking[0]}.resources without accelerators"
            findings.add((asking[0].value, "resources", "accelerators"), message)
        elif any(gpus_of(role, spec) for role, _, _ in wanted_slots(spec)):
            findings.notice(("cloud",), f"{error}, so this machine counts as one without GPUs")
    else:
        too_few(spec, here, findings)


def too_few(spec: RunSpec, here: int, findings: Findings) -> None:
    """Report what the machine of a local run cannot hold; `here` is how many GPUs it has, 0 where it has none."""
    wanted = [(role, gpus_of(role, spec)) for role, _, needed in wanted_slots(spec) if needed]
    total = sum(count for _, count in wanted)
    if not 0 < here < total:
        return
    nodes = [count for role, count in wanted if role is Role.ROLLOUT]
    each = f" and {len(nodes)} rollout node{'s' * (len(nodes) > 1)} {nodes[0]} each" if nodes else ""
    message = f"this machine has {_gpus(here)}, and the run takes {total}: the trainer {wanted[0][1]}{each}"
    findings.add(("rollout", "replicas"), f"{message}; see `resources.accelerators` of both")


def note_idle(spec: RunSpec, findings: Findings) -> None:
    """A node runs as many engines as its GPUs suffice for: what is left is paid for all the same."""
    named, takes = named_gpus(spec.rollout.resources), engine_gpus(spec.rollout.vllm)
    if named is None or named < takes or named % takes == 0 or spec.rollout.replicas.max == 0:
        return
    message = (
        f"each node has {_gpus(named)} and each of its engines takes {takes}, so {named % takes} would be idle"
    )
    better = f"set rollout.vllm.tensor-parallel-size to a divisor of {named}, or have nodes of {takes}"
    findings.notice(("rollout", "resources", "accelerators"), f"{message}; {better}")


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"
