"""GPUs of machines that run.yaml names by their `instance_type` alone: a price list tells which they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from orchestrator.clouds.sky.sdk.types import ListPrice
from policies.model.processes import ALTERNATIVES, alternatives_of
from policies.model.spec import RunSpec, processes_of


def with_instances(spec: RunSpec, listed: Sequence[ListPrice]) -> RunSpec:
    """Return the run with `accelerators` beside each `instance_type` that the list knows.

    Its nodes find these GPUs when they start. As many processes train as run.yaml says without them: a trainer is
    started by what is written there.
    """
    trainer = _named(spec.trainer.resources, listed)
    rollout = _named(spec.rollout.resources, listed)
    if trainer != spec.trainer.resources:
        accelerate = {**(spec.trainer.accelerate or {}), "num_processes": processes_of(spec)}
        spec = replace(spec, trainer=replace(spec.trainer, resources=trainer, accelerate=accelerate))
    return replace(spec, rollout=replace(spec.rollout, resources=rollout))


def _named(resources: dict[str, Any], listed: Sequence[ListPrice]) -> dict[str, Any]:
    several = next((key for key in ALTERNATIVES if resources.get(key)), None)
    found = [_with_gpus(one, listed) for one in alternatives_of(resources)]
    return {several: found} if several else found[0]


def _with_gpus(machine: dict[str, Any], listed: Sequence[ListPrice]) -> dict[str, Any]:
    kind = machine.get("instance_type")
    of_kind = next((one for one in listed if one.instance_type == kind), None)
    if not kind or machine.get("accelerators") or of_kind is None:
        return machine
    return {**machine, "accelerators": f"{of_kind.gpu}:{of_kind.gpus:g}"}
