"""The small documents of a run that are rewritten in place: spec, lease, addresses, heartbeats, commands.

Each is one `Document`: `documents.LEASE.read(store)`, `documents.machine(node).write(store, report)`.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass

from checkpoint.store import layout
from checkpoint.store.codec import check_schema, from_json, to_json
from checkpoint.store.document import Document, OptionalDocument, Unreadable
from checkpoint.store.errors import AlreadyExists, Corrupt, NotFound
from checkpoint.store.run_store import Store
from policies.control.rollback.begin import RUN_START
from policies.fleet.budget import BUDGET
from policies.fleet.explain import Explanation
from policies.ledger.rentals import ControllerRental
from policies.model.spec import RunSpec
from policies.model.timelines import Fork
from policies.model.vocabulary import Evaluation, PolicyVersion, Precedence
from policies.serving.gateway_status import GatewayStatus
from policies.serving.wire import labelled_version
from policies.tick.snapshot import Command, Trainer

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class RunRecord:
    """run.json: written once at `up`, or at `eval`: then the run trains nothing."""

    schema: int
    run_id: str
    created_at_s: float
    spec: RunSpec
    evaluation: Evaluation | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """Who steers the run. Stale after `ttl_s` without renewal. `run_time_s`: the renewal by the clock of the
    holder's journal entries, which is never set."""

    writer: str
    host: str
    pid: int
    pid_started: str  # the kernel's start time of that pid, so that a reused pid is not taken for it
    epoch: int
    renewed_at_s: float
    ttl_s: float
    run_time_s: float


@dataclass(frozen=True, slots=True)
class ControllersBefore:
    """The stays of a run's controller machines that are over, oldest first."""

    stays: tuple[ControllerRental, ...] = ()


@dataclass(frozen=True, slots=True)
class ControllerMachine:
    """The machine of a `--remote` run's daemon. Written before it is launched."""

    cluster: str  # its name in SkyPilot's records
    infra: str  # `cloud/region/zone`; empty until it is launched
    at_s: float  # when its last launch was asked for
    price_usd_per_h: float = 0.0  # 0: not known; until it is launched the price of what it could be
    before: tuple[ControllerRental, ...] = ()  # its stays until then, and those of machines before it
    refused: bool = False  # its last launch was, and no machine is there

    @property
    def usd_per_h(self) -> float:
        """What it costs now."""
        return 0.0 if self.refused else self.price_usd_per_h

    def stays(self, now_s: float) -> tuple[ControllerRental, ...]:
        """All of them, until now."""
        if self.refused:
            return self.before
        return (*self.before, ControllerRental(self.at_s, max(self.at_s, now_s), self.price_usd_per_h))


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """Where a trainer machine's gateway listens, written by the gateway itself at each start."""

    url: str
    boot_id: str


@dataclass(frozen=True, slots=True)
class MachineReport:
    """What a machine says of itself: when its work starts, at what its cloud tells it, when the work has ended."""

    node: str
    attempt: int  # which run of the node's work this is about
    exit_code: int | None  # of that attempt's work; None: it runs
    notice: bool  # its cloud has announced that it will take the machine back
    rebalance_recommended: bool = False  # by its cloud: it may preempt the machine soon
    exit_reason: str = ""  # the last line of work that has ended; empty where it left none


@dataclass(frozen=True, slots=True)
class SecretMark:
    """By it a machine knows whether its secret is the run's. It reveals nothing about the secret."""

    digest: str


@dataclass(frozen=True, slots=True)
class Notified:
    """Up to which journal entry each channel of `notify` was told everything."""

    told: Mapping[str, int]


def create_run(store: Store, record: RunRecord) -> bytes:
    """Return run.json as it was written. Raises AlreadyExists when the store holds a run."""
    data = to_json(record)
    store.create(layout.RUN, data)
    return data


def read_run(store: Store) -> RunRecord:
    """For display; `checkpoint.security.vouched` reads it to act on. Raises what `run_bytes` and `decode_run`
    raise."""
    return decode_run(store, run_bytes(store))


def run_bytes(store: Store) -> bytes:
    """run.json as it is in the store. Raises NotFound when there is no run at that URL."""
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


