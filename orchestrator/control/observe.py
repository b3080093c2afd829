"""One look at the world: cloud, gateway, trainer, commands. A party that does not answer is None, never empty."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import structlog

from checkpoint.records import documents
from checkpoint.records.documents import ControllerMachine
from checkpoint.records.metrics import Row, StepTiming
from checkpoint.store.document import Unreadable
from checkpoint.store.errors import Corrupt, StoreError
from checkpoint.store.run_store import Store
from checkpoint.stream import transfer
from checkpoint.stream.catalog import Catalog, Revision
from orchestrator.clouds.protocol import Cloud, CloudUnavailable
from orchestrator.control.metrics_watch import MetricsWatch
from orchestrator.control.prices import Prices
from orchestrator.control.run_clock import awake_or_asleep_s
from policies.fleet.market import may_fall_back
from policies.ledger.rentals import ControllerRental
from policies.model import exit_codes
from policies.model.spec import Budget, RunSpec
from policies.model.state import RunState
from policies.model.vocabulary import PolicyVersion, Precedence
from policies.serving.gateway_status import GatewayStatus
from policies.serving.joining import Stage, gets_on
from policies.serving.wire import STATUS_S
from policies.tick.snapshot import (
    Command,
    ControllerCost,
    Gateway,
    LaunchRefused,
    Machine,
    Measured,
    Snapshot,
    Stored,
    Trainer,
)

log = structlog.get_logger()

T = TypeVar("T")

FRESH_S = 3 * STATUS_S  # what is older than this says nothing about now
# A store takes as much for a listing as for a dozen reads, so that nothing is listed with each look.
GATEWAYS_EVERY_S = 5.0  # while one is heard: another may have come beside it
GATEWAYS_APART_S = 1.0  # while none is
COMMANDS_EVERY_S = 3.0
STAYS_EVERY_S = 60.0  # of the controller's machine, which is there before its daemon and goes after it


class GatewayWatch:
    """What the gateway last wrote of itself, as long as that is fresh.

    The gateway writes on a machine with another clock, so that the time of its writing would prove nothing. What
    was not there at one look and is there at the next was written in between: it is not older than the first look.

    Args:
        store: the run's store.
        believe_first: take what the first look finds for fresh, though nothing shows when it was written.
        clock: seconds on a clock of this machine that never goes back.
        unreadable: takes note of what is damaged, which counts as not there.
    """

    def __init__(
        self,
        store: Store,
        *,
        believe_first: bool = False,
        clock: Callable[[], float] = awake_or_asleep_s,
        unreadable: Unreadable | None = None,
    ) -> None:
        self._store = store
        self._unreadable = unreadable or Unreadable()
        self._clock = clock
        self._status: GatewayStatus | None = None
        self._looked_at_s = clock() if believe_first else -math.inf
        self._written_after_s = -math.inf
        self._by: Precedence | None = None  # whose gateway it is
        self._listed_at_s = -math.inf
        self._only_until_s = self._looked_at_s  # until then there was no other
        self._heard_from_s: float | None = None  # the first look of an unbroken row that found it fresh
        self._heard_at_s = -math.inf  # the newest look that did

    @property
    def heard_s(self) -> float:
        """Seconds for which it has been heard without a break, until now; 0: the last look did not hear it."""
        return 0.0 if self._heard_from_s is None else self._clock() - self._heard_from_s

    @property
    def silent_s(self) -> float:
        """Seconds since the last look that heard it; infinite: none has."""
        return self._clock() - self._heard_at_s

    def look(self) -> GatewayStatus | None:
        """Return the newest status of the run's gateway, or None when it may be older than FRESH_S.

        Raises StoreError when the store cannot be read.
        """
        status = self._look()
        if status is None:
            self._heard_from_s = None
            return None
        self._heard_at_s = self._clock()
        if self._heard_from_s is None:
            self._heard_from_s = self._heard_at_s
        return status

    def _look(self) -> GatewayStatus | None:
        now_s = self._clock()
        by = self._newest(now_s)
        if by is None:
            self._looked_at_s = now_s
            return None
        address = documents.gateway(by).read(self._store, self._unreadable)
        found = documents.members(by).read(self._store, self._unreadable)
        # Of the process before, on the same machine: the one that listens now has not written yet.
        if address is None or (found is not None and found.boot_id != address.boot_id):
            found = None
        if found is not None and self._is_news(found):
            self._status, self._written_after_s = found, self._looked_at_s
        self._looked_at_s = now_s
        if self._status is None or address is None or self._status.boot_id != address.boot_id:
            return None
        return self._status if self._clock() - self._written_after_s < FRESH_S else None

    def _newest(self, now_s: float) -> Precedence | None:
        """Whose gateway is the run's, as listed lately. One that is replaced is believed for so much longer, as a
        dead one is; what is new of the next one was written since it was not listed."""
        heard = self._by is not None and self._heard_from_s is not None
        if now_s - self._listed_at_s >= (GATEWAYS_EVERY_S if heard else GATEWAYS_APART_S):
            by = documents.newest_gateway(self._store)
            if by != self._by:  # kept, for the read that follows may fail
                self._looked_at_s = min(self._looked_at_s, self._only_until_s)
            self._by, self._listed_at_s, self._only_until_s = by, now_s, now_s
        return self._by

    def _is_news(self, found: GatewayStatus) -> bool:
        known = self._status
        return known is None or found.boot_id != known.boot_id or found.seq > known.seq


class TrainerWatch:
    """The trainer's heartbeat, dated by this machine's clock: its own may differ by more than a beat's life.

    The first one found counts as new: a trainer that is dead is noticed so much later by a new controller.

    Attributes:
        moved_at_s: when what it fetches or stores last got on.
        stepped_at_s: when the step that it is at was first seen.
    """

    def __init__(self, store: Store, unreadable: Unreadable | None = None) -> None:
        self._store = store
        self._unreadable = unreadable or Unreadable()
        self._said: Trainer | None = None
        self._seen_at_s = 0.0
        self._mark: Stage | None = None  # at which it had got on then
        self.moved_at_s = self.stepped_at_s = -math.inf

    def look(self, now_s: float) -> Trainer | None:
        """Return the newest beat with the time at which it was first seen. Raises StoreError."""
        beat = documents.TRAINER.read(self._store, self._unreadable)
        if beat is not None and (self._said is None or beat.step != self._said.step):
            self.stepped_at_s = now_s
        if beat != self._said:
            self._said, self._seen_at_s = beat, now_s
        stage = None if beat is None else beat.stage
        if stage is not None and (self._mark is None or gets_on(self._mark, stage)):
            self.moved_at_s = now_s
        if stage is None or self.moved_at_s == now_s:
            self._mark = stage
        return None if beat is None else replace(beat, beat_at_s=self._seen_at_s)


class CommandWatch:
    """What users have asked for, listed now and then."""

    def __init__(self, store: Store, clock: Callable[[], float], unreadable: Unreadable) -> None:
        self._store, self._clock, self._unreadable = store, clock, unreadable
        self._found: tuple[Command, ...] = ()
        self._listed_at_s = -math.inf

    def look(self, state: RunState) -> tuple[Command, ...]:
        """Return those that are not taken yet. Raises StoreError."""
        now_s = self._clock()
        if now_s - self._listed_at_s >= COMMANDS_EVERY_S:
            left_out = set(state.set_aside)
            self._found = documents.read_commands(self._store, self._unreadable, left_out)
            self._listed_at_s = now_s
        return tuple(one for one in self._found if one.command_id not in state.commands_taken)


class ControllerCosts:
    """What the machine of a `--remote` daemon costs, read now and then."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store, self._clock = store, clock
        self._machine: ControllerMachine | None = None
        self._before: tuple[ControllerRental, ...] = ()
        self._read_at_s = -math.inf

    def look(self) -> tuple[float, float]:
        """Return what it and those before it have cost, USD, and what it costs an hour. Raises StoreError."""
        now_s = self._clock()
        if now_s - self._read_at_s >= STAYS_EVERY_S:
            self._machine = documents.CONTROLLER.read(self._store)
            self._before = () if self._machine else documents.controller_stays(self._store, 0.0)
            self._read_at_s = now_s
        stays = self._before if self._machine is None else self._machine.stays(time.time())
        return sum(one.usd for one in stays), 0.0 if self._machine is None else self._machine.usd_per_h


