"""Measurements that views share: the state of each slot over the last hour, a step's parts, the weights' way to
nodes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from statistics import median

from checkpoint.records import metrics
from checkpoint.records.metrics import REPLAYED, Row
from checkpoint.records.step_split import PARTS, STARTED_AGAIN, split
from orchestrator.views.words import data_size
from policies.model.vocabulary import NodePhase, Role
from policies.serving.gateway_status import MemberStatus, VersionSpread
from policies.serving.joining import Stage

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


# Where a step's time goes, from the trainer's log of the last steps.

WAITING, PUBLISHING, GENERATING = "waiting for nodes", "publishing weights", "generating"  # of PARTS


@dataclass(frozen=True, slots=True)
class StepSplit:
    """Seconds of a step, the mean of several; together they are all of it."""

    wait_s: float  # no node could serve
    publish_s: float  # until the policy was in the store
    generate_s: float  # completions were made
    train_s: float  # the rest: rewards, gradients, the pause for a checkpoint, evaluations

    @property
    def step_s(self) -> float:
        return self.wait_s + self.publish_s + self.generate_s + self.train_s


def step_split(rows: Sequence[Row]) -> StepSplit | None:
    """The mean of the steps among `rows`, in the order of time, that were generated and not replayed; None of
    none."""
    made = [one for one in split(rows) if not one.seconds[STARTED_AGAIN] and not one.row.values.get(REPLAYED)]
    steps = sum(one.steps for one in made)
    if not steps:
        return None
    mean_s = {part: sum(one.seconds[part] for one in made) / steps for part in PARTS}
    wait_s, publish_s, generate_s = (mean_s.pop(part) for part in (WAITING, PUBLISHING, GENERATING))
    return (
        StepSplit(wait_s, publish_s, generate_s, sum(mean_s.values())) if wait_s + publish_s + generate_s else None
    )


# What it takes to bring a policy from the trainer to the nodes, by stage, and what joining nodes fetch.

STAGES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class WeightsView:
    """One policy, or the mean of several to publish and the median of several to reach the nodes.

    What nodes take is the most that any of them did, and None while none has come to hold one.
    """

    policies: int  # that were published
    weights_bytes: float  # that one has
    sent_bytes: float  # that went to the store for it
    publish_s: float  # until it was there, the next included
    encode_s: float  # until all of it was encoded; sending begins before
    members: int | None = None  # of the last, when it was wanted
    ready: int | None = None  # of them that came to hold it
    fetch_s: float | None = None  # and verified
    fetched_bytes: float | None = None
    load_s: float | None = None  # in which a node serves nobody
    first_ready_s: float | None = None  # since it was wanted
    last_ready_s: float | None = None


def weights_view(rows: Iterable[Row], versions: Sequence[VersionSpread]) -> WeightsView | None:
    """Sum up what was logged of policies and how they spread; None where no policy was published."""
    told = [row.values for row in rows if metrics.PUBLISHED_BYTES in row.values]
    if not told:
        return None
    policies = round(sum(one[metrics.PUBLISHED] for one in told))
    names = (metrics.WEIGHTS_BYTES, metrics.PUBLISHED_BYTES, metrics.PUBLISH_S, metrics.ENCODE_S)
    weights, sent, publish_s, encode_s = (sum(one[name] for one in told) / policies for name in names)
    published = WeightsView(policies, weights, sent, publish_s, encode_s)
    held = [one for one in versions if one.ready]
    if not held:
        return published
    return replace(
        published,
        members=held[-1].members,
        ready=held[-1].ready,
        fetch_s=median(one.fetch_s for one in held),
        fetched_bytes=median(one.fetched_bytes for one in held),
        load_s=median(one.load_s for one in held),
        first_ready_s=median(one.first_ready_s for one in held),
        last_ready_s=median(one.last_ready_s for one in held),
    )


def newest_weights(rows: Sequence[Row], versions: Sequence[VersionSpread]) -> WeightsView | None:
    """Of the last row that tells of a policy, and the last policy that a node came to hold."""
    last = next((row for row in reversed(rows) if metrics.PUBLISHED_BYTES in row.values), None)
    held = [one for one in versions if one.ready]
    return None if last is None else weights_view([last], held[-1:])


def weights_words(view: WeightsView) -> str:
    """`1.2 GiB in 3.1 s (2.0 % of whole); all ready in 4.2 to 5.0 s`."""
    share = view.sent_bytes / view.weights_bytes if view.weights_bytes else 1.0
    sent = f"{data_size(round(view.sent_bytes))} in {view.publish_s:.1f} s ({share:.1%} of whole)".replace(
        "%", " %"
    )
    if view.first_ready_s is None or view.last_ready_s is None:
        return sent
    members = "all" if view.ready == view.members else f"{view.ready} of {view.members}"
    return f"{sent}; {members} ready in {view.first_ready_s:.1f} to {view.last_ready_s:.1f} s"


def policy_stage_words(view: WeightsView) -> str:
    """`encoded in 1.0 s, sent 2.1 s later; fetched in 0.8 s (25.0 MiB), loaded in 1.1 s`."""
    sent = f"encoded in {view.encode_s:.1f} s, sent {view.publish_s - view.encode_s:.1f} s later"
    if view.fetch_s is None or view.load_s is None:
        return sent
    fetched = f"fetched in {view.fetch_s:.1f} s ({data_size(round(view.fetched_bytes or 0))})"
    return f"{sent}; {fetched}, loaded in {view.load_s:.1f} s"


def stages_words(stages: Mapping[str, Stage]) -> list[str]:
    """What nodes are at before they are of use, a line each, those first that have most before them."""
    by_share = sorted(stages.items(), key=lambda one: one[1].done_bytes / (one[1].total_bytes or 1))
    shown = by_share if len(by_share) <= STAGES_SHOWN else by_share[: STAGES_SHOWN - 1]
    lines = [f"{node} is {_stage_words(stage)}" for node, stage in shown]
    return lines if len(shown) == len(by_share) else [*lines, f"and {len(by_share) - len(shown)} more"]


def _stage_words(stage: Stage) -> str:
    if not stage.total_bytes:
        return stage.name
    if not stage.done_bytes:
        return f"{stage.name}, {data_size(stage.total_bytes)}"
    share = stage.done_bytes / stage.total_bytes
    return f"{stage.name}, {data_size(stage.done_bytes)} of {data_size(stage.total_bytes)} ({share:.0%})"
