"""A gateway's members in words, the same for its API, the command line and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from policies.serving.wire import MembershipChange, MemberStatus


class State(StrEnum):
    """What a member is to the gateway."""

    SERVING = "serving"
    DRAINING = "draining"
    IN_DOUBT = "in doubt"  # holds what is wanted, but a request failed there, or it does not answer
    BEHIND = "behind"  # holds other weights than are wanted
    UNFIT = "unfit"  # the same, and has stopped trying


@dataclass(frozen=True, slots=True)
class Described:
    """One member. `reason` is the last thing that happened to it; empty when that is long forgotten."""

    node: str
    state: State
    reason: str
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
) -> list[Described]:
    """Describe each of them, in their order."""
    reasons: dict[str, str] = {}
    for change in changes:
        node, _, what = change.reason.partition(": ")
        reasons[node] = " ".join(what.split())
    return [
        Described(
            node=one.node,
            state=state_of(one, wanted),
            reason=f"unfit: {one.unfit}" if one.unfit else reasons.get(one.node, ""),
            policy=one.policy,
            address=one.address,
            boot_id=one.boot_id,
            requests_running=one.requests_running,
            seen_s_ago=one.seen_s_ago,
            unfit=one.unfit,
        )
        for one in members
    ]
