"""The small JSON documents of a run: spec, lease, addresses, heartbeats, commands.

Each is a `Document`: `documents.LEASE.read(store)`, `documents.machine(node).write(store, report)`.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import check_schema, from_json, to_json
from grpo_orch.checkpoint.store.document import Document, UnreadableDocuments
from grpo_orch.checkpoint.store.errors import AlreadyExists, Corrupt, NotFound
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.control.rollback import RUN_START
from grpo_orch.policies.fleet.budget import BUDGET
from grpo_orch.policies.fleet.explain import Explanation
from grpo_orch.policies.ledger.rentals import ControllerRental
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.model.vocabulary import Evaluation, PolicyVersion, Precedence
from grpo_orch.policies.serving.gateway_status import GatewayStatus
from grpo_orch.policies.serving.wire import labelled_version
from grpo_orch.policies.tick.snapshot import Command, Trainer

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class RunRecord:
    """run.json, written once: by `up`, or by `eval` for an evaluation, which trains nothing.

    `created_at_s` is in seconds since the epoch.
    """

    schema: int
    run_id: str
    created_at_s: float
    spec: RunSpec
    evaluation: Evaluation | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """Which daemon controls the run. Renewed by the daemon every 2 s; stale `ttl_s` after the last renewal.

    `renewed_at_s` is the wall clock of the renewal, in seconds since the epoch; `run_time_s` the same by the clock
    of the journal entries, which never jumps.
    """

    writer: str
    host: str
    pid: int
    process_started: str  # the kernel's start time of that process, to detect a reused pid
    epoch: int
    renewed_at_s: float
    ttl_s: float
    run_time_s: float


@dataclass(frozen=True, slots=True)
class ControllersBefore:
    """The rentals of a run's terminated controller machines, oldest first."""

    rentals: tuple[ControllerRental, ...] = ()


@dataclass(frozen=True, slots=True)
class ControllerMachine:
    """The machine of a `--remote` run's daemon. The launching command writes it before and after each launch."""

    cluster: str  # its name in SkyPilot's records
    infra: str  # `cloud/region/zone`; empty until it is launched
    at_s: float  # when its last launch was requested, seconds since the epoch
    price_usd_per_h: float = 0.0  # 0: unknown; before the launch that of the cheapest offer
    before: tuple[ControllerRental, ...] = ()  # rentals until `at_s`, of this machine and of earlier ones
    refused: bool = False  # the last launch was refused and no machine exists

    @property
    def usd_per_h(self) -> float:
        """Return the current price."""
        return 0.0 if self.refused else self.price_usd_per_h

    def rentals(self, now_s: float) -> tuple[ControllerRental, ...]:
        """Return all rentals until now."""
        if self.refused:
            return self.before
        return (*self.before, ControllerRental(self.at_s, max(self.at_s, now_s), self.price_usd_per_h))


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """The address of a trainer machine's gateway. Written by the gateway at each start."""

    url: str
    boot_id: str


@dataclass(frozen=True, slots=True)
class MachineReport:
    """A machine's status. The machine writes it when its work starts or ends and when its cloud sends a notice."""

    node: str
    attempt: int  # of the node's work
    exit_code: int | None  # of that attempt; None: still running
    notice: bool  # its cloud sent a preemption notice
    rebalance_recommended: bool = False  # its cloud may preempt the machine soon
    exit_reason: str = ""  # the last output line of work that has ended; empty without output


@dataclass(frozen=True, slots=True)
class SecretMark:
    """A digest by which a machine checks that its secret is the run's. Reveals nothing about the secret.

    Written by the daemon when it starts.
    """

    digest: str


@dataclass(frozen=True, slots=True)
class Notified:
    """The last journal entry whose events were sent, by channel of `notify`. Written by the daemon."""

    sent: Mapping[str, int]


def create_run(store: Store, record: RunRecord) -> bytes:
    """Write run.json and return its bytes. Raises AlreadyExists when the store holds a run."""
    data = to_json(record)
    store.create(layout.RUN, data)
    return data


def read_run(store: Store) -> RunRecord:
    """Read run.json for display only; to act on it, use `checkpoint.security.vouched`.

    Raises what `run_bytes` and `decode_run` raise.
    """
    return decode_run(store, run_bytes(store))


def run_bytes(store: Store) -> bytes:
    """Return the bytes of run.json. Raises NotFound when there is no run at that URL."""
    try:
        return store.get(layout.RUN)
    except NotFound as error:
        raise NotFound(f"no run in {store.url}", "start one with `grpo-orch up run.yaml`") from error


