"""`load`: a run.yaml in, a RunSpec and notices out, or every problem of the file at once.

In order: parse, write out shorthands, check keys and types, then the rules between keys; each step skips what an
earlier one has reported. Nothing is imported, started or written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.config.datasets import check_datasets, check_rows
from orchestrator.config.document import Document, read_document
from orchestrator.config.foreign_keys import (
    accelerate_table,
    as_vllm_spells,
    check_keys,
    check_resources,
    grpo_table,
    lora_table,
    vllm_table,
    without_idle_switches,
)
from orchestrator.config.model_size import NotKnown
from orchestrator.config.notices import find_notices
from orchestrator.config.problems import ConfigError, Findings, KeyPath, Problem, in_order
from orchestrator.config.rewards import check_rewards
from orchestrator.config.rules import (
    check_lengths,
    check_local_gpus,
    check_quantised,
    check_staleness,
    check_turns,
    cross_check,
    grpo_defaults,
)
from orchestrator.config.shorthand import EXPECTED_STORE as EXPECTED
from orchestrator.config.shorthand import (
    Storage,
    write_out,
    write_out_deadline,
    write_out_rehearsal,
    write_out_storage,
)
from orchestrator.config.structure import check_structure
from orchestrator.config.user_code import check_shadows
from policies.model.spec import ALTERNATIVES, Replicas, RunSpec, generates_itself
from policies.model.vocabulary import Role
from policies.weights.disks import DISK_SIZE, GB, ModelSize, disk_gb, disk_parts, gb_of

__all__ = ["ConfigError", "Loaded", "Problem", "Storage", "load", "load_spec", "load_storage"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A valid run.yaml, and what its user should know before it is run; `notices` in the order of the lines."""

    spec: RunSpec
    notices: tuple[Problem, ...]


def load(
    path: Path,
    gpus_here: Callable[[], int] = lambda: 0,
    find_size: Callable[[RunSpec], ModelSize] | None = None,
    now: Callable[[], float] = time.time,
) -> Loaded:
    """Read and check a run.yaml.

    Args:
        path: the file.
        gpus_here: counts this machine's GPUs for a run on the local cloud; may raise DriverFailed.
        find_size: how large the run's model is, for the disks of its machines; these stay as they are without it.
        now: seconds since the epoch, which a deadline must be after.

    Raises:
        ConfigError: the file cannot be run; `problems` has all of it, in the order of the lines.
    """
    document, findings, workdir = read_document(path)
    data = _checked(document, workdir, now(), findings)
    if findings.problems:
        raise ConfigError(findings.problems)
    data["grpo"] |= grpo_defaults(data, findings)
    if "agent" in data["trainer"]:  # one session of many hangs sooner or later
        data.setdefault("policies", {}).setdefault("on_bad_reward", "none")
    spec = msgspec.convert({**data, "workdir": str(workdir)}, RunSpec)
    check_quantised(spec, findings)
    check_staleness(spec, findings)
    if spec.cloud == "local":
        check_local_gpus(spec, gpus_here, findings)
    if findings.problems:
        raise ConfigError(findings.problems)
    if find_size is not None:
        spec = size_disks(spec, find_size, findings)
    find_notices(spec, findings)
    return Loaded(spec, tuple(in_order(findings.notices)))


def load_spec(path: Path) -> RunSpec:
    """Return what a run.yaml says. Raises ConfigError, as `load` does."""
    return load(path).spec


def load_storage(path: Path) -> Storage:
    """Return only the store that a run.yaml names, however the rest of the file is by now.

    Raises:
        ConfigError: the file cannot be read, or names no store.
    """
    document, findings, workdir = read_document(path)
    options = write_out_storage(document, workdir, findings)
    problems = [problem for problem in findings.problems if problem.key.split(".")[0] == "storage"]
    if "storage" not in document.data:
        problems = [Problem(str(path), 1, "storage", f"names no store; {EXPECTED}")]
    if problems:
        raise ConfigError(problems)
    return Storage(document.data["storage"], options)


def _checked(document: Document, workdir: Path, now_s: float, findings: Findings) -> dict[str, Any]:
    """The valid part of the document in RunSpec's shape; what is wrong is in `findings`."""
    write_out_storage(document, workdir, findings)
    write_out(document, workdir, findings)
    write_out_rehearsal(document.data, _replicas_max(document.data), findings)
    write_out_deadline(document.data, now_s, findings)
    data = check_structure(RunSpec, document.data, (), findings)
    _check_foreign(data, findings)
    cross_check(data, findings)
    check_lengths(data, workdir, findings)
    check_turns(data.get("trainer", {}), workdir, findings)
    check_datasets(data.get("trainer", {}), workdir, findings)
    check_rewards(data, workdir, check_rows(data, workdir, findings), findings)
    check_shadows(workdir, findings)
    return data


