"""The small documents of a run that are rewritten in place: spec, lease, addresses, heartbeats, commands."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from checkpoint import layout
from checkpoint.codec import from_json, to_json
from checkpoint.errors import AlreadyExists, Corrupt, NotFound
from checkpoint.store import Store
from policies.snapshot import Command, Trainer
from policies.spec import RunSpec
from policies.wire import GatewayStatus

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class RunRecord:
    """run.json: written once at `up`."""

    schema: int
    run_id: str
    created_at_s: float
    spec: RunSpec


@dataclass(frozen=True, slots=True)
class Lease:
    """Who steers the run. Stale after `ttl_s` without renewal."""

    writer: str
    host: str
    pid: int
    pid_started: str  # the kernel's start time of that pid, so that a reused pid is not taken for it
    epoch: int
    renewed_at_s: float
    ttl_s: float


@dataclass(frozen=True, slots=True)
class ControllerMachine:
    """The machine that the run's daemon lives on, of a run that is `--remote`. Written before it is launched."""

    cluster: str  # its name in SkyPilot's records
    infra: str  # `cloud/region/zone`; empty while it was not launched
    at_s: float


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """Where the gateway listens, written by the gateway itself at each start."""

    url: str
    boot_id: str


@dataclass(frozen=True, slots=True)
class MachineReport:
    """What a machine says of itself: when its work starts, at a preemption notice, when the work has ended."""

    node: str
    attempt: int  # which run of the node's work this is about
    exit_code: int | None  # of that attempt's work; None: it runs
    notice: bool  # its cloud has said that it will take the machine back
    address: str  # where the run's other machines reach it
    zone: str  # in its cloud's words; empty while nobody has told
    boot_id: str  # the kernel's, another one after each boot
    at_s: float  # by this machine's own clock


@dataclass(frozen=True, slots=True)
class SecretMark:
    """By which a machine knows whether it has the secret that the run's machines hold. It tells nothing of it."""

    digest: str


def create_run(store: Store, record: RunRecord) -> None:
    """Raises AlreadyExists when the store holds a run."""
    store.create(layout.RUN, to_json(record))


def read_run(store: Store) -> RunRecord:
    """Raises NotFound when there is no run at that URL, Corrupt for one of a newer schema."""
    try:
        data = store.get(layout.RUN)
    except NotFound as error:
        raise NotFound(f"no run in {store.url}", "start one with `grpo-orch up run.yaml`") from error
    record = from_json(data, RunRecord, f"{store.url}/{layout.RUN}")
    if record.schema > SCHEMA:
        raise Corrupt(f"{store.url}: run of schema {record.schema}", f"this grpo-orch reads up to {SCHEMA}")
    return record


def write_lease(store: Store, lease: Lease) -> None:
    store.put(layout.LEASE, to_json(lease))


def read_lease(store: Store) -> Lease | None:
    data = store.get_or_none(layout.LEASE)
    return None if data is None else from_json(data, Lease, layout.LEASE)


def drop_lease(store: Store) -> None:
    store.delete([layout.LEASE])


def write_controller(store: Store, machine: ControllerMachine) -> None:
    store.put(layout.CONTROLLER, to_json(machine))


def read_controller(store: Store) -> ControllerMachine | None:
    """The machine of the run's daemon, or None where a daemon is started on the user's own machine."""
    data = store.get_or_none(layout.CONTROLLER)
    return None if data is None else from_json(data, ControllerMachine, layout.CONTROLLER)


def drop_controller(store: Store) -> None:
    store.delete([layout.CONTROLLER])


def write_secret_mark(store: Store, mark: SecretMark) -> None:
    store.put(layout.SECRET, to_json(mark))


def read_secret_mark(store: Store) -> SecretMark | None:
    data = store.get_or_none(layout.SECRET)
    return None if data is None else from_json(data, SecretMark, layout.SECRET)


def write_gateway(store: Store, address: GatewayAddress) -> None:
    store.put(layout.GATEWAY, to_json(address))


def read_gateway(store: Store) -> GatewayAddress | None:
    data = store.get_or_none(layout.GATEWAY)
    return None if data is None else from_json(data, GatewayAddress, layout.GATEWAY)


def write_members(store: Store, status: GatewayStatus) -> None:
    store.put(layout.MEMBERS, to_json(status))


def read_members(store: Store) -> GatewayStatus | None:
    data = store.get_or_none(layout.MEMBERS)
    return None if data is None else from_json(data, GatewayStatus, layout.MEMBERS)


def write_machine(store: Store, report: MachineReport) -> None:
    store.put(layout.machine(report.node), to_json(report))


def read_machine(store: Store, node: str) -> MachineReport | None:
    """What the machine has last said, or None while it has said nothing."""
    key = layout.machine(node)
    data = store.get_or_none(key)
    return None if data is None else from_json(data, MachineReport, key)


def drop_machine(store: Store, node: str) -> None:
    store.delete([layout.machine(node)])


def write_trainer(store: Store, beat: Trainer) -> None:
    store.put(layout.TRAINER, to_json(beat))


def read_trainer(store: Store) -> Trainer | None:
    data = store.get_or_none(layout.TRAINER)
    return None if data is None else from_json(data, Trainer, layout.TRAINER)


def send_command(
    store: Store, kind: str, now_s: float, *, start: str | None = None, changes: Mapping[str, float] | None = None
) -> Command:
    """Leave a command for whoever steers the run, now or later."""
    command = Command(f"{int(now_s * 1000):015d}-{secrets.token_hex(4)}", kind, start, changes or {})
    with contextlib.suppress(AlreadyExists):  # our own, after a lost answer: the name is random
        store.create(layout.command(command.command_id), to_json(command))
    return command


def read_commands(store: Store) -> tuple[Command, ...]:
    """Every command that was not dropped yet, oldest first."""
    return tuple(from_json(store.get(e.key), Command, e.key) for e in store.entries(layout.COMMANDS))


def drop_command(store: Store, command_id: str) -> None:
    store.delete([layout.command(command_id)])
