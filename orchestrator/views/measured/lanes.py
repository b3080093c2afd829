"""The state of each slot of the fleet over the last hour, from the journal; the gateway adds what a member
does now: it loads a policy, is idle or serves.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from policies.model.vocabulary import NodePhase, Role
from policies.serving.gateway_status import MemberStatus

LANE_S = 3600.0
SPAN_LEAST_S = 300.0
MINUTE_S = 60.0


class LaneState(StrEnum):
    """A node's phase; for a gone node whether it was returned or lost. LOADING and IDLE are states of now only."""

    REQUESTED = "requested"
    BOOTING = "booting"
    LOADING = "loading"  # a member without the wanted policy
    SERVING = "serving"
    IDLE = "idle"  # a member without requests
    DRAINING = "draining"
    TERMINATING = "terminating"
    LOST = "lost"
    REFUSED = "refused"
    GONE = "gone"  # taken down


AT_WORK = (LaneState.SERVING, LaneState.IDLE)
FAILED = (LaneState.LOST, LaneState.REFUSED)


@dataclass(frozen=True, slots=True)
class Stretch:
    """From `since_s`, seconds since the epoch, up to the next one, or to now."""

    since_s: float
    state: LaneState


def phase_state(phase: NodePhase, before: NodePhase | None) -> LaneState:
    """What a move of a node means; `before` is where it came from."""
    if phase is NodePhase.GONE:
        return LaneState.GONE if before is NodePhase.TERMINATING else LaneState.LOST
    return LaneState(phase)


def state_now(told: LaneState, role: Role, members: Sequence[MemberStatus]) -> LaneState:
    """Return the journalled state, or what the gateway knows of a serving node's engines."""
    staying = [member for member in members if not member.draining]
    if told is not LaneState.SERVING or role is Role.TRAINER or not staying:
        return told
    serving = [member for member in staying if member.serving]
    if not serving:
        return LaneState.LOADING
    return LaneState.SERVING if any(member.requests_running for member in serving) else LaneState.IDLE


class Lanes:
    """The stretches of every slot, as far as they are known."""

    def __init__(self) -> None:
        self._stretches = defaultdict[str, list[Stretch]](list)

    def told(self, slot: str, state: LaneState, since_s: float) -> None:
        """Add what the journal records."""
        stretches = self._stretches[slot]
        if stretches and stretches[-1].state is state:
            return
        # Another daemon's clock may be behind.
        stretches.append(Stretch(max(since_s, stretches[-1].since_s) if stretches else since_s, state))

    def look(
        self, slot: str, role: Role, members: Sequence[MemberStatus], now_s: float
    ) -> tuple[LaneState, tuple[Stretch, ...]]:
        """Return the slot's state now, and its stretches of the last hour, the newest last."""
        stretches = self._stretches[slot]
        state = state_now(stretches[-1].state, role, members)
        ended = bisect_right(stretches, now_s - LANE_S, key=lambda one: one.since_s) - 1
        del stretches[: max(0, ended)]
        return state, tuple(stretches)


def cells(
    lane: Sequence[Stretch], now: LaneState, now_s: float, count: int, span_s: float = LANE_S
) -> list[LaneState | None]:
    """Divide the last `span_s` into `count` equal cells, the newest last; None where no machine was there.

    A cell in which a machine was lost or refused shows that, another one its longest state, the last one `now`.
    """
    width_s, first_s = span_s / count, now_s - span_s
    lengths = [defaultdict[LaneState, float](float) for _ in range(count)]
    for place, one in enumerate(lane):
        end_s = lane[place + 1].since_s if place + 1 < len(lane) else now_s
        low_s, high_s = max(one.since_s, first_s), min(end_s, now_s)
        at = min(count - 1, int((low_s - first_s) / width_s))
        if one.state in FAILED and low_s <= high_s:  # however short it was
            lengths[at][one.state] += 2 * LANE_S
        while low_s < high_s and at < count:
            part_s = min(high_s, first_s + (at + 1) * width_s)
            lengths[at][one.state] += max(0.0, part_s - low_s)
            low_s, at = max(low_s, part_s), at + 1
    found = [max(one, key=lambda state: one[state]) if one else None for one in lengths]
    if found[-1] not in FAILED:
        found[-1] = now
    return [None if state is LaneState.GONE else state for state in found]


def span_of(lanes: Iterable[Sequence[Stretch]], now_s: float) -> float:
    """How much of the last hour there is something to see of: whole minutes, at least SPAN_LEAST_S."""
    begun_s = min((lane[0].since_s for lane in lanes if lane), default=now_s)
    return min(LANE_S, max(SPAN_LEAST_S, MINUTE_S * math.ceil((now_s - begun_s) / MINUTE_S)))


def shares_at_work(
    lanes: Sequence[Sequence[Stretch]], now_s: float, count: int, span_s: float = LANE_S
) -> list[float]:
    """Which share of several lanes was at work in the middle of each of `count` equal parts of `span_s`."""
    first_s, width_s = now_s - span_s, span_s / count
    changes = [0] * (count + 1)
    for lane in lanes:
        for place, one in enumerate(lane):
            if one.state is LaneState.SERVING:
                end_s = lane[place + 1].since_s if place + 1 < len(lane) else now_s
                for since_s, change in ((one.since_s, 1), (end_s, -1)):
                    at = math.ceil((since_s - first_s) / width_s - 0.5)
                    changes[min(count, max(0, at))] += change
    return [total / max(1, len(lanes)) for total in accumulate(changes[:count])]
