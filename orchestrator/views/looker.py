"""A run looked at again and again: its store, and what its gateway last wrote."""

from __future__ import annotations

from checkpoint.store.run_store import Store
from orchestrator.control.observe import GatewayWatch
from orchestrator.views.measured.rates import Rates
from orchestrator.views.model import RunView
from orchestrator.views.reader import Reader
from orchestrator.views.run_time import RunTime
from orchestrator.views.run_view import described
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
        now_s = self._time.now_s(self.reader.lease, self.reader.state.told_s)
        return described(self.reader, now_s, self.gateway, self.rates.by_machine)
