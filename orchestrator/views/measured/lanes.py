"""What each place of the fleet was at over the last hour: from the journal, and from its gateway.

The journal knows machines that boot, work, leave and are lost. Whether one at work loads a policy or has nothing
to do, its gateway alone knows: as shares of each minute that is over, from the store, and as of now.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from checkpoint.records.activity import MINUTE_S
from policies.model.vocabulary import NodePhase, Role
from policies.serving.activity import activity_of, unpack
from policies.serving.gateway_status import MemberStatus

LANE_S = 3600.0
SPAN_LEAST_S = 300.0
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
_MEMBER = (*AT_WORK, LaneState.LOADING)  # its gateway knows what it is at


@dataclass(frozen=True, slots=True)
class Stretch:
    """From `since_s`, seconds since the epoch, up to the next one, or to now."""

    since_s: float
    state: LaneState


@dataclass(frozen=True, slots=True)
class Cell:
    """A part of a strip: what most of it was, and which share of what a member did in it that is."""

    state: LaneState
    share: float = 1.0


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


def cells(
    lane: Sequence[Stretch],
    now: LaneState,
    now_s: float,
    count: int,
    minutes: bytes = b"",
    span_s: float = LANE_S,
) -> list[Cell | None]:
    """The last `span_s` in `count` equal parts, the newest last. None: nothing was there, or nothing is known.

    A loss is seen in whichever part it was; else a part is what most of it was, and the last one what is now.

    Args:
        minutes: what of each minute since the one an hour ago went to what, as `policies.serving.activity` packs
            it; of those that are not in it the lane alone tells.
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
            for state, length_s in _divided(one.state, low_s, part_s, now_s - LANE_S, minutes):
                lengths[at][state] += length_s
            low_s, at = max(low_s, part_s), at + 1
    found = [_cell(one) for one in lengths]
    if found[-1] is None or found[-1].state not in FAILED:
        found[-1] = Cell(now)
    return [None if one is None or one.state is LaneState.GONE else one for one in found]


def _divided(
    state: LaneState, low_s: float, high_s: float, minutes_from_s: float, minutes: bytes
) -> Iterator[tuple[LaneState, float]]:
    """What that stretch of time went to: a member's to what is known of each of its minutes."""
    if state not in _MEMBER or not minutes:
        yield state, max(0.0, high_s - low_s)
        return
    while low_s < high_s:
        slot = int(low_s // MINUTE_S)
        until_s = min(high_s, (slot + 1) * MINUTE_S)
        place = slot - int(minutes_from_s // MINUTE_S)
        shares = unpack(minutes[place]) if 0 <= place < len(minutes) else None
        if shares is None:
            yield state, until_s - low_s
        else:
            yield LaneState.LOADING, shares.loading * (until_s - low_s)
            yield LaneState.IDLE, shares.idle * (until_s - low_s)
            yield LaneState.SERVING, (1 - shares.loading - shares.idle) * (until_s - low_s)
        low_s = until_s


def _cell(lengths: Mapping[LaneState, float]) -> Cell | None:
    if not lengths:
        return None
    state = max(lengths, key=lambda one: lengths[one])
    together_s = sum(lengths.get(one, 0.0) for one in _MEMBER)
    return Cell(state, lengths[state] / together_s if state in _MEMBER and together_s > 0 else 1.0)


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
            if one.state in AT_WORK:
                end_s = lane[place + 1].since_s if place + 1 < len(lane) else now_s
                for since_s, change in ((one.since_s, 1), (end_s, -1)):
                    at = math.ceil((since_s - first_s) / width_s - 0.5)
                    changes[min(count, max(0, at))] += change
    return [total / max(1, len(lanes)) for total in accumulate(changes[:count])]
