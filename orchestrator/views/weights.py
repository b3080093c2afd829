"""What it takes to bring a policy from the trainer to the nodes, by stage: as logged and as the gateway saw it;
and what nodes are at that hold none yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from checkpoint.records import metrics
from checkpoint.records.metrics import Row
from orchestrator.views.words import data_size
from policies.serving.gateway_status import VersionSpread
from policies.serving.joining import Stage

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
