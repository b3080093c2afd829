"""The basic types of the project, shared by every package.

Plain frozen data with no behaviour except parsing and printing. Events are in `events`, phase tables in `phases`,
the run's specification in `spec`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

# A completion whose node was lost continues from its tokens, or starts over with its seed.
Recovery = Literal["continue", "exact"]

_VERSION = re.compile(r"^(\d+)-(\d+)$")


@dataclass(frozen=True, slots=True, order=True)
class PolicyVersion:
    """The weights after `step` optimizer steps on `timeline`; printed `timeline-step`, as in `0-120`.

    A rollback forks a new timeline, so two versions of one step never share a name.
    """

    timeline: int
    step: int

    def __str__(self) -> str:
        return f"{self.timeline}-{self.step}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Parse the result of `str()`. Raises ValueError for other text."""
        found = _VERSION.match(text)
        if found is None:
            raise ValueError(f"not a policy version: {text!r} (expected TIMELINE-STEP, as in 0-120)")
        return cls(int(found[1]), int(found[2]))


class Role(StrEnum):
    """The purpose of a node."""

    TRAINER = "trainer"
    ROLLOUT = "rollout"


class Market(StrEnum):
    """How a machine is bought."""

    SPOT = "spot"
    ON_DEMAND = "on_demand"

    @property
    def other(self) -> Market:
        return Market.ON_DEMAND if self is Market.SPOT else Market.SPOT


class NodePhase(StrEnum):
    """The phase of a node; the legal moves are in `phases.NODE_EDGES`."""

    REQUESTED = "requested"  # journalled, not yet listed by the cloud
    BOOTING = "booting"  # the machine is up, its work has not started
    SERVING = "serving"  # a rollout node in the gateway's membership, or a trainer with a heartbeat
    DRAINING = "draining"  # finishes its requests, or stores its state, and leaves
    TERMINATING = "terminating"  # its machine is to be terminated
    GONE = "gone"  # lost or terminated; never returns under this id
    REFUSED = "refused"  # the cloud refused the machine


class RunPhase(StrEnum):
    """The phase of the run; the legal moves are in `phases.RUN_EDGES`."""

    STARTING = "starting"
    TRAINING = "training"
    PARKED = "parked"  # no rollout node is available; the trainer's machine is returned until one is
    FINISHED = "finished"  # the trainer reached its last step
    STOPPING = "stopping"  # machines are being released
    STOPPED = "stopped"
    FAILED = "failed"  # cannot continue; everything stored is kept
    PAUSED = "paused"  # waits for a person to decide, for example after a divergence
    GAVE_UP = "gave_up"  # it diverged more often than the budget of rollbacks allows


class Cause(StrEnum):
    """Why a timeline was forked."""

    DIVERGED = "diverged"
    USER = "user"
    OUT_OF_MEMORY = "out_of_memory"


class RollbackStage(StrEnum):
    """The stage that a rollback has reached; the legal moves are in `phases.ROLLBACK_EDGES`."""

    BEGUN = "begun"  # decided and journalled
    FORKED = "forked"  # the new timeline is in the store: no older trainer continues
    FENCED = "fenced"  # the old trainer's work has ended
    RESUMED = "resumed"  # a trainer trains on the new timeline
    PROBATION = "probation"  # the fleet serves it; not yet as far after the trip as the trip was after the start


class MachineState(StrEnum):
    """The state of a machine, as its cloud reports it."""

    STARTING = "starting"
    UP = "up"
    GONE = "gone"


class Refusal(StrEnum):
    """Why a machine was refused or abandoned, by what the caller can do about it."""

    NO_CAPACITY = "no_capacity"  # wait, or try another pool
    QUOTA = "quota"  # request a smaller or another machine
    CREDENTIALS = "credentials"  # only the user can fix this
    UNKNOWN = "unknown"  # try again
    NEVER_SERVED = "never_served"  # it came and never worked: see its log, or `policies.boot_timeout_s`
    SOON_BROKEN = "soon_broken"  # it served, and its work failed permanently within the hour: see its log


def kind_of(role: Role, market: Market) -> str:
    """Return `rollout on spot`: the kind of machines that can replace each other. The role implies resources."""
    return f"{role} on {'spot' if market is Market.SPOT else 'demand'}"


# Timeline, incarnation of the machine, attempt. The newer of two trainers of a run, or of their gateways, has the
# higher precedence; messages and writes of the other are ignored.
Precedence = tuple[int, int, int]


def precedence_of(timeline: int, node_id: str, attempt: int) -> Precedence:
    """Return the precedence of processes on a trainer's machine. Raises ValueError if `node_id` names no node."""
    return timeline, slot_and_incarnation(node_id)[1], attempt


def slot_of(role: Role, index: int) -> str:
    """Return `rollout-0`: the name of a slot, which incarnations of a node fill one after another."""
    return f"{role}-{index}"


def node_id_of(slot: str, incarnation: int) -> str:
    """Return `rollout-0-i2`: a machine in a slot. Deterministic, which makes launching idempotent."""
    return f"{slot}-i{incarnation}"


def member_of(node_id: str, engine: int, engines: int) -> str:
    """Return `rollout-0-i2.3`: an engine of a machine as a member. A single engine has its machine's name."""
    return node_id if engines == 1 else f"{node_id}.{engine}"


def machine_of(member: str) -> str:
    """Return a member's machine: the inverse of `member_of`."""
    return member.partition(".")[0]


def role_of(name: str) -> Role:
    """Return the role of a slot or a node. Raises ValueError for other names."""
    return Role(name.partition("-")[0])


def slot_and_incarnation(node_id: str) -> tuple[str, int]:
    """Return slot and incarnation: the inverse of `node_id_of`. Raises ValueError for other names."""
    slot, _, incarnation = node_id.rpartition("-i")
    if not slot:
        raise ValueError(f"not a node id: {node_id!r} (expected SLOT-iNUMBER, as in rollout-0-i2)")
    return slot, int(incarnation)


# An evaluation of another run's policies, stored in `run.json` of the evaluation's own run.

BASE = "base"  # the name of the base model, among checkpoints


@dataclass(frozen=True, slots=True)
class Subject:
    """A policy to evaluate. `name` is BASE, or a checkpoint's PolicyVersion as text.

    A checkpoint's `manifest` and `digest` are from the run's catalog at the start of the evaluation, so that no
    other checkpoint is evaluated in its place. `pinned`: by the evaluation, which unpins it.
    """

    name: str
    manifest: str = ""
    digest: str = ""
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Policies of the run at the store URL `of`, evaluated on the dataset's first `rows`; None: all rows."""

    of: str
    subjects: tuple[Subject, ...]
    rows: int | None = None
