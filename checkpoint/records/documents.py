"""The small documents of a run that are rewritten in place: spec, lease, addresses, heartbeats, commands.

Those that are optional are read with `unreadable`: what is damaged is noted there and counts as not there. Without
it, and for all others, it raises Corrupt.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from checkpoint.store import layout
from checkpoint.store.codec import from_json, to_json
from checkpoint.store.errors import AlreadyExists, Corrupt, NotFound
from checkpoint.store.run_store import Store
from checkpoint.store.unreadable import Unreadable
from policies.control.rollback_stages import RUN_START
from policies.control.snapshot import Command, Trainer
from policies.model.spec import RunSpec
from policies.model.vocabulary import PolicyVersion, Precedence
from policies.serving.wire import GatewayStatus, labelled_version

SCHEMA = 1

T = TypeVar("T")


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
    """Where a trainer machine's gateway listens, written by the gateway itself at each start."""

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


def create_run(store: Store, record: RunRecord) -> bytes:
    """Return run.json as it was written. Raises AlreadyExists when the store holds a run."""
    data = to_json(record)
    store.create(layout.RUN, data)
    return data


def read_run(store: Store) -> RunRecord:
    """To look at: who acts on it reads it with `vouched`. Raises what `run_bytes` and `decode_run` raise."""
    return decode_run(store, run_bytes(store))


def run_bytes(store: Store) -> bytes:
    """run.json as it is in the store. Raises NotFound when there is no run at that URL."""
    try:
        return store.get(layout.RUN)
    except NotFound as error:
        raise NotFound(f"no run in {store.url}", "start one with `grpo-orch up run.yaml`") from error


def decode_run(store: Store, data: bytes) -> RunRecord:
    """Read run.json's bytes. Raises Corrupt, for one of a newer schema, too."""
    record = from_json(data, RunRecord, f"{store.url}/{layout.RUN}")
    if record.schema > SCHEMA:
        raise Corrupt(f"{store.url}: run of schema {record.schema}", f"this grpo-orch reads up to {SCHEMA}")
    return record


def write_lease(store: Store, lease: Lease) -> None:
    store.put(layout.LEASE, to_json(lease))


def read_lease(store: Store, unreadable: Unreadable | None = None) -> Lease | None:
    return _read(store, layout.LEASE, Lease, unreadable)


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


def write_gateway(store: Store, by: Precedence, address: GatewayAddress) -> None:
    """Say where the gateway beside the trainer of that precedence listens."""
    store.put(layout.gateway(by), to_json(address))


def newest_gateway(store: Store) -> Precedence | None:
    """Whose gateway is the run's: an older one, however late it writes, is not. None where none has a name."""
    found = (layout.gateway_of(entry.key) for entry in store.entries(layout.GATEWAYS))
    return max((by for by in found if by is not None), default=None)


def read_gateway(store: Store) -> GatewayAddress | None:
    return gateway_at(store, newest_gateway(store))


def gateway_at(store: Store, by: Precedence | None, unreadable: Unreadable | None = None) -> GatewayAddress | None:
    """What the gateway of that precedence has said; with None, of a run that began before they had names."""
    key = layout.OLD_GATEWAY if by is None else layout.gateway(by)
    return _read(store, key, GatewayAddress, unreadable)


def write_members(store: Store, by: Precedence, status: GatewayStatus) -> None:
    store.put(layout.members(by), to_json(status))


def read_members(store: Store) -> GatewayStatus | None:
    """What the run's gateway knows of its members, or None while it has said nothing."""
    return members_at(store, newest_gateway(store))


def members_at(store: Store, by: Precedence | None, unreadable: Unreadable | None = None) -> GatewayStatus | None:
    """As `gateway_at`, for its members."""
    key = layout.OLD_MEMBERS if by is None else layout.members(by)
    return _read(store, key, GatewayStatus, unreadable)


def write_machine(store: Store, report: MachineReport) -> None:
    store.put(layout.machine(report.node), to_json(report))


def read_machine(store: Store, node: str, unreadable: Unreadable | None = None) -> MachineReport | None:
    """What the machine has last said, or None while it has said nothing."""
    return _read(store, layout.machine(node), MachineReport, unreadable)


def drop_machine(store: Store, node: str) -> None:
    store.delete([layout.machine(node)])


def write_trainer(store: Store, beat: Trainer) -> None:
    store.put(layout.TRAINER, to_json(beat))


def read_trainer(store: Store, unreadable: Unreadable | None = None) -> Trainer | None:
    return _read(store, layout.TRAINER, Trainer, unreadable)


def ask_to_stop(store: Store, node: str, attempt: int, now_s: float) -> None:
    """Ask a trainer's attempt to store what it has, and to end; asked again, nothing is written."""
    if not is_asked_to_stop(store, node, attempt):
        store.put(layout.stop(node, attempt), to_json({"asked_at_s": now_s}))


def is_asked_to_stop(store: Store, node: str, attempt: int) -> bool:
    return store.get_or_none(layout.stop(node, attempt)) is not None


def send_command(
    store: Store, kind: str, now_s: float, *, start: str | None = None, changes: Mapping[str, float] | None = None
) -> Command:
    """Leave a command for whoever steers the run, now or later."""
    command = Command(f"{int(now_s * 1000):015d}-{secrets.token_hex(4)}", kind, start, changes or {})
    with contextlib.suppress(AlreadyExists):  # our own, after a lost answer: the name is random
        store.create(layout.command(command.command_id), to_json(command))
    return command


def read_commands(
    store: Store, unreadable: Unreadable | None = None, left_out: Collection[str] = ()
) -> tuple[Command, ...]:
    """Every command that was not dropped yet, oldest first; objects in `left_out` are not looked at."""
    keys = [entry.key for entry in store.entries(layout.COMMANDS) if entry.key not in left_out]
    found = [_read(store, key, Command, unreadable) for key in keys]
    return tuple(command for command in found if command is not None)


def drop_command(store: Store, command_id: str) -> None:
    store.delete([layout.command(command_id)])


def set_aside(store: Store, key: str) -> None:
    """Move a command that cannot be read to where nobody looks for one. Nothing happens if it is gone."""
    data = store.get_or_none(key)
    if data is not None:
        store.put(layout.aside(key), data)
        store.delete([key])


def _read(store: Store, key: str, cls: type[T], unreadable: Unreadable | None = None) -> T | None:
    """The document, or None where there is none. Raises Corrupt where nobody takes note of it."""
    data = store.get_or_none(key)
    if data is None:
        return None
    try:
        document = from_json(data, cls, key)
        _check(document, key)
    except Corrupt as error:
        if unreadable is None:
            raise
        unreadable.note(key, error)
        return None
    return document


def _check(document: object, key: str) -> None:
    """Raise Corrupt for what has the right types and still is not what its reader can work with."""
    try:
        match document:
            case Command():
                if document.start not in (None, RUN_START):
                    PolicyVersion.parse(document.start or "")
                if layout.command(document.command_id) != key:
                    raise ValueError(f"command {document.command_id!r} under another one's name")
            case Trainer():
                _ = document.precedence
            case GatewayStatus():
                for label in [document.policy, *(member.policy for member in document.members)]:
                    labelled_version(label or "0-0")
            case MachineReport():
                if layout.machine(document.node) != key:
                    raise ValueError(f"a report of {document.node!r} under another one's name")
    except ValueError as error:
        raise Corrupt(f"{key}: {error}", "it was not written by this version of grpo-orch") from error
