"""SkyPilot's task for one node: resources, scripts, files, environment, and withheld credentials.

Imports no SkyPilot. Secrets are separate from the rest of the environment because SkyPilot redacts them.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources as package_data
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from grpo_orch.checkpoint.security.redaction import secret_names
from grpo_orch.checkpoint.store.run_store import OPTIONS_ENV
from grpo_orch.orchestrator.clouds.protocol import CloudRefused, LaunchOrder
from grpo_orch.policies.model.spec import ALTERNATIVES, RolloutSpec, RunSpec, TrainerSpec, datasets_of
from grpo_orch.policies.model.vocabulary import Market, Refusal, Role

REMOTE_WORKDIR = "~/sky_workdir"  # where SkyPilot puts a task's workdir
REMOTE_WHEELS = ".grpo-orch/wheels"  # below the home folder
_SECRET = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD)$")
_PLACES = ("infra", "cloud", "region", "zone")  # the last three are the older form of the first
_TRAILING_WILDCARDS = re.compile(r"(/\*)+$")  # `aws/*/*` is `aws`
_ALIASES = {"k8s": "kubernetes"}
_PODS = ("kubernetes", "ssh")  # SkyPilot runs a Kubernetes on its SSH pools
_POD_GRACE_S = 60  # terminationGracePeriodSeconds of a pod; the default is 30


@dataclass(frozen=True, slots=True)
class Work:
    """The task and the resources of a cluster of one machine."""

    setup: str  # bash
    run: str  # bash
    resources: dict[str, Any]  # SkyPilot's keys, `any_of` and `ordered` among them
    env: dict[str, str]
    secrets: dict[str, str] = field(repr=False)
    files: dict[str, str]  # path on the machine: path here
    workdir: str | None
    idle_min: int | None = None  # the machine shuts down this long after its work ended; None: never
    hooks: tuple[dict[str, Any], ...] = ()  # SkyPilot's hooks: scripts and their events


def work_for(
    order: LaunchOrder, spec: RunSpec, wheel: Path, pinned: str | None, resources: dict[str, Any] | None = None
) -> Work:
    """Return the work of one node.

    Args:
        order: the node and its environment, secrets included.
        spec: the run, of `cloud: sky`.
        wheel: this project, as `build_wheel` made it.
        pinned: the required place, as in `aws/us-east-1`; None: any that the role's resources allow.
        resources: replace the role's resources and `pinned`.

    Raises:
        CloudRefused: no candidate is in the required place, or the folder of run.yaml is not on this machine.
    """
    section: TrainerSpec | RolloutSpec = spec.trainer if order.role is Role.TRAINER else spec.rollout
    shipped = f"{REMOTE_WHEELS}/{wheel.parent.name}/{wheel.name}"
    environment = {**order.environment, "GRPO_ORCH_ROLE": order.role.value, "GRPO_ORCH_WHEEL": shipped}
    named = secret_names(environment)
    resources = resources or resources_for(section.resources, order.role, order.market, pinned)
    hidden = {name for name in environment if name in named or is_secret(name)}
    return Work(
        setup=script("setup.sh"),
        run=script("run.sh"),
        resources=resources,
        env={name: value for name, value in environment.items() if name not in hidden},
        secrets={name: value for name, value in environment.items() if name in hidden},
        files={f"~/{shipped}": str(wheel), **_named_files(order.role, spec)},
        workdir=_workdir(spec),
        idle_min=math.ceil(spec.policies.fleet.dead_man_min) or None,
        hooks=_hooks(order.node, resources),
    )


def _hooks(node: str, resources: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the preemption hook if the machine may be a pod: its work gets no other notice."""
    clouds = {_parts(place)[0] for place in places(resources) if place}
    if clouds.isdisjoint(_PODS):
        return ()
    run = f"NODE={shlex.quote(node)}\n{script('notice.sh')}"
    return ({"run": run, "events": ["preemption"], "timeout": _POD_GRACE_S},)


def is_secret(name: str) -> bool:
    """Whether the value of an environment variable of that name may be a secret."""
    return name == OPTIONS_ENV or _SECRET.search(name.upper()) is not None


def resources_for(wanted: dict[str, Any], role: Role, market: Market, pinned: str | None) -> dict[str, Any]:
    """Return SkyPilot's `resources` in `pinned`, on that market unless an entry names its own.

    Raises CloudRefused.
    """
    use_spot = {"use_spot": market is Market.SPOT}
    # An entry that names its market keeps it, as in `ordered: [spot, on demand]`.
    kept = [{**use_spot, **entry} for entry in _candidates(wanted, pinned)]
    if not kept:
        message = f"{role}.resources names no place in {pinned}, but all machines of a run are in one region"
        raise CloudRefused(Refusal.QUOTA, f"{message}; add an entry in {pinned}, or name no place")
    key = _alternatives_key(wanted)
    # Each entry has its own place now; a common one would contradict it.
    return {**_without(wanted, *_PLACES, *ALTERNATIVES), **use_spot, key: kept} if key else kept[0]


def names_markets(wanted: dict[str, Any]) -> bool:
    """Whether candidates name their own market."""
    key = _alternatives_key(wanted)
    return key is not None and any("use_spot" in entry for entry in wanted[key])


def region_of(infra: str) -> str:
    """Return `aws/us-east-1` of `aws/us-east-1/us-east-1a`. Private addresses work only within a region."""
    return "/".join(_parts(infra)[:2])


