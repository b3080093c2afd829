"""Load a run.yaml: return a RunSpec and notices, or report all problems of the file together.

Order: parse, expand shorthands, check keys and types, check rules between keys. Each step skips values that an
earlier step reported. Nothing is imported, started or written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from grpo_orch.orchestrator.config.datasets import check_datasets, check_rows
from grpo_orch.orchestrator.config.document import Document, read_document
from grpo_orch.orchestrator.config.foreign_keys import (
    RESOURCES,
    TABLES,
    VLLM,
    check_keys,
    check_resources,
    drop_false_switches,
)
from grpo_orch.orchestrator.config.model_size import SizeUnknown, find_config
from grpo_orch.orchestrator.config.notices import find_notices
from grpo_orch.orchestrator.config.problems import ConfigError, Findings, Problem, sort_problems
from grpo_orch.orchestrator.config.reward_functions import check_rewards
from grpo_orch.orchestrator.config.rules import (
    check_lengths,
    check_local_gpus,
    check_quantised,
    check_reference_model,
    check_staleness,
    check_turns,
    grpo_defaults,
    run_checks,
)
from grpo_orch.orchestrator.config.shorthand import (
    EXPECTED_STORE,
    Storage,
    expand,
    expand_storage,
    section_at,
)
from grpo_orch.orchestrator.config.structure import check_structure
from grpo_orch.orchestrator.config.user_code import check_shadows
from grpo_orch.policies.costs.disks import DISK_GB, OWN
from grpo_orch.policies.model.spec import RunSpec, alternatives_of, generates_itself
from grpo_orch.policies.model.vocabulary import Role
from grpo_orch.policies.weights.disk_sizes import DISK_SIZE, GB, ModelSize, disk_gb, disk_parts, gb_of

__all__ = ["ConfigError", "Loaded", "Problem", "Storage", "load", "load_spec", "load_storage"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A valid run.yaml and its notices, in line order."""

    spec: RunSpec
    notices: tuple[Problem, ...]


def load(
    path: Path,
    gpus_here: Callable[[], int] = lambda: 0,
    find_size: Callable[[RunSpec], ModelSize] | None = None,
) -> Loaded:
    """Read and check a run.yaml.

    Args:
        path: the file.
        gpus_here: counts this machine's GPUs for a run on the local cloud; may raise DriverFailed.
        find_size: returns the model's size and config.json for a run on cloud machines. Without it disks are left
            as they are, and config.json is read on this machine only. May raise SizeUnknown.

    Raises:
        ConfigError: the file is invalid; `problems` lists all problems, in line order.
    """
    document, findings, workdir = read_document(path)
    data = _check(document, workdir, findings)
    if findings.problems:
        raise ConfigError(findings.problems)
    data["grpo"] |= grpo_defaults(data, findings)
    if "agent" in data["trainer"]:  # sooner or later one of many sessions hangs
        data.setdefault("policies", {}).setdefault("on_bad_reward", "none")
    spec = msgspec.convert({**data, "workdir": str(workdir)}, RunSpec)
    size = _size_of(spec, find_size)
    config = (size.config if isinstance(size, ModelSize) else None) or find_config(spec)
    check_quantised(spec, config, findings)
    check_lengths(spec, config, findings)
    check_reference_model(spec, findings)
    check_staleness(spec, findings)
    if spec.cloud == "local":
        check_local_gpus(spec, gpus_here, findings)
    if findings.problems:
        raise ConfigError(findings.problems)
    if size is not None:
        spec = size_disks(spec, size, findings)
    find_notices(spec, config, findings)
    return Loaded(spec, tuple(sort_problems(findings.notices)))


def load_spec(path: Path) -> RunSpec:
    """Return the RunSpec of a run.yaml. Raises ConfigError, as `load` does."""
    return load(path).spec


def load_storage(path: Path) -> Storage:
    """Return only the store of a run.yaml; the rest of the file may be invalid.

    Raises:
        ConfigError: the file cannot be read, or its `storage` is missing or invalid.
    """
    document, findings, workdir = read_document(path)
    options = expand_storage(document, workdir, findings)
    problems = [problem for problem in findings.problems if problem.key.split(".")[0] == "storage"]
    if "storage" not in document.data:
        problems = [Problem(str(path), 1, "storage", f"missing; {EXPECTED_STORE}")]
    if problems:
        raise ConfigError(problems)
    return Storage(document.data["storage"], options)