def decode_run(store: Store, data: bytes) -> RunRecord:
    """Decode run.json. Raises Corrupt, also for a newer schema."""
    where = f"{store.url}/{layout.RUN}"
    record = from_json(data, RunRecord, where)
    check_schema(record.schema, SCHEMA, where)
    return record


LEASE = Document(layout.LEASE, Lease)
CONTROLLERS_BEFORE = Document(layout.CONTROLLERS_BEFORE, ControllersBefore)  # absent until the first is terminated
CONTROLLER = Document(layout.CONTROLLER, ControllerMachine)  # absent if the daemon runs on the user's machine
PLAN = Document(layout.PLAN, Explanation)
NOTIFIED = Document(layout.NOTIFIED, Notified)
SECRET_MARK = Document(layout.SECRET, SecretMark)
TRAINER = Document(layout.TRAINER, Trainer, lambda beat, _: beat.precedence)  # raises for an invalid node


def machine(node: str) -> Document[MachineReport]:
    """Return the document with the report of a machine."""
    return Document(layout.machine(node), MachineReport, _check_machine)


def gateway(by: Precedence) -> Document[GatewayAddress]:
    """Return the document with the address of the gateway next to the trainer of that precedence."""
    return Document(layout.gateway(by), GatewayAddress)


def members(by: Precedence) -> Document[GatewayStatus]:
    """Return the document with the status that this gateway reports of the rollout nodes."""
    return Document(layout.members(by), GatewayStatus, _check_members)


def command(command_id: str) -> Document[Command]:
    """Return the document of a pending command."""
    return _command_at(layout.command(command_id))


def newest_gateway(store: Store) -> Precedence | None:
    """Return the precedence of the newest trainer with a gateway, which is the run's; None before the first.

    An older gateway is ignored, however late it writes.
    """
    found = (layout.gateway_of(entry.key) for entry in store.entries(layout.GATEWAYS))
    return max((by for by in found if by is not None), default=None)


def read_gateway(store: Store) -> GatewayAddress | None:
    """Return the address of the run's gateway, or None before it is written."""
    by = newest_gateway(store)
    return None if by is None else gateway(by).read(store)


def gateway_url(store: Store) -> str:
    """Return the URL of the run's gateway. Raises NotFound before it is written, and StoreError."""
    address = read_gateway(store)
    if address is None:
        raise NotFound("the store names no gateway yet")
    return address.url


def read_members(store: Store) -> GatewayStatus | None:
    """Return the status that the run's gateway reports of the rollout nodes, or None before it is written."""
    by = newest_gateway(store)
    return None if by is None else members(by).read(store, UnreadableDocuments())


def request_stop(store: Store, node: str, attempt: int, now_s: float) -> None:
    """Request that a trainer's attempt stores its state and ends. A repeated request writes nothing."""
    if not is_stop_requested(store, node, attempt):
        store.put(layout.stop(node, attempt), to_json({"asked_at_s": now_s}))


def is_stop_requested(store: Store, node: str, attempt: int) -> bool:
    return store.get_or_none(layout.stop(node, attempt)) is not None


def send_command(
    store: Store, kind: str, now_s: float, *, start: str | None = None, changes: Mapping[str, float] | None = None
) -> Command:
    """Store a command for the run's daemon, present or future, and return it."""
    command = Command(f"{int(now_s * 1000):015d}-{secrets.token_hex(4)}", kind, start, changes or {})
    with contextlib.suppress(AlreadyExists):  # our own, after a lost response: the name is random
        store.create(layout.command(command.command_id), to_json(command))
    return command


def read_commands(
    store: Store, unreadable: UnreadableDocuments | None = None, left_out: Collection[str] = ()
) -> tuple[Command, ...]:
    """Return every pending command, oldest first; keys in `left_out` are not read."""
    keys = [entry.key for entry in store.entries(layout.COMMANDS) if entry.key not in left_out]
    commands = [_command_at(key).read(store, unreadable) for key in keys]
    return tuple(command for command in commands if command is not None)


def set_aside(store: Store, key: str) -> None:
    """Move an unreadable command out of the folder of commands. Does nothing if it is gone."""
    data = store.get_or_none(key)
    if data is not None:
        store.put(layout.aside(key), data)
        store.delete([key])


def _command_at(key: str) -> Document[Command]:
    return Document(key, Command, _check_command)


def _check_command(command: Command, key: str) -> None:
    if command.start not in (None, RUN_START):
        PolicyVersion.parse(command.start or "")
    if layout.command(command.command_id) != key:
        raise ValueError(f"the name differs from command_id {command.command_id!r}")
    if command.kind == BUDGET and not command.changes.get("usd", -1.0) >= 0:
        raise ValueError("a budget command without `usd`")


