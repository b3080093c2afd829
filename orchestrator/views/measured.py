"""Measurements that views share: the state of each machine, the parts of a step, the weights' way to the nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from checkpoint.records import metrics
from checkpoint.records.metrics import PARTS, REPLAYED, STARTED_AGAIN, Row, StepTiming, split
from orchestrator.views.words import data_size, short
from policies.model.vocabulary import NodePhase, Role
from policies.serving.gateway_status import MemberStatus, VersionSpread
from policies.serving.joining import Stage


class NodeState(StrEnum):
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


AT_WORK = (NodeState.SERVING, NodeState.IDLE)
FAILED = (NodeState.LOST, NodeState.REFUSED)


def phase_state(phase: NodePhase, before: NodePhase | None) -> NodeState:
    """What a move of a node means; `before` is where it came from."""
    if phase is NodePhase.GONE:
        return NodeState.GONE if before is NodePhase.TERMINATING else NodeState.LOST
    return NodeState(phase)


def state_now(told: NodeState, role: Role, members: Sequence[MemberStatus]) -> NodeState:
    """Return the journalled state, or what the gateway knows of a serving node's engines."""
    staying = [member for member in members if not member.draining]
    if told is not NodeState.SERVING or role is Role.TRAINER or not staying:
        return told
    serving = [member for member in staying if member.serving]
    if not serving:
        return NodeState.LOADING
    return NodeState.SERVING if any(member.requests_running for member in serving) else NodeState.IDLE


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


# What generation and training take of a step, what each side is idle, and what overlap gains.


def timing_words(timing: StepTiming) -> list[str]:
    """`["generate 6.1 s", "train 5.8 s", "sync 0.4 s", "idle: trainer 0.3 s, fleet 0.9 s", "staleness 1"]`."""
    words = [
        f"generate {short(timing.generate_s)} s",
        f"train {short(timing.train_s)} s",
        f"sync {short(timing.sync_s)} s",
        f"idle: trainer {short(timing.trainer_idle_s)} s, fleet {short(timing.fleet_idle_s)} s",
    ]
    return words if timing.staleness is None else [*words, f"staleness {timing.staleness:g}"]


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
