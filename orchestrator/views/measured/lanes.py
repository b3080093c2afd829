"""What each place of the fleet was at over the last hour: from the journal, and from looks at the gateway.

The journal knows machines that boot, work, leave and are lost. Whether one at work loads a policy or has nothing
to do, its gateway alone knows, and only as of now: a lane tells that from when somebody began to watch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from policies.model.vocabulary import NodePhase, Role
from policies.serving.activity import activity_of
from policies.serving.gateway_status import MemberStatus

LANE_S = 3600.0
LOOKED_EVERY_S = 15.0  # a lane does not keep what was seen more often: a fleet is idle and at work in every step


class LaneState(StrEnum):
    """A node's phase; of one at work also whether it is of use, of one that is gone whether that was meant."""

    REQUESTED = "requested"
    BOOTING = "booting"
    LOADING = "loading"  # at work, and does not hold the wanted policy
    SERVING = "serving"
    IDLE = "idle"  # could serve, and has nothing to do
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
    """What a node is at, by the journal, and by its engines' words if it is at work."""
    activity = activity_of(members)
    if told is not LaneState.SERVING or role is Role.TRAINER or activity is None:
        return told
    return LaneState(activity)


class Lanes:
    """The stretches of every slot, as far as they are known."""

    def __init__(self) -> None:
        self._stretches = defaultdict[str, list[Stretch]](list)
        self._told: dict[str, LaneState] = {}  # by the journal

    def told(self, slot: str, state: LaneState, since_s: float) -> None:
        """The journal tells it."""
        self._told[slot] = state
        self._append(slot, state, since_s)

    def look(
        self, slot: str, role: Role, members: Sequence[MemberStatus], now_s: float
    ) -> tuple[LaneState, tuple[Stretch, ...]]:
        """What the slot is at now, and its stretches of the last hour, the newest last."""
        state = state_now(self._told[slot], role, members)
        stretches = self._stretches[slot]
        if state is not stretches[-1].state and now_s - stretches[-1].since_s >= LOOKED_EVERY_S:
            self._append(slot, state, now_s)
        ended = bisect_right(stretches, now_s - LANE_S, key=lambda one: one.since_s) - 1
        del stretches[: max(0, ended)]
        return state, tuple(stretches)

    def _append(self, slot: str, state: LaneState, since_s: float) -> None:
        stretches = self._stretches[slot]
        if stretches and stretches[-1].state is state:
            return
        # The journal's clock is another than that of who looks.
        stretches.append(Stretch(max(since_s, stretches[-1].since_s) if stretches else since_s, state))


def cells(lane: Sequence[Stretch], now: LaneState, now_s: float, count: int) -> list[LaneState | None]:
    """The hour in `count` equal parts, the newest last. None: nothing was there, or nothing is known.

    A loss is seen in whichever part it was; else a part is what most of it was, and the last one what is now.
    """
    width_s = LANE_S / count
    lengths = [defaultdict[LaneState, float](float) for _ in range(count)]
    first_s = now_s - LANE_S
    for place, one in enumerate(lane):
        end_s = lane[place + 1].since_s if place + 1 < len(lane) else now_s
        low_s, high_s = max(one.since_s, first_s), min(end_s, now_s)
        if one.state in FAILED and low_s <= high_s:  # however short it was
            lengths[min(count - 1, int((low_s - first_s) / width_s))][one.state] += 2 * LANE_S
        at = min(count - 1, int((low_s - first_s) / width_s))
        while low_s < high_s and at < count:
            part_s = min(high_s, first_s + (at + 1) * width_s)
            lengths[at][one.state] += max(0.0, part_s - low_s)
            low_s, at = max(low_s, part_s), at + 1
    found = [max(one, key=lambda state: one[state]) if one else None for one in lengths]
    if found[-1] not in FAILED:
        found[-1] = now
    return [None if state is LaneState.GONE else state for state in found]


def shares_at_work(lanes: Sequence[Sequence[Stretch]], now_s: float, count: int) -> list[float]:
    """Which share of several lanes was at work in the middle of each of `count` equal parts of the hour."""
    first_s, width_s = now_s - LANE_S, LANE_S / count
    changes = [0] * (count + 1)
    for lane in lanes:
        for place, one in enumerate(lane):
            if one.state in AT_WORK:
                end_s = lane[place + 1].since_s if place + 1 < len(lane) else now_s
                for since_s, change in ((one.since_s, 1), (end_s, -1)):
                    at = math.ceil((since_s - first_s) / width_s - 0.5)
                    changes[min(count, max(0, at))] += change
    return [total / max(1, len(lanes)) for total in accumulate(changes[:count])]