def _check_machine(report: MachineReport, key: str) -> None:
    if layout.machine(report.node) != key:
        raise ValueError(f"the name differs from node {report.node!r}")


def _check_members(status: GatewayStatus, _: str) -> None:
    for label in {
        status.policy,
        *(member.policy for member in status.members),
    }:  # few labels among thousands of members
        labelled_version(label or "0-0")


def controller_rentals(store: Store, now_s: float) -> tuple[ControllerRental, ...]:
    """Return the rentals of a `--remote` run's controller machines until now. Raises StoreError."""
    machine = CONTROLLER.read(store)
    if machine is not None:
        return machine.rentals(now_s)
    before = CONTROLLERS_BEFORE.read(store)
    return () if before is None else before.rentals


def forget_controller(store: Store, now_s: float) -> None:
    """Replace the controller machine's record by its rentals. No error if there is no record."""
    if CONTROLLER.read(store) is not None:
        CONTROLLERS_BEFORE.write(store, ControllersBefore(controller_rentals(store, now_s)))
        CONTROLLER.drop(store)


# The run's forks: one small document for each timeline that a rollback began, written once by the daemon.
#
# The document is also a fence: a trainer of an older timeline stops when it finds it.


def write_fork(store: Store, fork: Fork) -> None:
    """Begin a timeline. Idempotent, also from another controller.

    Raises Corrupt if that timeline began differently, and StoreError.
    """
    key = layout.timeline(fork.timeline)
    try:
        store.create(key, to_json(fork))
    except AlreadyExists as error:
        existing = _read_fork(store, key)
        if existing != fork:
            description = f"from {existing.start or 'the start'}, {existing.reason!r}"
            raise Corrupt(f"{key} already exists: {description}", "it differs from the fork to write") from error


def read_forks(store: Store) -> tuple[Fork, ...]:
    """Return the fork of each timeline but the first, oldest first.

    Raises StoreError, and Corrupt, also for a timeline that continues an unknown one.
    """
    forks = tuple(_read_fork(store, layout.timeline(number)) for number in _timeline_numbers(store))
    begun = {0}
    for fork in forks:
        if fork.start_at is not None and fork.start_at.timeline not in begun:
            raise Corrupt(
                f"{layout.timeline(fork.timeline)}: starts at {fork.start}, which is on no earlier timeline"
            )
        begun.add(fork.timeline)
    return forks


def newest_timeline(store: Store) -> int:
    """Return the number of the newest timeline, 0 before any rollback. One listing. Raises StoreError."""
    return max(_timeline_numbers(store), default=0)


def _timeline_numbers(store: Store) -> list[int]:
    found = (layout.number_of(entry.key) for entry in store.entries(layout.TIMELINES))
    return sorted(number for number in found if number is not None)


def _read_fork(store: Store, key: str) -> Fork:
    """Raises NotFound, Corrupt."""
    return from_json(store.get(key), Fork, key, _check_fork)


def _check_fork(fork: Fork, key: str) -> None:
    if layout.timeline(fork.timeline) != key:
        raise ValueError(f"holds timeline {fork.timeline}")
    if fork.start is not None:
        PolicyVersion.parse(fork.start)


# Rehearsed faults: one small object each, written by the daemon just before the fault, so that a report can show
# its cost.


@dataclass(frozen=True, slots=True)
class RehearsedFault:
    """A rehearsed fault. `target` is a slot, `rollouts`, `gateway`, `trainer` or `daemon`."""

    number: int  # index in run.yaml's list, from 1; faults are executed in the order of their steps
    fault: str  # kill, preempt, no_capacity
    target: str
    at_step: int
    time_s: float  # just before it was executed, seconds since the epoch
    detail: str  # for people: the exact target


def write_fault(store: Store, fault: RehearsedFault) -> None:
    """Record a fault. Recording the same number again replaces it."""
    store.put(layout.rehearsal(fault.number), to_json(fault))


def read_faults(store: Store, known: Container[int] = ()) -> list[RehearsedFault]:
    """Return the faults whose number is not in `known`, oldest first, without unreadable ones.

    Only the report needs them.
    """
    found = []
    for entry in store.entries(layout.REHEARSAL):
        number = layout.number_of(entry.key)
        if number is not None and number not in known:
            with contextlib.suppress(Corrupt):
                found.append(from_json(store.get(entry.key), RehearsedFault, entry.key))
    return sorted(found, key=lambda fault: fault.time_s)
