"""Track which policies are requested, and decide which of them each machine is to hold.

A trainer that samples windows ahead requests two or three policies at a time. It waits for the oldest first, so
that policy gets as many machines as its open requests need; the others load the newest. As its requests finish it
needs fewer machines, and its last, long requests are gathered on few. A machine that changes to the newer policy
fetches it while its requests run; requests that still run when it loads continue on a machine with the older one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from grpo_orch.policies.model.vocabulary import machine_of
from grpo_orch.policies.serving.membership import Member
from grpo_orch.policies.serving.wire import PolicyRef, labelled_version

# Open requests of an older policy for each engine that keeps it while others could load a newer one. Together they
# get their tokens a quarter more slowly than one alone (`policies.serving.sharing.DOUBLING_REQUESTS`).
GATHERED_REQUESTS = 16
KV_SHARE = 0.9  # share of an engine's KV cache that they may need


@dataclass(slots=True)
class _Open:
    ref: PolicyRef
    requests: int


class Demand:
    """The policies requested from one gateway.

    Attributes:
        newest: the newest policy requested, now or last; None before the first.
        open_policies: those that have open requests, by label.
    """

    def __init__(self) -> None:
        self.newest: PolicyRef | None = None
        self.open_policies: dict[str, _Open] = {}

    @property
    def has_older(self) -> bool:
        """Whether requests of older policies than the newest are open."""
        return len(self.open_policies) > 1

    def ref(self, label: str) -> PolicyRef | None:
        """Return the policy with that label, if it has open requests or is the newest."""
        found = self.open_policies.get(label)
        return found.ref if found is not None else self.newest if self._is_newest(label) else None

    def is_wanted(self, label: str) -> bool:
        """Whether members are to hold the policy with that label."""
        return self.ref(label) is not None

    def add(self, policy: PolicyRef, requests: int) -> None:
        """Add open requests of a policy. With 0 requests, it becomes the newest if no policy has open requests."""
        if requests:
            self.open_policies.setdefault(policy.label, _Open(policy, 0)).requests += requests
            self._choose_newest()
        elif not self.open_policies:
            self.newest = policy

    def finish(self, label: str, requests: int) -> None:
        """Remove open requests that are done or abandoned."""
        found = self.open_policies[label]
        found.requests -= requests
        if found.requests <= 0:
            del self.open_policies[label]
            self._choose_newest()

    def targets(self, members: Iterable[Member]) -> dict[str, str]:
        """Return the label of the policy that each machine is to hold.

        Args:
            members: the members that can load a policy.
        """
        assert self.newest is not None
        machines = defaultdict[str, list[Member]](list)
        for row in members:
            machines[machine_of(row.node)].append(row)
        found = {}
        for label in sorted(self.open_policies.keys() - {self.newest.label}, key=labelled_version):
            unassigned, kept = self.open_policies[label].requests, list[str]()
            for machine in sorted(machines, key=lambda name: _order(label, name, machines[name])):
                if unassigned <= 0:
                    break
                kept.append(machine)
                unassigned -= sum(map(_capacity, machines[machine]))
            # Drop small machines that are not needed in addition to a large one. The last goes first, so
            # that the next call, which orders those that remain in another way, drops none of them.
            for machine in reversed(kept.copy()):
                if unassigned + sum(map(_capacity, machines[machine])) <= 0:
                    kept.remove(machine)
                    unassigned += sum(map(_capacity, machines[machine]))
            for machine in kept:
                found[machine] = label
                del machines[machine]
        return found | dict.fromkeys(machines, self.newest.label)

    def _is_newest(self, label: str) -> bool:
        return self.newest is not None and self.newest.label == label

    def _choose_newest(self) -> None:
        if self.open_policies:
            label = max(self.open_policies, key=labelled_version)
            self.newest = self.open_policies[label].ref


def _order(label: str, name: str, rows: list[Member]) -> tuple[bool, bool, int, str]:
    """Sort key for the machines that keep an older policy: first those that hold it, with the most requests; then
    those that are to hold it; then those with the fewest running requests."""
    holds = any(row.policy == label for row in rows)
    running = sum(row.running for row in rows)
    return not holds, all(row.target != label for row in rows), -running if holds else running, name


def _capacity(row: Member) -> int:
    """Return how many open requests of an older policy an engine may gather."""
    capacity = min(GATHERED_REQUESTS, row.max_requests)
    if row.kv_tokens and row.running and row.outstanding:
        capacity = min(capacity, int(KV_SHARE * row.kv_tokens * row.running / row.outstanding))
    return max(1, capacity)