def _check(document: Document, workdir: Path, findings: Findings) -> dict[str, Any]:
    """Add problems to `findings` and return the valid part of the document in RunSpec's shape."""
    expand_storage(document, workdir, findings)
    expand(document, workdir, findings)
    data = check_structure(RunSpec, document.data, (), findings)
    _check_foreign_keys(data, findings)
    run_checks(data, findings)
    check_turns(data.get("trainer", {}), workdir, findings)
    check_datasets(data.get("trainer", {}), workdir, findings)
    check_rewards(data, workdir, check_rows(data, workdir, findings), findings)
    check_shadows(workdir, findings)
    return data


def _check_foreign_keys(data: dict[str, Any], findings: Findings) -> None:
    for path, table in TABLES.items():
        check_keys(section_at(data, path), path, table(), findings)
    if flags := section_at(data, VLLM):
        data["rollout"]["vllm"] = drop_false_switches(flags)
    for path in RESOURCES:
        check_resources(section_at(data, path), path, findings)


# Disks of `cloud: sky`. Without a disk_size, the run requests what its model needs, and a notice reports it.


def _size_of(spec: RunSpec, find_size: Callable[[RunSpec], ModelSize] | None) -> ModelSize | SizeUnknown | None:
    """Return the size of a model for cloud machines; None on this machine, whose disks stay as they are."""
    if find_size is None or spec.cloud != "sky":
        return None
    try:
        return find_size(spec)
    except SizeUnknown as error:
        return error


def size_disks(spec: RunSpec, size: ModelSize | SizeUnknown, findings: Findings) -> RunSpec:
    """Return the spec with the disks that its model needs."""
    if isinstance(size, SizeUnknown):
        disk = f"machines get {DISK_SIZE} of `resources`, or SkyPilot's default of {DISK_GB} GB"
        findings.notice(("trainer", "model"), f"the model's size is unknown ({size}), so {disk}")
        return spec
    trainer, rollout = spec.trainer, spec.rollout
    resources = _with_disk(Role.TRAINER, trainer.resources, spec, size, findings)
    spec = replace(spec, trainer=replace(trainer, resources=resources))
    if generates_itself(spec):
        return spec
    resources = _with_disk(Role.ROLLOUT, rollout.resources, spec, size, findings)
    return replace(spec, rollout=replace(rollout, resources=resources))


def _with_disk(
    role: Role, resources: dict[str, Any], spec: RunSpec, size: ModelSize, findings: Findings
) -> dict[str, Any]:
    """Return the section's resources, with a disk_size if one must be requested."""
    needed_gb, disk_sizes_gb = disk_gb(role, spec, size), _disk_sizes_gb(resources)
    smallest_gb = min(disk_sizes_gb, default=DISK_GB)
    if smallest_gb >= needed_gb:
        return resources
    is_requested = not disk_sizes_gb and not _has_fixed_disk(resources)
    parts = [f"{part} {size_bytes / GB:.0f}" for part, size_bytes in disk_parts(role, spec, size).items()]
    if is_requested:
        message = f"{DISK_SIZE} is not set, so {needed_gb} GB are requested"
    elif disk_sizes_gb:
        message = f"{DISK_SIZE} is {smallest_gb} GB, but about {needed_gb} GB are needed"
    else:
        message = f"{DISK_SIZE} cannot be requested on these machines, and about {needed_gb} GB are needed"
    findings.notice((role.value, "resources", DISK_SIZE), f"{message}: {', '.join(parts)}")
    return {**resources, DISK_SIZE: needed_gb} if is_requested else resources


def _disk_sizes_gb(resources: Mapping[str, Any]) -> list[int]:
    sizes_gb = [gb_of(machine.get(DISK_SIZE)) for machine in alternatives_of(resources)]
    return [size_gb for size_gb in sizes_gb if size_gb is not None]


def _has_fixed_disk(resources: Mapping[str, Any]) -> bool:
    """Whether disks belong to existing machines; on Kubernetes a request for a larger disk fails."""
    clouds = [str(machine.get(key) or "") for machine in alternatives_of(resources) for key in ("infra", "cloud")]
    return any(cloud.lower().startswith(OWN) for cloud in clouds)