def _check_foreign(data: dict[str, Any], findings: Findings) -> None:
    trainer, rollout = data.get("trainer", {}), data.get("rollout", {})
    for path, keys, table in (
        (("grpo",), data.get("grpo"), grpo_table()),
        (("trainer", "peft"), trainer.get("peft"), lora_table()),
        (("trainer", "accelerate"), trainer.get("accelerate"), accelerate_table()),
    ):
        check_keys(keys or {}, path, table, findings)
    for path, section in ((("trainer", "resources"), trainer), (("rollout", "resources"), rollout)):
        check_resources(section.get("resources", {}), path, findings)
    if "vllm" in rollout:
        here: KeyPath = ("rollout", "vllm")
        flags = as_vllm_spells(rollout["vllm"], here, findings)
        check_keys(flags, here, vllm_table(), findings)
        rollout["vllm"] = without_idle_switches(flags)


def _replicas_max(data: dict[str, Any]) -> int | None:
    """How many rollout nodes there can be; None where the file's value is not valid."""
    rollout = data.get("rollout")
    replicas = rollout.get("replicas") if isinstance(rollout, dict) else None
    if replicas is None:
        return Replicas().max
    most = replicas.get("max", Replicas().max) if isinstance(replicas, dict) else None
    return most if isinstance(most, int) and most >= 0 else None


# Disks of `cloud: sky`: as large as the model needs where none is named; notices tell of it.
DEFAULT_GB = 256  # SkyPilot's (0.14.1)
# There the disk is the pool's: on Kubernetes to ask for more than its machines have is to get none.
OWN_DISKS = ("kubernetes", "k8s", "ssh", "slurm")


def size_disks(spec: RunSpec, find_size: Callable[[RunSpec], ModelSize], findings: Findings) -> RunSpec:
    """Return the specification with the disks that its model needs. `find_size` raises NotKnown."""
    if spec.cloud != "sky":
        return spec
    try:
        size = find_size(spec)
    except NotKnown as error:
        kept = f"no disk is asked for beyond {DISK_SIZE} of `resources`, or SkyPilot's {DEFAULT_GB} GB"
        findings.notice(("trainer", "model"), f"its size is not known here ({error}), so {kept}")
        return spec
    trainer, rollout = spec.trainer, spec.rollout
    resources = _sized(Role.TRAINER, trainer.resources, spec, size, findings)
    spec = replace(spec, trainer=replace(trainer, resources=resources))
    if generates_itself(spec):
        return spec
    resources = _sized(Role.ROLLOUT, rollout.resources, spec, size, findings)
    return replace(spec, rollout=replace(rollout, resources=resources))


def _sized(
    role: Role, resources: dict[str, Any], spec: RunSpec, size: ModelSize, findings: Findings
) -> dict[str, Any]:
    """The section's resources, with a disk where one is to be asked for."""
    needed_gb, named = disk_gb(role, spec, size), _named_gb(resources)
    smallest_gb = min(named, default=DEFAULT_GB)
    if smallest_gb >= needed_gb:
        return resources
    asks = not named and not _has_its_own(resources)
    parts = [f"{what} {bytes_ / GB:.0f}" for what, bytes_ in disk_parts(role, spec, size).items()]
    if asks:
        said = f"no {DISK_SIZE} is named, so {needed_gb} GB are asked for"
    else:
        has = f"{DISK_SIZE} is {smallest_gb} GB" if named else f"no {DISK_SIZE} is asked for on such machines"
        said = f"{has}, and about {needed_gb} GB are needed"
    findings.notice((role.value, "resources", DISK_SIZE), f"{said}: {', '.join(parts)}")
    return {**resources, DISK_SIZE: needed_gb} if asks else resources


def _named_gb(resources: Mapping[str, Any]) -> list[int]:
    """The sizes in it, those of alternatives included."""
    nested = [one for key in ALTERNATIVES for one in resources.get(key) or () if isinstance(one, Mapping)]
    return [found for one in (resources, *nested) if (found := gb_of(one.get(DISK_SIZE))) is not None]


def _has_its_own(resources: Mapping[str, Any]) -> bool:
    nested = [one for key in ALTERNATIVES for one in resources.get(key) or () if isinstance(one, Mapping)]
    places = [str(one.get(key) or "") for one in (resources, *nested) for key in ("infra", "cloud")]
    return any(place.lower().startswith(OWN_DISKS) for place in places)
