"""A gateway's members as people are shown them, the same by its API, the command line and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from policies.serving.gateway_status import MembershipChange, MemberStatus


class State(StrEnum):
    """What a member is to the gateway."""

    SERVING = "serving"
    DRAINING = "draining"
    IN_DOUBT = "in doubt"  # holds what is wanted, but a request failed there, or it does not answer
    BEHIND = "behind"  # holds other weights than are wanted
    UNFIT = "unfit"  # the same, and has stopped trying


@dataclass(frozen=True, slots=True)
class MemberLine:
    """One member. Not a MemberStatus, for its JSON is what `GET /members` and `members ls` promise: a state in one
    word where the gateway's document has what it follows from, and the last thing that happened to the member."""

    node: str
    state: State
    reason: str  # in words; empty when it is long forgotten
    policy: str | None
    address: str
    boot_id: str
    requests_running: int
    seen_s_ago: float
    unfit: str  # why it cannot hold what is wanted; empty where it can


def state_of(member: MemberStatus, wanted: str | None) -> State:
    """`wanted`: the label that the gateway wants of its members."""
    if member.draining:
        return State.DRAINING
    if member.serving:
        return State.SERVING
    if wanted is not None and member.policy == wanted:
        return State.IN_DOUBT
    return State.UNFIT if member.unfit else State.BEHIND


def describe(
    members: Sequence[MemberStatus], changes: Sequence[MembershipChange], wanted: str | None
) -> list[MemberLine]:
    """Describe each of them, in their order."""
    last = {node: change.what for change in changes for node in change.nodes}
    return [
        MemberLine(
            node=one.node,
            state=state_of(one, wanted),
            reason=f"unfit: {one.unfit}" if one.unfit else last.get(one.node, ""),
            policy=one.policy,
            address=one.address,
            boot_id=one.boot_id,
            requests_running=one.requests_running,
            seen_s_ago=one.seen_s_ago,
            unfit=one.unfit,
        )
        for one in members
    ]
