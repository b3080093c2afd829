"""A single reader of the store for all viewers.

The store is read only while a page is open, about as often as the run makes progress. Pages are drawn from the
newest Observation, which is immutable; waiting pages are notified of a newer one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import structlog

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.records.documents import RehearsedFault, RunRecord
from grpo_orch.checkpoint.records.metrics import MetricsRow
from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream.catalog import Checkpoint
from grpo_orch.orchestrator.views.events import EventLine, lines, rehearsed_line
from grpo_orch.orchestrator.views.model import RunView
from grpo_orch.orchestrator.views.run_view import RunObserver
from grpo_orch.policies.ledger.rentals import ControllerRental
from grpo_orch.policies.model.events import Event
from grpo_orch.policies.model.state import RunState
from grpo_orch.policies.serving.gateway_status import GatewayStatus
from grpo_orch.policies.tick.snapshot import Trainer

# Seconds between two looks at a running run; each takes a dozen store requests. LATEST_S must stay below
# `control.observe.FRESH_S`, or the gateway would count as silent.
SOONEST_S, LATEST_S = 2.0, 4.0
OVER_S = 30.0  # seconds between two looks at a run that is over

log = structlog.get_logger()
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Observation:
    """The state of a run at one moment."""

    number: int  # increases with every observation that found something new
    store: Store
    record: RunRecord
    view: RunView
    state: RunState
    path: Sequence[MetricsRow]  # of the current timeline and its ancestors, in the order of time
    abandoned: Sequence[MetricsRow]
    rows: Sequence[MetricsRow]  # all, by timeline and step
    history: Sequence[tuple[int, float, tuple[Event, ...]]]
    events: Sequence[EventLine]  # all, in the order of time
    faults: Sequence[RehearsedFault]
    checkpoints: Sequence[Checkpoint]
    trainer: Trainer | None
    controllers: tuple[ControllerRental, ...]  # of a `--remote` run
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
        self._store = store
        self._looker = RunObserver(store)
        self._history: list[tuple[int, float, tuple[Event, ...]]] = []
        self._events: list[EventLine] = []
        self._number = 0
        self._looking = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._watchers = 0
        self._wanted = asyncio.Event()
        self.newest = self.observation()
        self._looked_at_s = time.monotonic()

    async def fresh(self) -> Observation:
        """Return the newest observation, refreshed if it is older than `pace_s`."""
        async with self._looking:
            if time.monotonic() - self._looked_at_s >= self.pace_s:
                await self._look_again()
        return self.newest

    async def after(self, number: int) -> Observation:
        """Wait for a observation with a higher number."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.newest.number > number)
        return self.newest

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count a watcher for the duration of the block."""
        self._watchers += 1
        self._wanted.set()
        try:
            yield
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._wanted.clear()

    async def run(self) -> None:
        """Refresh repeatedly, while there are watchers."""
        while True:
            await self._wanted.wait()
            await self.fresh()
            await asyncio.sleep(max(0.05, self._looked_at_s + self.pace_s - time.monotonic()))

    @property
    def pace_s(self) -> float:
        """Seconds between two looks: half a step."""
        view = self.newest.view
        return OVER_S if view.over else min(max(SOONEST_S, (view.step_s or 0.0) / 2), LATEST_S)

    async def _look_again(self) -> None:
        try:
            observation = await asyncio.to_thread(self.observation)
        except Exception as error:  # the page shows any error with the last observation, and tries again
            if not isinstance(error, StoreError):
                log.exception("look_failed")
            trouble = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
            observation = replace(self.newest, number=self.newest.number + 1, trouble=trouble, _cache={})
        self._looked_at_s = time.monotonic()
        if observation.trouble != self.newest.trouble or _mark(observation) != _mark(self.newest):
            async with self._changed:
                self.newest = observation
                self._changed.notify_all()

    def observation(self) -> Observation:
        """Read the run once more."""
        view, reader = self._looker.observe(), self._looker.reader
        last = self._history[-1][0] if self._history else 0
        known = {fault.number for fault in reader.faults}
        shown = {line.number for line in self._events if not line.epoch}
        fresh = [rehearsed_line(fault) for fault in reader.faults if fault.number in known - shown]
        if reader.last is not None and reader.last.number > last:
            records = [record for record in journal.read(self._store, last) if not record.is_void]
            decoded = [(record.number, record.time_s, record.decoded()) for record in records]
            self._history = [*self._history, *decoded]
            fresh += [line for record in records for line in lines(record)]
        if fresh:
            self._events = [*self._events, *sorted(fresh, key=lambda line: line.time_s)]
        self._number += 1
        return Observation(
            number=self._number,
            store=self._store,
            record=reader.record,
            view=view,
            state=reader.state,
            path=reader.path,
            abandoned=reader.abandoned,
            rows=reader.rows,
            history=self._history,
            events=self._events,
            faults=tuple(reader.faults),
            checkpoints=reader.checkpoints,
            trainer=reader.trainer,
            controllers=reader.controllers(view.now_s),
            gateway=self._looker.gateway,
        )


def _mark(observation: Observation) -> tuple[object, ...]:
    """Return a key that changes when a observation shows something new."""
    last = observation.path[-1] if observation.path else None
    gateway = observation.gateway
    return (
        observation.events[-1].number if observation.events else 0,
        len(observation.events),
        (last.timeline, last.step, last.time_s, len(last.values)) if last else None,
        observation.trainer,
        (gateway.boot_id, gateway.seq) if gateway else None,
        observation.view.daemon.alive,
        observation.checkpoints[-1] if observation.checkpoints else None,
        len(observation.checkpoints),
    )


async def observations(watch: Watch, known: int) -> AsyncGenerator[Observation, None]:
    """Yield every observation that is newer than number `known`."""
    with watch.watching():
        while True:
            observation = await watch.after(known)
            known = observation.number
            yield observation