LEASE = OptionalDocument(layout.LEASE, Lease)
CONTROLLERS_BEFORE = Document(layout.CONTROLLERS_BEFORE, ControllersBefore)  # absent before the first is gone
CONTROLLER = Document(layout.CONTROLLER, ControllerMachine)  # absent where the daemon runs on the user's machine
PLAN = OptionalDocument(layout.PLAN, Explanation)
NOTIFIED = OptionalDocument(layout.NOTIFIED, Notified)
SECRET_MARK = Document(layout.SECRET, SecretMark)
TRAINER = OptionalDocument(layout.TRAINER, Trainer, lambda beat, _: beat.precedence)  # which parses its node


def machine(node: str) -> OptionalDocument[MachineReport]:
    """What that machine last said of itself."""
    return OptionalDocument(layout.machine(node), MachineReport, _check_machine)


def gateway(by: Precedence) -> OptionalDocument[GatewayAddress]:
    """Where the gateway beside the trainer of that precedence listens."""
    return OptionalDocument(layout.gateway(by), GatewayAddress)


def members(by: Precedence) -> OptionalDocument[GatewayStatus]:
    """What that gateway knows of the rollout nodes."""
    return OptionalDocument(layout.members(by), GatewayStatus, _check_members)


def command(command_id: str) -> OptionalDocument[Command]:
    """A command that was sent and not yet dropped."""
    return _command_at(layout.command(command_id))


def newest_gateway(store: Store) -> Precedence | None:
    """Whose gateway is the run's: an older one, however late it writes, is not. None before the first."""
    found = (layout.gateway_of(entry.key) for entry in store.entries(layout.GATEWAYS))
    return max((by for by in found if by is not None), default=None)


def read_gateway(store: Store) -> GatewayAddress | None:
    """Where the run's gateway listens, or None while it has not said so."""
    by = newest_gateway(store)
    return None if by is None else gateway(by).read(store)


def read_members(store: Store) -> GatewayStatus | None:
    """What the run's gateway knows of the rollout nodes, or None while it has not written it."""
    by = newest_gateway(store)
    return None if by is None else members(by).read(store, Unreadable())


def ask_to_stop(store: Store, node: str, attempt: int, now_s: float) -> None:
    """Ask a trainer's attempt to store what it has and end; asking again writes nothing."""
    if not is_asked_to_stop(store, node, attempt):
        store.put(layout.stop(node, attempt), to_json({"asked_at_s": now_s}))


def is_asked_to_stop(store: Store, node: str, attempt: int) -> bool:
    return store.get_or_none(layout.stop(node, attempt)) is not None


def send_command(
    store: Store, kind: str, now_s: float, *, start: str | None = None, changes: Mapping[str, float] | None = None
) -> Command:
    """Leave a command for whoever steers the run, now or later."""
    sent = Command(f"{int(now_s * 1000):015d}-{secrets.token_hex(4)}", kind, start, changes or {})
    with contextlib.suppress(AlreadyExists):  # our own, after a lost answer: the name is random
        store.create(layout.command(sent.command_id), to_json(sent))
    return sent


def read_commands(
    store: Store, unreadable: Unreadable | None = None, left_out: Collection[str] = ()
) -> tuple[Command, ...]:
    """Every command not dropped yet, oldest first; keys in `left_out` are not read."""
    keys = [entry.key for entry in store.entries(layout.COMMANDS) if entry.key not in left_out]
    found = [_command_at(key).read(store, unreadable) for key in keys]
    return tuple(sent for sent in found if sent is not None)


def set_aside(store: Store, key: str) -> None:
    """Move a command that cannot be read to where nobody looks for one. Nothing happens if it is gone."""
    data = store.get_or_none(key)
    if data is not None:
        store.put(layout.aside(key), data)
        store.delete([key])


def _command_at(key: str) -> OptionalDocument[Command]:
    return OptionalDocument(key, Command, _check_command)


def _check_command(command: Command, key: str) -> None:
    if command.start not in (None, RUN_START):
        PolicyVersion.parse(command.start or "")
    if layout.command(command.command_id) != key:
        raise ValueError(f"command {command.command_id!r} under another one's name")
    if command.kind == BUDGET and not command.changes.get("usd", -1.0) >= 0:
        raise ValueError("a command for a budget without one")


def _check_machine(report: MachineReport, key: str) -> None:
    if layout.machine(report.node) != key:
        raise ValueError(f"a report of {report.node!r} under another one's name")


