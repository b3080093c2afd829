"""A run looked at again and again: its store, and what its gateway last wrote."""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

from checkpoint.records.documents import Lease
from checkpoint.store.run_store import Store
from orchestrator.control.lease import LOOK_EVERY_S, LOOKS, NO_SKEW_S, TTL_S
from orchestrator.control.observe import GatewayWatch
from orchestrator.control.run_clock import awake_or_asleep_s
from orchestrator.views.model import RunView
from orchestrator.views.reader import Reader
from orchestrator.views.run_view import described
from policies.model.phases import TERMINAL_RUN
from policies.model.vocabulary import machine_of
from policies.serving.gateway_status import GatewayStatus


class Looker:
    """Keeps what was read, so that each look reads what is new. Raises NotFound when there is no run."""

    def __init__(self, store: Store) -> None:
        self.reader = Reader(store)
        self.gateway: GatewayStatus | None = None  # as of the last look; None when it is not heard from
        self.rates = Rates()
        self._time = RunTime()
        self._watch = GatewayWatch(store, believe_first=True, unreadable=self.reader.unreadable)

    def look(self) -> RunView:
        """The run as it is now. Raises StoreError."""
        self.gateway = self._watch.look()
        self.rates.see(self.gateway)
        self.reader.refresh()
        return described(self.reader, self._now_s(), self.gateway, self.rates.by_machine)

    def settle(self, wait: Callable[[float], object] = time.sleep) -> float:
        """Read the run and return its time, for a command that looks once. Raises StoreError.

        Where another machine steers and this one's clock disagrees with the lease, it waits some seconds for the
        lease to be renewed. No renewal: the holder is dead, and this machine's clock has to do.
        """
        self.reader.refresh()
        now_s = self._now_s()
        for _ in range(LOOKS):
            if self.reader.state.phase in TERMINAL_RUN or self._time.is_settled(self.reader.lease):
                break
            wait(LOOK_EVERY_S)
            self.reader.refresh()
            now_s = self._now_s()
        return now_s

    def _now_s(self) -> float:
        return self._time.now_s(self.reader.lease, self.reader.state.told_s)


class Rates:
    """Tokens a second of each machine, from its engines' counts in two statuses.

    An engine that restarted is counted from its restart.
    """

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, int]] = {}  # by member: when its engine had counted how many tokens
        self.by_machine: Mapping[str, float] = {}

    def see(self, gateway: GatewayStatus | None) -> None:
        """The gateway's newest status; None when it is not heard from."""
        members = [] if gateway is None else gateway.members
        counts = {one.node: (gateway.up_s, one.engine.tokens) for one in members if one.engine and gateway}
        rates = defaultdict[str, float](float)
        moved = False
        for node, (at_s, tokens) in counts.items():
            before_s, before = self._counts.get(node, (at_s, tokens))
            moved |= at_s != before_s
            if at_s > before_s and tokens >= before:
                rates[machine_of(node)] += (tokens - before) / (at_s - before_s)
        if moved or not counts:
            self.by_machine = dict(rates)
        self._counts = counts


class RunTime:
    """The clock of the run: that of the controller that journals, not the viewer's, which may be hours off.

    The holder of the lease writes its own time with each renewal. `wall` is this machine's clock, used until a
    renewal was seen; `clock` is one that is never set.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, clock: Callable[[], float] = awake_or_asleep_s
    ) -> None:
        self._wall, self._clock = wall, clock
        self._lease: Lease | None = None
        self._looked_at_s: float | None = None
        self._ahead_s: float | None = None  # of `clock`; as of the renewal that was seen soonest
        self._epoch = 0  # of whose clock that is

    def now_s(self, lease: Lease | None, told_s: float) -> float:
        """Return the seconds since the epoch, for the run.

        Args:
            lease: as just read.
            told_s: when the last event was journalled: it is later than that.
        """
        at_s = self._clock()
        if lease is not None and self._is_fresh(lease, at_s):
            self._see(lease, at_s)
        self._lease, self._looked_at_s = lease, at_s
        reckoned_s = self._wall() + _set_by_s(lease) if self._ahead_s is None else at_s + self._ahead_s
        return max(reckoned_s, told_s, 0.0 if lease is None else lease.run_time_s)

    def is_settled(self, lease: Lease | None) -> bool:
        """Whether the run's time is known, or no renewal of this lease can be expected to tell it."""
        if self._ahead_s is not None or lease is None or lease.host == socket.gethostname():
            return True
        behind_s = self._wall() - lease.renewed_at_s
        return abs(behind_s) < lease.ttl_s or behind_s > NO_SKEW_S

    def _is_fresh(self, lease: Lease, at_s: float) -> bool:
        """Whether it was written since a look shortly before."""
        looked_at_s = self._looked_at_s
        return lease != self._lease and looked_at_s is not None and at_s - looked_at_s <= TTL_S

    def _see(self, lease: Lease, at_s: float) -> None:
        ahead_s = lease.run_time_s - at_s
        known_s = self._ahead_s if lease.epoch == self._epoch else None
        self._ahead_s, self._epoch = max(ahead_s, ahead_s if known_s is None else known_s), lease.epoch


def _set_by_s(lease: Lease | None) -> float:
    """How far the run's clock is ahead of that of the holder's machine, which was set since the holder started."""
    return 0.0 if lease is None else lease.run_time_s - lease.renewed_at_s
