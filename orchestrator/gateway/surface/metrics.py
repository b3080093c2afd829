"""The gateway's Prometheus metrics, see docs/metrics.md.

Counts are read from the gateway's own state on each scrape; only the histograms are updated per completion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from grpo_orch.orchestrator.gateway.job import Finished
from grpo_orch.orchestrator.gateway.nodes.upstream import HandoverReason
from grpo_orch.orchestrator.gateway.routing.dispatch import Ledger
from grpo_orch.orchestrator.gateway.routing.gateway_members import Members
from grpo_orch.policies.serving.gateway_status import MemberStatus, state_of

CONTENT_TYPE = CONTENT_TYPE_LATEST
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_REQUEST_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics(Collector):
    """One gateway's metrics."""

    def __init__(self, members: Members, ledger: Ledger) -> None:
        self._members = members
        self._ledger = ledger
        self.answers: Counter[tuple[str, int]] = Counter()  # by route and status
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self._first_token = self._histogram(
            "first_token_seconds", "Time to the first token of a completion", _FIRST_TOKEN_S
        )
        self._token = self._histogram(
            "token_seconds", "Mean time of a token after the first, per completion", _TOKEN_S
        )
        self._request = self._histogram("request_seconds", "Time to the end of a completion", _REQUEST_S)
        ProcessCollector(namespace="grpo_gateway", registry=self.registry)

    def _histogram(self, name: str, documentation: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(f"grpo_gateway_{name}", documentation, buckets=bounds, registry=self.registry)

    def observe(self, finished: Finished) -> None:
        """Add a completion to the histograms."""
        self._first_token.observe(finished.first_token_s)
        self._request.observe(finished.took_s)
        if len(finished.token_ids) > 1:
            self._token.observe((finished.took_s - finished.first_token_s) / (len(finished.token_ids) - 1))

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        members, ledger = self._members, self._ledger
        statuses = members.status()
        yield self._by_state(statuses)
        running = sum(member.requests_running for member in statuses)
        yield _gauge("requests_running", "Requests running on members, one per completion", running)
        yield _gauge("requests_waiting", "Requests waiting for a member", members.places.waiting.count)
        yield _gauge("waiting_bytes", "Size of the waiting requests' prompts", members.places.waiting.size_bytes)
        requests = CounterMetricFamily(
            "grpo_gateway_requests", "Completed requests: finished, or refused by vLLM", labels=["outcome"]
        )
        requests.add_metric(["finished"], ledger.finished)
        requests.add_metric(["refused"], ledger.refused)
        yield requests
        yield _counter("tokens_delivered", "Tokens delivered to clients", ledger.delivered)
        yield _counter("tokens_discarded", "Tokens that arrived and were discarded", ledger.discarded)
        yield _counter("tokens_saved", "Tokens kept when a request moved to another member", ledger.saved)
        yield _counter("tokens_replayed", "Tokens computed again there, as part of a prompt", ledger.replayed)
        yield from self._newest_policy()
        left = f"Requests that left a member unfinished: {', '.join(HandoverReason)}"
        handovers = CounterMetricFamily("grpo_gateway_handovers", left, labels=["reason"])
        for reason, count in ledger.handovers_by_reason.items():
            handovers.add_metric([reason], count)
        yield handovers
        changes = members.changes
        yield _counter("membership_changes", "Membership changes", changes[-1].seq if changes else 0)
        answers = CounterMetricFamily(
            "grpo_gateway_http_answers", "HTTP answers by route and status", labels=["route", "status"]
        )
        for (route, status), count in self.answers.items():
            answers.add_metric([route, str(status)], count)
        yield answers

    def _newest_policy(self) -> Iterable[Metric]:
        """Yield the metrics of the newest policy that a member holds."""
        spread = next((version for version in reversed(self._members.version_spreads.last) if version.ready), None)
        if spread is None:
            return
        ready = GaugeMetricFamily(
            "grpo_gateway_policy_ready_seconds",
            "Time until the first and the last member held the policy",
            labels=["member"],
        )
        ready.add_metric(["first"], spread.first_ready_s)
        ready.add_metric(["last"], spread.last_ready_s)
        yield ready
        yield _gauge("policy_ready", "Members that hold the policy", spread.ready)
        yield _gauge("policy_fetch_seconds", "Longest download and verification of a member", spread.fetch_s)
        yield _gauge("policy_fetched_bytes", "Largest download of a member", spread.fetched_bytes)
        yield _gauge("policy_load_seconds", "Longest load of a member, without serving", spread.load_s)

    def _by_state(self, members: Iterable[MemberStatus]) -> GaugeMetricFamily:
        policy = self._members.wanted
        wanted = None if policy is None else policy.label
        counts: Counter[tuple[str, str]] = Counter()
        for member in members:
            counts[state_of(member, wanted), member.policy or "base"] += 1
        family = GaugeMetricFamily(
            "grpo_gateway_members", "Members by state and policy", labels=["state", "policy"]
        )
        for labels, count in counts.items():
            family.add_metric(labels, count)
        return family


def _gauge(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"grpo_gateway_{name}", documentation, value=value)


def _counter(name: str, documentation: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"grpo_gateway_{name}", documentation, value=value)