def _check_members(status: GatewayStatus, _: str) -> None:
    for label in {status.policy, *(member.policy for member in status.members)}:  # few, of thousands of members
        labelled_version(label or "0-0")


def controller_stays(store: Store, now_s: float) -> tuple[ControllerRental, ...]:
    """Return from when until when a `--remote` run has had controller machines, and at what price. Raises
    StoreError."""
    machine = CONTROLLER.read(store)
    if machine is not None:
        return machine.stays(now_s)
    before = CONTROLLERS_BEFORE.read(store)
    return () if before is None else before.stays


def forget_controller(store: Store, now_s: float) -> None:
    """Note that the controller machine is gone, and what it has cost. No error when there is none."""
    if CONTROLLER.read(store) is not None:
        CONTROLLERS_BEFORE.write(store, ControllersBefore(controller_stays(store, now_s)))
        CONTROLLER.drop(store)


# The run's forks in the store: one small document for each timeline that a rollback began, written once.
#
# The document is also a fence: once it is written the run goes on from there, and a trainer of an older timeline
# stops when it sees it.


def write_fork(store: Store, fork: Fork) -> None:
    """Begin a timeline. Writing the same fork again, after a lost answer or by another controller, changes
    nothing.

    Raises Corrupt if that timeline has begun differently, StoreError.
    """
    key = layout.timeline(fork.timeline)
    try:
        store.create(key, to_json(fork))
    except AlreadyExists as error:
        there = _read_fork(store, key)
        if there != fork:
            was = f"from {there.start or 'the start'}, {there.reason!r}"
            raise Corrupt(f"{key} exists: {was}", "another fork was to be written") from error


def read_forks(store: Store) -> tuple[Fork, ...]:
    """Return how each timeline but the first began, oldest first.

    Raises Corrupt, also for a timeline that goes on from one that never began, StoreError.
    """
    forks = tuple(_read_fork(store, layout.timeline(number)) for number in _timeline_numbers(store))
    begun = {0}
    for fork in forks:
        if fork.start_at is not None and fork.start_at.timeline not in begun:
            raise Corrupt(f"{layout.timeline(fork.timeline)}: begins at {fork.start}, on no earlier timeline")
        begun.add(fork.timeline)
    return forks


def newest_timeline(store: Store) -> int:
    """Return the number of the newest timeline, 0 before any rollback. One listing. Raises StoreError."""
    return max(_timeline_numbers(store), default=0)


def _timeline_numbers(store: Store) -> list[int]:
    found = (layout.timeline_of(entry.key) for entry in store.entries(layout.TIMELINES))
    return sorted(number for number in found if number is not None)


def _read_fork(store: Store, key: str) -> Fork:
    """Raises NotFound, Corrupt."""
    return from_json(store.get(key), Fork, key, _check_fork)


def _check_fork(fork: Fork, key: str) -> None:
    if layout.timeline(fork.timeline) != key:
        raise ValueError(f"holds timeline {fork.timeline}")
    if fork.start is not None:
        PolicyVersion.parse(fork.start)


# What the rehearsal did, and when: one small object per fault, so that a report can say what each one cost.


@dataclass(frozen=True, slots=True)
class RehearsedFault:
    """One fault as it was done. `target` is a slot, `rollouts`, `gateway`, `trainer` or `daemon`."""

    number: int  # place in run.yaml's list, from 1; the order in which they are done is that of their steps
    fault: str  # kill, preempt, no_capacity
    target: str
    at_step: int
    time_s: float  # just before it was done, seconds since the epoch
    detail: str  # for people: what exactly was hit


def write_fault(store: Store, fault: RehearsedFault) -> None:
    """Record a fault. Recording the same number again replaces it."""
    store.put(layout.rehearsal(fault.number), to_json(fault))


def read_faults(store: Store, known: Container[int] = ()) -> list[RehearsedFault]:
    """Return the faults whose number is not in `known`, in the order in which they were done. Unreadable ones are
    left out: only the report needs them."""
    found = []
    for entry in store.entries(layout.REHEARSAL):
        number = layout.rehearsal_of(entry.key)
        if number is not None and number not in known:
            with contextlib.suppress(Corrupt):
                found.append(from_json(store.get(entry.key), RehearsedFault, entry.key))
    return sorted(found, key=lambda fault: fault.time_s)
