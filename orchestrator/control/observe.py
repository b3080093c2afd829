"""Observe the cloud, the gateway, the trainer and commands. A source that does not answer is None, never empty."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

import structlog

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import ControllerMachine
from grpo_orch.checkpoint.store.document import UnreadableDocuments
from grpo_orch.checkpoint.store.errors import Corrupt, StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream.catalog import Catalog, Revision
from grpo_orch.orchestrator.clouds.protocol import Cloud, CloudRefused, CloudUnavailable, Offer
from grpo_orch.orchestrator.control.metrics_watch import MetricsWatch
from grpo_orch.orchestrator.control.run_clock import awake_or_asleep_s
from grpo_orch.policies.fleet.market import may_fall_back
from grpo_orch.policies.ledger.rentals import ControllerRental
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.pools import PoolOffer
from grpo_orch.policies.model.spec import Budget, RunSpec
from grpo_orch.policies.model.state import RunState
from grpo_orch.policies.model.vocabulary import Precedence, kind_of
from grpo_orch.policies.serving.gateway_status import GatewayStatus
from grpo_orch.policies.serving.joining import Stage, makes_progress
from grpo_orch.policies.serving.wire import STATUS_S
from grpo_orch.policies.tick.snapshot import (
    Command,
    ControllerCost,
    Gateway,
    LaunchRefused,
    Machine,
    Snapshot,
    Stored,
    Trainer,
)

log = structlog.get_logger()

T = TypeVar("T")

FRESH_S = 3 * STATUS_S  # an older status says nothing about the present
# A listing costs as much as a dozen reads, so listings are less frequent than ticks.
GATEWAYS_EVERY_S = 5.0  # while a gateway is alive; another may have started
GATEWAYS_MISSING_EVERY_S = 1.0  # without a live gateway
COMMANDS_EVERY_S = 3.0
RENTALS_EVERY_S = 60.0  # of the controller's machine, which outlives its daemon


class GatewayWatch:
    """Returns the gateway's last status while it is fresh.

    The gateway's clock differs from this machine's, so the time in a status proves nothing. But a status that is
    new since the previous look was written after that look.

    Args:
        store: the run's store.
        trust_first: treat the first status as fresh, though its age is unknown.
        clock: seconds on a clock of this machine that never goes back.
        unreadable: records damaged objects, which count as missing.
    """

    def __init__(
        self,
        store: Store,
        *,
        trust_first: bool = False,
        clock: Callable[[], float] = awake_or_asleep_s,
        unreadable: UnreadableDocuments | None = None,
    ) -> None:
        self._store = store
        self._unreadable = unreadable or UnreadableDocuments()
        self._clock = clock
        self._status: GatewayStatus | None = None
        self._looked_at_s = clock() if trust_first else -math.inf
        self._written_after_s = -math.inf
        self._precedence: Precedence | None = None  # of the gateway's trainer
        self._listed_at_s = -math.inf
        self._only_until_s = self._looked_at_s  # the last listing without another gateway
        self._fresh_since_s: float | None = None  # the first of an unbroken sequence of fresh looks
        self._fresh_at_s = -math.inf  # the last fresh look

    @property
    def contact_s(self) -> float:
        """Seconds for which every look was fresh; 0 if the last one was not."""
        return 0.0 if self._fresh_since_s is None else self._clock() - self._fresh_since_s

    @property
    def silent_s(self) -> float:
        """Seconds since the last fresh look; infinite if there was none."""
        return self._clock() - self._fresh_at_s

    def observe(self) -> GatewayStatus | None:
        """Return the newest status of the run's gateway, or None when it may be older than FRESH_S.

        Raises StoreError when the store cannot be read.
        """
        status = self._look()
        if status is None:
            self._fresh_since_s = None
            return None
        self._fresh_at_s = self._clock()
        if self._fresh_since_s is None:
            self._fresh_since_s = self._fresh_at_s
        return status

    def _look(self) -> GatewayStatus | None:
        now_s = self._clock()
        precedence = self._newest(now_s)
        if precedence is None:
            self._looked_at_s = now_s
            return None
        address = documents.gateway(precedence).read(self._store, self._unreadable)
        status = documents.members(precedence).read(self._store, self._unreadable)
        # A status of the previous process on the same machine: the current one has not written yet.
        if address is None or (status is not None and status.boot_id != address.boot_id):
            status = None
        if status is not None and self._is_new(status):
            self._status, self._written_after_s = status, self._looked_at_s
        self._looked_at_s = now_s
        if self._status is None or address is None or self._status.boot_id != address.boot_id:
            return None
        return self._status if self._clock() - self._written_after_s < FRESH_S else None

    def _newest(self, now_s: float) -> Precedence | None:
        """Return the precedence of the run's gateway from the last listing, refreshed now and then.

        A replaced gateway is used until the next listing, like a dead one. The first status of a new gateway was
        written after the last listing without it.
        """
        is_alive = self._precedence is not None and self._fresh_since_s is not None
        if now_s - self._listed_at_s >= (GATEWAYS_EVERY_S if is_alive else GATEWAYS_MISSING_EVERY_S):
            precedence = documents.newest_gateway(self._store)
            if precedence != self._precedence:  # stored now, as the next read may fail
                self._looked_at_s = min(self._looked_at_s, self._only_until_s)
            self._precedence, self._listed_at_s, self._only_until_s = precedence, now_s, now_s
        return self._precedence

    def _is_new(self, status: GatewayStatus) -> bool:
        known = self._status
        return known is None or status.boot_id != known.boot_id or status.seq > known.seq


class TrainerWatch:
    """Reads the trainer's heartbeat and dates it by this machine's clock; the trainer's may be far off.

    The first heartbeat counts as new, so a new controller detects a dead trainer later.

    Attributes:
        moved_at_s: when its downloads or uploads last made progress.
    """

    def __init__(self, store: Store, unreadable: UnreadableDocuments | None = None) -> None:
        self._store = store
        self._unreadable = unreadable or UnreadableDocuments()
        self._heartbeat: Trainer | None = None
        self._seen_at_s = 0.0
        self._last_stage: Stage | None = None  # when it last made progress
        self.moved_at_s = -math.inf

    def observe(self, now_s: float) -> Trainer | None:
        """Return the newest heartbeat with the time at which it was first seen. Raises StoreError."""
        heartbeat = documents.TRAINER.read(self._store, self._unreadable)
        if heartbeat != self._heartbeat:
            self._heartbeat, self._seen_at_s = heartbeat, now_s
        stage = None if heartbeat is None else heartbeat.stage
        if stage is not None and (self._last_stage is None or makes_progress(self._last_stage, stage)):
            self.moved_at_s = now_s
        if stage is None or self.moved_at_s == now_s:
            self._last_stage = stage
        return None if heartbeat is None else replace(heartbeat, beat_at_s=self._seen_at_s)


class Periodic(Generic[T]):
    """A value that is read again every `every_s`."""

    def __init__(self, every_s: float, clock: Callable[[], float], read: Callable[[], T]) -> None:
        self._every_s, self._clock, self._read = every_s, clock, read
        self._found: T | None = None
        self._read_at_s = -math.inf

    def get(self) -> T:
        """Return the value. Passes on exceptions of `read`, which is then called again the next time."""
        now_s = self._clock()
        if self._found is None or now_s - self._read_at_s >= self._every_s:
            self._found = self._read()
            self._read_at_s = now_s
        return self._found


REFRESH_S = 3600.0  # spot prices change within hours
RETRY_S = 30.0
MAX_FAILURES = 5  # in a row; after that machines are bought wherever the cloud finds them


class Prices:
    """Prices by `kind_of`, and pools, requested from the cloud in a background thread.

    The first `observe` or `pools` starts the requests.
    """

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._known: Mapping[str, float] | None = None
        self._pools: tuple[PoolOffer, ...] | None = None
        self._failures = 0  # in a row
        self._error = ""
        self._requested_at_s = -REFRESH_S
        self._request: threading.Thread | None = None

    def observe(self) -> Mapping[str, float] | None:
        """Return the latest prices; None before the first answer. Does not wait."""
        self._refresh()
        return self._known

    def pools(self) -> tuple[PoolOffer, ...] | None:
        """Return the latest pools; None before the first answer. Does not wait.

        Empty if the cloud offers no suitable pool, which a launch reports, or after MAX_FAILURES.
        """
        self._refresh()
        if self._pools is None and self._failures >= MAX_FAILURES:
            return ()
        return self._pools

    def trouble(self) -> str:
        """Return the last error after MAX_FAILURES without any answer, else an empty string. Retries continue."""
        is_unknown = self._known is None or self._pools is None
        return self._error if is_unknown and self._failures >= MAX_FAILURES else ""

    def _refresh(self) -> None:
        every_s = RETRY_S if self._known is None or self._failures else REFRESH_S
        is_idle = self._request is None or not self._request.is_alive()
        if is_idle and awake_or_asleep_s() - self._requested_at_s >= every_s:
            self._request = threading.Thread(target=self.fetch, name="prices", daemon=True)
            self._request.start()

    def fetch(self) -> None:
        """Request prices and pools now. Logs and counts a failure."""
        self._requested_at_s = awake_or_asleep_s()
        began_s = time.monotonic()
        try:
            self._known = dict(price for offer in self._cloud.offers() for price in _prices_of(offer))
            self._pools = tuple(self._cloud.pools())
        except Exception as error:  # in a thread: unlogged it would be lost, and no machine would be bought
            if isinstance(error, CloudRefused):
                self._pools = self._pools or ()
            self._failures += 1
            is_expected = isinstance(error, CloudRefused | CloudUnavailable | OSError)
            self._error = str(error) if is_expected else f"{type(error).__name__}: {error}"
            seconds = round(time.monotonic() - began_s, 1)
            log.warning("prices_unavailable", error=self._error, seconds=seconds, exc_info=not is_expected)
            return
        self._failures, self._error = 0, ""


def _prices_of(offer: Offer) -> Iterator[tuple[str, float]]:
    """Yield the highest price of each kind in an offer, on both markets."""
    yield kind_of(offer.role, offer.market), offer.max_usd_per_h
    if offer.other_market_max_usd_per_h is not None:
        yield kind_of(offer.role, offer.market.other), offer.other_market_max_usd_per_h


class Observer:
    """Returns snapshots. Keeps only `metrics`, and what shows whether the gateway and the trainer are alive.

    Args:
        store: the run's store.
        cloud: where the machines are.
        spec: the run's spec.
        clock: as for GatewayWatch.
        prices: creates the Prices of a cloud.
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
        self._unreadable = UnreadableDocuments()
        self._gateway = GatewayWatch(store, clock=clock, unreadable=self._unreadable)
        self._trainer = TrainerWatch(store, self._unreadable)
        self._skipped: set[str] = set()  # unreadable commands, which are not read again
        self._commands = Periodic(
            COMMANDS_EVERY_S, clock, lambda: documents.read_commands(store, self._unreadable, self._skipped)
        )
        self._controller = Periodic(RENTALS_EVERY_S, clock, self._read_controller)
        logging_steps = int(spec.grpo.get("logging_steps", 1))
        self.metrics = MetricsWatch(store, spec.policies.kl, logging_steps, self._unreadable)
        self._catalog = Catalog(store, "controller")
        self._spec, self._has_budget = spec, spec.budget != Budget()
        self._prices = prices(cloud)
        self._has_pools = spec.cloud == "sky"

    def observe(
        self, now_s: float, refused: tuple[LaunchRefused, ...], state: RunState, steady_s: float = math.inf
    ) -> Snapshot:
        """Return a snapshot. Raises StoreError when the store cannot be read.

        Args:
            now_s: seconds since the epoch.
            refused: launches refused since the last snapshot.
            state: decides which optional sources are read.
            steady_s: for how long the controller has observed without a gap; 0 if the cloud does not answer.
        """
        status = self._gateway.observe()
        machines = self._machines()
        trainer = self._trainer.observe(now_s)
        self._skipped = set(state.unreadable)
        commands = tuple(
            command for command in self._commands.get() if command.command_id not in state.commands_taken
        )
        needs_target = _needs_target(state, machines, commands)
        watched = self._watch(trainer, partial(self.metrics.observe, trainer, state.forks))
        has_budget = self._has_budget or state.money.cap_usd is not None  # a user may set one later
        needs_prices = has_budget or may_fall_back(self._spec)
        return Snapshot(
            now_s=now_s,
            machines=machines,
            members=None if status is None else {member.node: member for member in status.members},
            joining={} if status is None else {joining.node: joining for joining in status.joining},
            gateway=Gateway(
                None if status is None else status.boot_id,
                0.0 if status is None else status.up_s,
                self._gateway.contact_s,
                self._gateway.silent_s,
            ),
            trainer=trainer,
            trainer_moved_at_s=self._trainer.moved_at_s,
            refused=refused,
            commands=commands,
            verdict=watched,
            prices=self._prices.observe() if needs_prices else None,
            pools=self._prices.pools() if self._has_pools else (),
            prices_trouble=self._prices.trouble(),
            controller=self._controller_cost() if has_budget else ControllerCost(),
            step_shape=self._watch(trainer, self.metrics.step_shape),
            store=self._stored(state, needs_target=needs_target),
            steady_s=0.0 if machines is None else steady_s,
        )

    def _stored(self, state: RunState, *, needs_target: bool) -> Stored:
        catalog, damaged = self._checkpoints() if needs_target else (None, "")
        return Stored(
            checkpoints=None if catalog is None else tuple(checkpoint.at for checkpoint in catalog.checkpoints),
            damaged=damaged,
            ever_stored=catalog is not None and catalog.number > 0,
            timeline=documents.newest_timeline(self._store) if state.rollback is not None or needs_target else 0,
            unreadable=dict(self._unreadable.found),
        )

    def _watch(self, trainer: Trainer | None, observe: Callable[[], T]) -> T | None:
        """Return the result of `observe`, or None if it fails: an error in the metrics must not stop the run."""
        try:
            return observe()
        except StoreError:
            raise
        except Exception as error:
            log.exception("watch_failed", check="metrics")
            self._unreadable.note_failure("metrics", 0 if trainer is None else trainer.step, error)
            return None

    def _read_controller(self) -> tuple[ControllerMachine | None, tuple[ControllerRental, ...]]:
        """Return the machine of a `--remote` daemon or, without one, the rentals of earlier ones."""
        machine = documents.CONTROLLER.read(self._store)
        return machine, () if machine else documents.controller_rentals(self._store, 0.0)

    def _controller_cost(self) -> ControllerCost:
        machine, rentals = self._controller.get()
        rentals = rentals if machine is None else machine.rentals(time.time())
        usd_per_h = 0.0 if machine is None else machine.usd_per_h
        return ControllerCost(sum(rental.usd for rental in rentals), usd_per_h)

    def _checkpoints(self) -> tuple[Revision | None, str]:
        """Return the catalog, or why it is damaged: then no rollback is possible, but the run can be stopped."""
        try:
            return self._catalog.newest(), ""
        except Corrupt as error:
            return None, str(error)

    def _machines(self) -> dict[str, Machine] | None:
        try:
            return self._cloud.machines()
        except CloudUnavailable:
            return None


def _needs_target(state: RunState, machines: Mapping[str, Machine] | None, commands: Sequence[Command]) -> bool:
    """Return whether a rollback may be decided now, which needs the list of checkpoints."""
    is_out_of_memory = any(machine.exit_code == exit_codes.OUT_OF_MEMORY for machine in (machines or {}).values())
    has_command = any(command.kind == "rollback" for command in commands)
    return state.diverged is not None or is_out_of_memory or has_command