class Observer:
    """Looks. Remembers of earlier looks only what shows whether gateway and trainer are alive, and the metrics.

    Args:
        store: the run's store.
        cloud: where the machines are.
        spec: the run's.
        clock: as GatewayWatch's.
        prices: asks the cloud what machines may cost.
    """

    def __init__(
        self,
        store: Store,
        cloud: Cloud,
        spec: RunSpec,
        clock: Callable[[], float] = awake_or_asleep_s,
        prices: Callable[[Cloud], Prices] = Prices,
    ) -> None:
        self._store = store
        self._cloud = cloud
        self._unreadable = Unreadable()
        self._gateway = GatewayWatch(store, clock=clock, unreadable=self._unreadable)
        self._trainer = TrainerWatch(store, self._unreadable)
        self._commands = CommandWatch(store, clock, self._unreadable)
        self._controller = ControllerCosts(store, clock)
        logging_steps = int(spec.grpo.get("logging_steps", 1))
        self._metrics = MetricsWatch(store, spec.policies.kl, logging_steps, self._unreadable)
        self._catalog = Catalog(store, "controller")
        self._spec, self._budgeted = spec, spec.budget != Budget()
        self._prices = prices(cloud)
        self._pooled = spec.cloud == "sky"

    def look(
        self, now_s: float, refused: tuple[LaunchRefused, ...], state: RunState, steady_s: float = math.inf
    ) -> Snapshot:
        """Return what is there now. Raises StoreError when the store cannot be read.

        What is read only now and then depends on what the run is at: `state`. `steady_s`: for how long the
        controller has looked without a break, which ends here if the cloud does not answer.
        """
        status = self._gateway.look()
        machines = self._machines()
        trainer = self._trainer.look(now_s)
        commands = self._commands.look(state)
        target_wanted = _wants_a_target(state, machines, commands)
        watched = self._watching(trainer, partial(self._metrics.look, trainer, state.forks))
        budgeted = self._budgeted or state.money.cap_usd is not None  # which a user may set later
        priced = budgeted or may_fall_back(self._spec)
        return Snapshot(
            now_s=now_s,
            machines=machines,
            members=None if status is None else {one.node: one for one in status.members},
            coming={} if status is None else {one.node: one for one in status.coming},
            gateway=Gateway(
                None if status is None else status.boot_id,
                0.0 if status is None else status.up_s,
                self._gateway.heard_s,
                self._gateway.silent_s,
            ),
            trainer=trainer,
            trainer_moved_at_s=self._trainer.moved_at_s,
            stepped_at_s=self._trainer.stepped_at_s,
            refused=refused,
            commands=commands,
            watched=watched,
            prices=self._prices.look() if priced else None,
            pools=self._prices.pools() if self._pooled else (),
            prices_trouble=self._prices.trouble(),
            controller=ControllerCost(*self._controller.look()) if budgeted else ControllerCost(),
            measured=Measured(
                self._watching(trainer, self._metrics.step_shape), self._watching(trainer, self._metrics.own_step)
            ),
            store=self._stored(state, target_wanted=target_wanted),
            steady_s=0.0 if machines is None else steady_s,
        )

    def _stored(self, state: RunState, *, target_wanted: bool) -> Stored:
        catalog, damaged = self._checkpoints() if target_wanted else (None, "")
        return Stored(
            checkpoints=None if catalog is None else tuple(one.at for one in catalog.checkpoints),
            damaged=damaged,
            ever_stored=catalog is not None and catalog.number > 0,
            timeline=documents.newest_timeline(self._store) if state.rollback is not None or target_wanted else 0,
            exported_to=None if state.healthy is None else self._exported_to(state.healthy),
            unreadable=dict(self._unreadable.found),
        )

    def _watching(self, trainer: Trainer | None, look: Callable[[], T]) -> T | None:
        """Return what `look` makes of the metrics. An error in watching them must not end what is watched."""
        try:
            return look()
        except StoreError:
            raise
        except Exception as error:
            log.exception("watch_failed", what="metrics")
            self._unreadable.note_failure("metrics", 0 if trainer is None else trainer.step, error)
            return None

    def newest_row(self) -> Row | None:
        """The newest logged step that was looked at."""
        return self._metrics.newest_row()

    def newest_timing(self) -> StepTiming | None:
        """The timing of the newest logged step that has one."""
        return self._metrics.newest_timing()

    def _checkpoints(self) -> tuple[Revision | None, str]:
        """What is listed, or why that cannot be read: then there is no going back, but a run can be stopped."""
        try:
            return self._catalog.newest(), ""
        except Corrupt as error:
            return None, str(error)

    def _exported_to(self, version: str) -> str | None:
        export = transfer.export_of(PolicyVersion.parse(version)).read(self._store, self._unreadable)
        return None if export is None else export.prefix

    def _machines(self) -> dict[str, Machine] | None:
        try:
            return self._cloud.machines()
        except CloudUnavailable:
            return None


def _wants_a_target(state: RunState, machines: Mapping[str, Machine] | None, commands: Sequence[Command]) -> bool:
    """Whether a rollback may be decided now, so that the checkpoints must be known."""
    out_of_memory = any(one.exit_code == exit_codes.OUT_OF_MEMORY for one in (machines or {}).values())
    return state.diverged is not None or out_of_memory or any(one.kind == "rollback" for one in commands)
