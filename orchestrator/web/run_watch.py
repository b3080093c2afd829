"""A single reader of the store for all viewers.

The store is read only while a page is open, about as often as the run makes progress. Pages are drawn from the
newest Observation, and ask for the number of a newer one.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import structlog

from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.views.reader import Reader
from grpo_orch.orchestrator.views.run_view import RunObserver
from grpo_orch.orchestrator.views.view_model import RunView
from grpo_orch.policies.serving.gateway_status import GatewayStatus

# Seconds between two observations of a running run; each takes a dozen store requests. Open pages ask every 2 s;
# together they must stay below `control.observe.FRESH_S`, or the gateway would count as silent.
SOONEST_S, LATEST_S = 2.0, 3.0
OVER_S = 30.0  # seconds between two observations of a run that is over

log = structlog.get_logger()
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Observation:
    """The state of a run at one moment."""

    number: int  # increases with every observation that found something new
    view: RunView
    reader: Reader  # a copy, as of this moment, with the whole journal
    gateway: GatewayStatus | None
    trouble: str = ""  # the error that prevented a newer observation
    _cache: dict[str, Any] = field(default_factory=dict)

    def cached(self, name: str, make: Callable[[], T]) -> T:
        """Return the result of `make`, which is called once per observation."""
        if name not in self._cache:
            self._cache[name] = make()
        found: T = self._cache[name]
        return found


class Watch:
    """Reads the run while pages are open. Raises StoreError at the start; later errors: `Observation.trouble`."""

    def __init__(self, store: Store) -> None:
        self._observer = RunObserver(store, whole=True)
        self._number = 0
        self._observing = asyncio.Lock()
        self.newest = self.observation()
        self._observed_at_s = time.monotonic()

    async def fresh(self) -> Observation:
        """Return the newest observation, refreshed if it is older than `pace_s`."""
        async with self._observing:
            if time.monotonic() - self._observed_at_s >= self.pace_s:
                await self._observe_again()
        return self.newest

    @property
    def pace_s(self) -> float:
        """Seconds between two observations: half a step."""
        view = self.newest.view
        return OVER_S if view.over else min(max(SOONEST_S, (view.step_s or 0.0) / 2), LATEST_S)

    async def _observe_again(self) -> None:
        try:
            observation = await asyncio.to_thread(self.observation)
        except Exception as error:  # the page shows any error with the last observation, and tries again
            if not isinstance(error, StoreError):
                log.exception("observation_failed")
            trouble = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
            self._number += 1
            observation = replace(self.newest, number=self._number, trouble=trouble, _cache={})
        self._observed_at_s = time.monotonic()
        if observation.trouble != self.newest.trouble or _mark(observation) != _mark(self.newest):
            self.newest = observation

    def observation(self) -> Observation:
        """Read the run once more."""
        view = self._observer.observe()
        self._number += 1
        return Observation(self._number, view, copy.copy(self._observer.reader), self._observer.gateway)


def _mark(observation: Observation) -> tuple[object, ...]:
    """Return a key that changes when an observation shows something new."""
    reader, gateway = observation.reader, observation.gateway
    last = reader.path[-1] if reader.path else None
    return (
        reader.events[-1].number if reader.events else 0,
        len(reader.events),
        (last.timeline, last.step, last.time_s, len(last.values)) if last else None,
        reader.trainer,
        (gateway.boot_id, gateway.seq) if gateway else None,
        observation.view.daemon.alive,
        reader.checkpoints[-1] if reader.checkpoints else None,
        len(reader.checkpoints),
    )
