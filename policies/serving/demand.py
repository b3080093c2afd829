"""The policies that are asked for, and which of them each machine is to hold.

A trainer that samples windows ahead asks for two or three policies at a time. It waits for the oldest first, so
that has as many machines as its open requests need; the others load the newest. As requests finish it needs fewer,
and its last, long ones are gathered on few machines: a machine that changes to the newer policy fetches it while
its requests run on, and what still runs when it loads continues on a machine that has kept the older one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from policies.model.vocabulary import machine_of
from policies.serving.member import Row
from policies.serving.wire import PolicyRef, labelled_version

# Open requests of an older policy for each engine that keeps it, while others could load a newer one. So many at a
# time get their tokens a quarter more slowly than one alone (`policies.serving.sharing.DOUBLING_REQUESTS`).
GATHERED_REQUESTS = 16
KV_SHARE = 0.9  # of an engine's room for keys and values that they may need


@dataclass(slots=True)
class _Open:
    ref: PolicyRef
    requests: int


class Demand:
    """What is asked of one gateway.

    Attributes:
        newest: the newest policy that is asked for, or was last; None before the first.
    """

    def __init__(self) -> None:
        self.newest: PolicyRef | None = None
        self._open: dict[str, _Open] = {}  # by label

    @property
    def has_older(self) -> bool:
        """Whether requests of older policies than the newest are open."""
        return len(self._open) > 1

    def ref(self, label: str) -> PolicyRef | None:
        """The policy of that label, if requests of it are open or it is the newest."""
        found = self._open.get(label)
        return found.ref if found is not None else self.newest if self._is_newest(label) else None

    def has(self, label: str) -> bool:
        """Whether members are to hold it."""
        return self.ref(label) is not None

    def add(self, policy: PolicyRef, requests: int) -> None:
        """So many more requests of a policy are open; one without any is the newest while no other has any."""
        if requests:
            self._open.setdefault(policy.label, _Open(policy, 0)).requests += requests
            self._choose_newest()
        elif not self._open:
            self.newest = policy

    def finish(self, label: str, requests: int) -> None:
        """So many of them are done or given up."""
        found = self._open[label]
        found.requests -= requests
        if found.requests <= 0:
            del self._open[label]
            self._choose_newest()

    def targets(self, rows: Iterable[Row]) -> dict[str, str]:
        """Return the label of the policy that each machine is to hold.

        Args:
            rows: the members that can be asked to load one.
        """
        assert self.newest is not None
        machines = defaultdict[str, list[Row]](list)
        for row in rows:
            machines[machine_of(row.node)].append(row)
        found = {}
        for label in sorted(self._open.keys() - {self.newest.label}, key=labelled_version):
            left, kept = self._open[label].requests, list[str]()
            for machine in sorted(machines, key=lambda name: _order(label, name, machines[name])):
                if left <= 0:
                    break
                kept.append(machine)
                left -= sum(map(_share, machines[machine]))
            # A small one that came first may not be needed beside a large one: it would be let go the next time.
            for machine in sorted(kept, key=lambda name: sum(row.running for row in machines[name])):
                if left + sum(map(_share, machines[machine])) <= 0:
                    kept.remove(machine)
                    left += sum(map(_share, machines[machine]))
            for machine in kept:
                found[machine] = label
                del machines[machine]
        return found | dict.fromkeys(machines, self.newest.label)

    def _is_newest(self, label: str) -> bool:
        return self.newest is not None and self.newest.label == label

    def _choose_newest(self) -> None:
        if self._open:
            self.newest = max(self._open.values(), key=lambda one: labelled_version(one.ref.label)).ref


def _order(label: str, name: str, rows: list[Row]) -> tuple[bool, bool, int, str]:
    """Which machines keep an older policy: first those that hold it and have most to do with it, then those that
    are to hold it already, then those that leave least undone."""
    holds = any(row.policy == label for row in rows)
    running = sum(row.running for row in rows)
    return not holds, all(row.target != label for row in rows), -running if holds else running, name


def _share(row: Row) -> int:
    """How many open requests of an older policy an engine is enough for."""
    share = min(GATHERED_REQUESTS, row.max_requests)
    if row.kv_tokens and row.running and row.outstanding:
        share = min(share, int(KV_SHARE * row.kv_tokens * row.running / row.outstanding))
    return max(1, share)
