"""A gateway's members in the form that its API, the command line and its metrics show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from grpo_orch.policies.serving.gateway_status import MembershipChange, MemberStatus


class State(StrEnum):
    """A member's state, as the gateway sees it."""

    SERVING = "serving"
    DRAINING = "draining"
    SUSPECTED = "suspected"  # holds the wanted policy, but a request failed there, or it does not answer
    BEHIND = "behind"  # does not hold the wanted policy yet
    UNFIT = "unfit"  # cannot hold the wanted policy, and has stopped trying


@dataclass(frozen=True, slots=True)
class MemberLine:
    """One member, with a state in one word and its last change.

    Its JSON is the public format of `GET /members` and `members ls`; MemberStatus is the internal one.
    """

    node: str
    state: State
    reason: str  # the last change; empty if it is no longer recorded
    policy: str | None
    address: str
    boot_id: str
    requests_running: int
    seen_s_ago: float
    unfit: str  # why it cannot hold the wanted policy; empty if it can


def state_of(member: MemberStatus, wanted: str | None) -> State:
    """Return the member's state. `wanted` is the label of the policy that members are to hold."""
    if member.draining:
        return State.DRAINING
    if member.serving:
        return State.SERVING
    if wanted is not None and member.policy == wanted:
        return State.SUSPECTED
    return State.UNFIT if member.unfit else State.BEHIND


def describe(
    members: Sequence[MemberStatus], changes: Sequence[MembershipChange], wanted: str | None
) -> list[MemberLine]:
    """Describe the members, in their order."""
    last_changes = {node: change.description for change in changes for node in change.nodes}
    return [
        MemberLine(
            node=member.node,
            state=state_of(member, wanted),
            reason=f"unfit: {member.unfit}" if member.unfit else last_changes.get(member.node, ""),
            policy=member.policy,
            address=member.address,
            boot_id=member.boot_id,
            requests_running=member.requests_running,
            seen_s_ago=member.seen_s_ago,
            unfit=member.unfit,
        )
        for member in members
    ]
