"""The nouns of the project, shared by every room.

Plain frozen data, no behaviour beyond parsing and printing. Events are in `events`, phase tables in
`phases`, the run's specification in `spec`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

# What happens to a completion whose node was lost: it continues from its tokens, or starts over with its seed.
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
        """Read what `str()` printed. Raises ValueError for anything else."""
        found = _VERSION.match(text)
        if found is None:
            raise ValueError(f"not a policy version: {text!r} (expected TIMELINE-STEP, as in 0-120)")
        return cls(int(found[1]), int(found[2]))


class Role(StrEnum):
    """What a node is for."""

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
    """Where a node is in its life; the legal moves are in `phases.NODE_EDGES`."""

    REQUESTED = "requested"  # journalled, not yet seen at the cloud
    BOOTING = "booting"  # the machine is there, its work is not
    SERVING = "serving"  # a rollout node in the gateway's membership, or a trainer with a heartbeat
    DRAINING = "draining"  # told to leave, finishing what it holds
    TERMINATING = "terminating"  # to be taken down
    GONE = "gone"  # lost or taken down; never comes back under this id
    REFUSED = "refused"  # the cloud would not give it


class RunPhase(StrEnum):
    """Where the run is; the legal moves are in `phases.RUN_EDGES`."""

    STARTING = "starting"
    TRAINING = "training"
    PARKED = "parked"  # no rollout node can be had: the trainer's machine is returned until one can
    FINISHED = "finished"  # the trainer reached its last step
    STOPPING = "stopping"  # asked to stop, machines going down
    STOPPED = "stopped"
    FAILED = "failed"  # cannot go on; everything stored is kept
    PAUSED = "paused"  # it diverged, and run.yaml wants a person to decide
    GAVE_UP = "gave_up"  # it diverged once more than the budget of rollbacks allows


class Cause(StrEnum):
    """Why a timeline was forked."""

    DIVERGED = "diverged"
    USER = "user"
    OUT_OF_MEMORY = "out_of_memory"


class RollbackStage(StrEnum):
    """How far a rollback is, by what was last seen; the legal moves are in `phases.ROLLBACK_EDGES`."""

    BEGUN = "begun"  # decided and journalled
    FORKED = "forked"  # the new timeline is in the store: no older trainer goes on
    FENCED = "fenced"  # the old trainer's work has ended
    RESUMED = "resumed"  # a trainer trains on the new timeline
    PROBATION = "probation"  # the fleet serves it; not yet as far beyond the trip as the trip was from the start


class MachineState(StrEnum):
    """A machine as its cloud describes it."""

    STARTING = "starting"
    UP = "up"
    GONE = "gone"


class Refusal(StrEnum):
    """Why a cloud did not give a machine, by what the caller can do about it."""

    NO_CAPACITY = "no_capacity"  # wait, or look elsewhere
    QUOTA = "quota"  # ask for a smaller or another machine
    CREDENTIALS = "credentials"  # nothing helps but the user
    UNKNOWN = "unknown"  # try again
    NEVER_SERVED = "never_served"  # it came, and did no work: see its log, or `policies.boot_timeout_s`
    SOON_BROKEN = "soon_broken"  # it served, and its work failed for good within the hour: see its log


def kind_of(role: Role, market: Market) -> str:
    """`rollout on spot`: the kind of machines that can replace each other. Resources follow from the role."""
    return f"{role} on {'spot' if market is Market.SPOT else 'demand'}"


# Timeline, incarnation of the machine, attempt. Of two trainers of a run, or of the gateways beside them, the one
# with the higher precedence is the newer, and whatever the other still says or writes is ignored.
Precedence = tuple[int, int, int]


def precedence_of(timeline: int, node_id: str, attempt: int) -> Precedence:
    """The precedence of what works on a trainer's machine. Raises ValueError unless `node_id` names a node."""
    return timeline, slot_and_incarnation(node_id)[1], attempt


def slot_of(role: Role, index: int) -> str:
    """`rollout-0`: the place that incarnations of a node fill one after another."""
    return f"{role}-{index}"


def node_id_of(slot: str, incarnation: int) -> str:
    """`rollout-0-i2`: one machine in one slot. Deterministic, so that launching twice is launching once."""
    return f"{slot}-i{incarnation}"


def member_of(node_id: str, engine: int, engines: int) -> str:
    """`rollout-0-i2.3`: one of a machine's engines as a member; the only one has its machine's name."""
    return node_id if engines == 1 else f"{node_id}.{engine}"


def machine_of(member: str) -> str:
    """The machine that a member works on: the inverse of `member_of`."""
    return member.partition(".")[0]


def role_of(name: str) -> Role:
    """The role of a slot or a node. Raises ValueError for another name."""
    return Role(name.partition("-")[0])


def slot_and_incarnation(node_id: str) -> tuple[str, int]:
    """The inverse of `node_id_of`. Raises ValueError for another name."""
    slot, _, incarnation = node_id.rpartition("-i")
    if not slot:
        raise ValueError(f"not a node id: {node_id!r} (expected SLOT-iNUMBER, as in rollout-0-i2)")
    return slot, int(incarnation)


# What an evaluation is of: the policies of another run. `run.json` of an evaluation's own run holds it.

BASE = "base"  # the name of the model that training began from, among checkpoints


@dataclass(frozen=True, slots=True)
class Subject:
    """One policy. `name` is BASE, or a checkpoint's PolicyVersion as text.

    Of a checkpoint `manifest` and `digest` are what the run's catalog said when the evaluation was begun: nothing
    else is evaluated in its place. `pinned`: by the evaluation, which unpins it.
    """

    name: str
    manifest: str = ""
    digest: str = ""
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Which policies of the run at the store URL `of`; of the dataset the first `rows`, None: all."""

    of: str
    subjects: tuple[Subject, ...]
    rows: int | None = None