def places(wanted: dict[str, Any]) -> list[str | None]:
    """Return the place of each candidate of a role, as in `aws/us-east-1`; None: anywhere."""
    return [entry.get("infra") for entry in _candidates(wanted, None)]


def sole_region(spec: RunSpec) -> str | None:
    """Return the only region that a role allows, the trainer's first; None if both allow several."""
    for wanted in (spec.trainer.resources, spec.rollout.resources):
        regions = {region_of(entry.get("infra", "*")) for entry in _candidates(wanted, None)}
        if len(regions) == 1 and "*" not in (only := _parts(regions.pop())) and len(only) == 2:
            return "/".join(only)
    return None


def alternatives(wanted: dict[str, Any], pinned: str | None) -> list[tuple[int, dict[str, Any]]]:
    """Return each complete candidate of a role in `pinned`, with its index in `ordered` (0 in `any_of`)."""
    key = _alternatives_key(wanted)
    shared = _without(wanted, *_PLACES, *ALTERNATIVES) if key else {}
    entries = enumerate({**shared, **entry} for entry in _candidates(wanted, pinned))
    return [(index if key == "ordered" else 0, entry) for index, entry in entries]


def _candidates(wanted: dict[str, Any], pinned: str | None) -> list[dict[str, Any]]:
    """Return the entries of `any_of` or `ordered`, or `wanted` itself, narrowed to `pinned` by `infra`."""
    key = _alternatives_key(wanted)
    place = {name: value for name, value in wanted.items() if name in _PLACES}
    entries = [{**place, **entry} for entry in wanted[key]] if key else [wanted]
    return [found for entry in entries if (found := in_place(entry, pinned)) is not None]


def _alternatives_key(wanted: dict[str, Any]) -> str | None:
    return next((key for key in ALTERNATIVES if wanted.get(key)), None)


def in_place(candidate: dict[str, Any], pinned: str | None) -> dict[str, Any] | None:
    """Return the candidate with its place narrowed to `pinned`; None if it is elsewhere."""
    older_form = "/".join(str(candidate.get(name) or "*") for name in _PLACES if name != "infra")
    places = (str(candidate.get("infra") or "*"), older_form, pinned or "*")
    narrowed = []
    for parts in zip_longest(*map(_parts, places), fillvalue="*"):
        named = set(parts) - {"*"}
        if len(named) > 1:
            return None
        narrowed.append(named.pop() if named else "*")
    infra = _TRAILING_WILDCARDS.sub("", "/".join(narrowed))
    rest = _without(candidate, *_PLACES)
    return rest if infra == "*" else {**rest, "infra": infra}


def _parts(infra: str) -> list[str]:
    """Split `aws/us-east-1/us-east-1a`. After `kubernetes/` or `ssh/` follows one name, which may have slashes."""
    cloud, slash, rest = _TRAILING_WILDCARDS.sub("", infra.strip().strip("/")).partition("/")
    cloud = _ALIASES.get(cloud.lower(), cloud.lower())
    if not slash:
        return [cloud]
    return [cloud, rest] if cloud in ("kubernetes", "ssh") else [cloud, *rest.split("/")]


def _without(keys: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in keys.items() if name not in names}


def _workdir(spec: RunSpec) -> str:
    if not Path(spec.workdir).is_dir():
        message = (
            f"the folder of run.yaml, {spec.workdir}, is not on this machine, but the nodes need a copy of it"
        )
        raise CloudRefused(Refusal.CREDENTIALS, f"{message}; copy it here, or resume on the machine that has it")
    return spec.workdir


def _named_files(role: Role, spec: RunSpec) -> dict[str, str]:
    """Return the files that run.yaml names below its folder.

    SkyPilot skips files that git ignores, as models and data often are.
    """
    names = [spec.trainer.model]
    if role is Role.TRAINER:
        sections = (spec.trainer.dataset, spec.trainer.eval_dataset)
        names += [data.path for section in sections for data in datasets_of(section)]
    paths = {name: Path(spec.workdir, name) for name in names if not name.startswith("/")}
    existing = {Path(name).as_posix(): path for name, path in paths.items() if path.exists()}
    return {f"{REMOTE_WORKDIR}/{name}": str(path) for name, path in existing.items() if name != "."}


def script(name: str) -> str:
    """Return a script of `tasks/sky`."""
    return (package_data.files("grpo_orch.tasks") / "sky" / name).read_text()


# Withheld credentials: by default SkyPilot copies those of every enabled cloud to each machine.

# Clouds with a `remote_identity` setting. SkyPilot always ships the files of the others.
SETTABLE = frozenset({"aws", "azure", "gcp", "kubernetes", "nebius", "oci", "slurm", "ssh", "vast"})
_SAME_FILE = frozenset({"kubernetes", "ssh"})  # both ship the kubeconfig
_OF_STORE = {"s3": "aws", "gs": "gcp", "az": "azure"}


def unused_clouds(places: Iterable[str | None], store_url: str) -> list[str]:
    """Return the clouds that have neither machines of the run nor its store; empty if that is unknown.

    Args:
        places: where the run's machines may be, as in `aws/us-east-1`; None: anywhere.
        store_url: as in `s3://bucket/run`.
    """
    named = {(place or "*").partition("/")[0].lower() for place in places}
    store = _OF_STORE.get(urlsplit(store_url).scheme)
    if "*" in named or store is None:
        return []
    used = named | {store} | (_SAME_FILE if named & _SAME_FILE else frozenset())
    return sorted(SETTABLE - used)
