"""Measurements that views share: machine states, step times, and the transfer of weights to the nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from grpo_orch.checkpoint.records import metrics
from grpo_orch.checkpoint.records.metrics import MetricsRow, StepTiming
from grpo_orch.orchestrator.views.formatting import data_size, short
from grpo_orch.policies.model.vocabulary import NodePhase, Role
from grpo_orch.policies.serving.gateway_status import MemberStatus, VersionSpread
from grpo_orch.policies.serving.joining import Stage


class NodeState(StrEnum):
    """A node's phase; a node that is gone was released or lost. LOADING and IDLE describe the present only."""

    REQUESTED = "requested"
    BOOTING = "booting"
    LOADING = "loading"  # no member of it holds the wanted policy
    SERVING = "serving"
    IDLE = "idle"  # no member of it has requests
    DRAINING = "draining"
    TERMINATING = "terminating"
    LOST = "lost"
    REFUSED = "refused"
    GONE = "gone"  # terminated by the controller


AT_WORK = (NodeState.SERVING, NodeState.IDLE)
FAILED = (NodeState.LOST, NodeState.REFUSED)


def phase_state(phase: NodePhase, before: NodePhase | None) -> NodeState:
    """Return the state of a node that entered `phase` from phase `before`."""
    if phase is NodePhase.GONE:
        return NodeState.GONE if before is NodePhase.TERMINATING else NodeState.LOST
    return NodeState(phase)


def state_now(journalled: NodeState, role: Role, members: Sequence[MemberStatus]) -> NodeState:
    """Return the journalled state; for a serving rollout node, the state that the gateway reports."""
    staying = [member for member in members if not member.draining]
    if journalled is not NodeState.SERVING or role is Role.TRAINER or not staying:
        return journalled
    serving = [member for member in staying if member.serving]
    if not serving:
        return NodeState.LOADING
    return NodeState.SERVING if any(member.requests_running for member in serving) else NodeState.IDLE


def timing_words(timing: StepTiming) -> list[str]:
    """Return `generate 6.1 s`, `train 5.8 s`, `sync 0.4 s`, `idle: trainer 0.3 s, fleet 0.9 s`, `staleness 1`."""
    words = [
        f"generate {short(timing.generate_s)} s",
        f"train {short(timing.train_s)} s",
        f"sync {short(timing.sync_s)} s",
        f"idle: trainer {short(timing.trainer_idle_s)} s, fleet {short(timing.fleet_idle_s)} s",
    ]
    return words if timing.staleness is None else [*words, f"staleness {timing.staleness:g}"]


# The transfer of a policy from the trainer to the nodes, by stage, and what joining nodes fetch.

STAGES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class WeightsView:
    """The transfer of one policy, or of several: means for publishing, medians for reaching the nodes.

    Values of nodes are those of the slowest node. They are None until a node holds a policy.
    """

    policies: int  # published
    weights_bytes: float  # of one policy
    sent_bytes: float  # uploaded for one policy
    publish_s: float  # until the policy was in the store, encoding included
    encode_s: float  # until all of it was encoded; the upload starts earlier
    members: int | None = None  # when the last policy was wanted
    ready: int | None = None  # members that loaded it
    fetch_s: float | None = None  # download and verification
    fetched_bytes: float | None = None
    load_s: float | None = None  # the node serves no requests meanwhile
    first_ready_s: float | None = None  # since the policy was wanted
    last_ready_s: float | None = None


def weights_view(rows: Iterable[MetricsRow], versions: Sequence[VersionSpread]) -> WeightsView | None:
    """Summarize how policies were published and reached the nodes; None if no policy was published."""
    logged = [row.values for row in rows if metrics.PUBLISHED_BYTES in row.values]
    if not logged:
        return None
    policies = round(sum(values[metrics.PUBLISHED] for values in logged))
    names = (metrics.WEIGHTS_BYTES, metrics.PUBLISHED_BYTES, metrics.PUBLISH_S, metrics.ENCODE_S)
    weights, sent, publish_s, encode_s = (sum(values[name] for values in logged) / policies for name in names)
    published = WeightsView(policies, weights, sent, publish_s, encode_s)
    loaded = [spread for spread in versions if spread.ready]
    if not loaded:
        return published
    return replace(
        published,
        members=loaded[-1].members,
        ready=loaded[-1].ready,
        fetch_s=median(spread.fetch_s for spread in loaded),
        fetched_bytes=median(spread.fetched_bytes for spread in loaded),
        load_s=median(spread.load_s for spread in loaded),
        first_ready_s=median(spread.first_ready_s for spread in loaded),
        last_ready_s=median(spread.last_ready_s for spread in loaded),
    )


def newest_weights(rows: Sequence[MetricsRow], versions: Sequence[VersionSpread]) -> WeightsView | None:
    """Summarize the last published policy and the last policy that a node loaded."""
    last = next((row for row in reversed(rows) if metrics.PUBLISHED_BYTES in row.values), None)
    loaded = [spread for spread in versions if spread.ready]
    return None if last is None else weights_view([last], loaded[-1:])


def weights_words(view: WeightsView) -> str:
    """Return `1.2 GiB in 3.1 s (2.0 % of total); all ready in 4.2 to 5.0 s`."""
    share = view.sent_bytes / view.weights_bytes if view.weights_bytes else 1.0
    sent = f"{data_size(round(view.sent_bytes))} in {view.publish_s:.1f} s ({share:.1%} of total)".replace(
        "%", " %"
    )
    if view.first_ready_s is None or view.last_ready_s is None:
        return sent
    members = "all" if view.ready == view.members else f"{view.ready} of {view.members}"
    return f"{sent}; {members} ready in {view.first_ready_s:.1f} to {view.last_ready_s:.1f} s"


def policy_stage_words(view: WeightsView) -> str:
    """Return `encoded in 1.0 s, sent 2.1 s later; fetched in 0.8 s (25.0 MiB), loaded in 1.1 s`."""
    sent = f"encoded in {view.encode_s:.1f} s, sent {view.publish_s - view.encode_s:.1f} s later"
    if view.fetch_s is None or view.load_s is None:
        return sent
    fetched = f"fetched in {view.fetch_s:.1f} s ({data_size(round(view.fetched_bytes or 0))})"
    return f"{sent}; {fetched}, loaded in {view.load_s:.1f} s"


def stages_words(stages: Mapping[str, Stage]) -> list[str]:
    """Describe what joining nodes are doing, a line each, least progress first."""
    by_share = sorted(stages.items(), key=lambda item: item[1].done_bytes / (item[1].total_bytes or 1))
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
