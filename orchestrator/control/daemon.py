"""The daemon: a process that controls one run.

`python -m grpo_orch.orchestrator.control.daemon STORE-URL REASON [EPOCH]` takes over the run (with EPOCH only if
that is still the newest and no other daemon lives) and ticks until the run has ended. The daemon may die at any
point: training continues without it, and the next daemon continues from the journal. SIGTERM stops it and leaves
all machines as they are.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from shlex import quote

import structlog

from grpo_orch.checkpoint.journal import Fenced, Journal
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.security.redaction import Redactor, guard_output
from grpo_orch.checkpoint.security.vouched import UntrustedRun
from grpo_orch.checkpoint.store.document import UnreadableDocuments
from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.checkpoint.store.run_store import OPTIONS_ENV, Store
from grpo_orch.orchestrator import home
from grpo_orch.orchestrator.clouds import open_cloud
from grpo_orch.orchestrator.clouds.protocol import Cloud, CloudRefused, CloudUnavailable
from grpo_orch.orchestrator.control.actuate import Actuator
from grpo_orch.orchestrator.control.controller import Controller
from grpo_orch.orchestrator.control.exporter import Exporter, Seen
from grpo_orch.orchestrator.control.lease import RENEW_S, is_alive, own_lease
from grpo_orch.orchestrator.control.observe import Observer
from grpo_orch.orchestrator.control.run_clock import RunClock
from grpo_orch.orchestrator.home import (
    HomeUnusable,
    all_secrets,
    missing_secrets,
    run_token,
    secret_environment,
    secrets_for,
    token_mark,
)
from grpo_orch.orchestrator.notify import DRAIN_S, start_notifier
from grpo_orch.policies.fleet.explain import Explanation, explain
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import Event, RunCreated, RunMoved
from grpo_orch.policies.model.node_contract import (
    ATTEMPT_ENV,
    DEAD_MAN_ENV,
    NODE_ENV,
    RUN_ENV,
    TIMELINE_ENV,
    TOKEN_ENV,
)
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.state import RunState
from grpo_orch.policies.model.vocabulary import Refusal, RunPhase, role_of
from grpo_orch.policies.tick.snapshot import Decision, Launch, Snapshot

log = structlog.get_logger()

STORE_RETRY_S = 10.0  # within one tick; the next tick retries after a longer outage
TROUBLE_WAIT_S = 5.0
PLAN_EVERY_S = 30.0  # minimum interval between writes of the plan; unchanged plans are not written
CLEAN_UP_S = 300.0  # AWS takes minutes to shut a large machine down


def main() -> int:
    log_as_json()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops only the command that watches
    try:
        store = Store(sys.argv[1], retry_s=STORE_RETRY_S)
        guard_output(_redactor(home.known_run(store)[0]))
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stdout))
        return control_run(store, sys.argv[2], stop, *map(int, sys.argv[3:4]))
    except Fenced as error:
        log.warning("fenced", error=str(error))
        return exit_codes.HELD
    except UntrustedRun as error:
        log.error("run_untrusted", error=str(error))
        return exit_codes.BAD_SPEC
    except StoreError as error:
        log.error("store_failed", error=str(error))
        return exit_codes.FAILED
    except HomeUnusable as error:
        log.error("home_unusable", error=str(error))
        return exit_codes.FAILED


def log_as_json() -> None:
    """Log lines of JSON, with tracebacks."""
    structlog.configure(
        processors=[
            *structlog.get_config()["processors"][:-2],
            structlog.processors.TimeStamper(fmt="iso"),  # to the microsecond, whatever the zone
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ]
    )


def control_run(store: Store, reason: str, stop: threading.Event, after_epoch: int | None = None) -> int:
    """Take over the run and control it to its end, or until `stop`. Raises Fenced, UntrustedRun, StoreError.

    With `after_epoch`, raises Fenced if another daemon has taken over since that epoch.
    """
    record, run_json = home.known_run(store)
    host, pid = socket.gethostname(), os.getpid()
    clock, journal = RunClock(), Journal(store, f"{host}/{pid}")
    if after_epoch is not None:
        _refuse_held(store)
    state = journal.take_over(clock.now_s(), host, pid, reason, after_epoch)
    token = run_token(record.run_id)
    if not state.nodes:
        documents.SECRET_MARK.write(store, token_mark(token))
    home.sign_run(store, token, run_json)
    cloud = open_cloud(record, store)
    redact = _redactor(record)
    notifier = start_notifier(store, record, os.environ)
    actuator = Actuator(cloud, store, partial(_environment, record.spec, store.url, token), redact)
    observer = Observer(store, cloud, record.spec)
    controller = Controller(store, record.spec, journal, state, observer, actuator)
    opening = _opening(controller, record, reason)
    if opening:
        controller.record(clock.now_s(), opening)
    renew(store, controller, journal.epoch, clock.now_s())
    exporter = Exporter(record.spec.name)
    if record.spec.metrics_port is not None:
        exporter.serve(record.spec.metrics_port)
    plans = PlanWriter(store, record.spec)

    def ticked(before: RunState, decision: Decision, took_s: float) -> None:
        if controller.state is not before:
            notifier.wake()
        if controller.seen is not None:
            plans.ticked(controller.state, controller.seen)
            row, timing = observer.metrics.newest_row(), observer.metrics.newest_timing()
            seen = Seen(controller.state, controller.seen, row, timing, took_s)
            exporter.ticked(before, decision.events, seen)

    drain_s = 0.0
    try:
        _loop(store, controller, clock, journal.epoch, stop, ticked)
        if controller.finished:
            _clean_up(store, cloud, controller, clock, journal.epoch, stop)
        drain_s = DRAIN_S
    finally:
        actuator.close()
        cloud.close()
        notifier.close(drain_s=drain_s)
    documents.LEASE.drop(store)
    return exit_codes.OK


def _refuse_held(store: Store) -> None:
    """Raise Fenced if another daemon took over while this process started."""
    lease = documents.LEASE.read(store, UnreadableDocuments())
    if lease is not None and is_alive(lease, time.time()):
        raise Fenced(f"{lease.writer} controls the run (epoch {lease.epoch})")


def _environment(spec: RunSpec, store_url: str, token: str, launch: Launch) -> dict[str, str]:
    """Return a node's environment, with secrets. Raises CloudRefused if a secret is missing here."""
    if problem := missing_secrets(spec, os.environ):
        raise CloudRefused(Refusal.CREDENTIALS, f"{problem}; export it and `grpo-orch resume {quote(store_url)}`")
    environment = {
        **secret_environment(secrets_for(spec, role_of(launch.slot), os.environ)),
        RUN_ENV: store_url,
        NODE_ENV: launch.node,
        ATTEMPT_ENV: str(launch.attempt),
        TIMELINE_ENV: str(launch.timeline),
        TOKEN_ENV: token,
        DEAD_MAN_ENV: f"{60 * spec.policies.fleet.dead_man_min:g}",
    }
    options = os.environ.get(OPTIONS_ENV)  # remote machines do not inherit it
    return environment if options is None else {**environment, OPTIONS_ENV: options}


def _redactor(record: RunRecord) -> Redactor:
    """Return a redactor of all secrets that the run's machines receive."""
    return Redactor([run_token(record.run_id), *all_secrets(record.spec, os.environ).values()])


def _opening(controller: Controller, record: RunRecord, reason: str) -> tuple[Event, ...]:
    """Return the events of the take-over: the run begins, or an ended run resumes."""
    if not controller.state.name:  # no daemon has recorded RunCreated, though one may have taken over and died
        return (RunCreated(record.spec.name, record.run_id),)
    ended = controller.state.phase in (RunPhase.STOPPED, RunPhase.STOPPING, RunPhase.FAILED)
    ended |= controller.state.phase is RunPhase.PAUSED and controller.state.money.is_reached
    return (RunMoved(RunPhase.STARTING, "resumed"),) if ended and reason == "resume" else ()


def renew(store: Store, controller: Controller, epoch: int, now_s: float) -> None:
    """Renew the lease, unless another controller took over. `now_s` is RunClock's. Raises Fenced, StoreError."""
    controller.fence()
    documents.LEASE.write(store, own_lease(epoch, time.time(), now_s))


def _loop(
    store: Store,
    controller: Controller,
    clock: RunClock,
    epoch: int,
    stop: threading.Event,
    ticked: Callable[[RunState, Decision, float], None],
) -> None:
    renewed_at_s = 0.0
    while not (stop.is_set() or controller.finished):
        wait_s = TROUBLE_WAIT_S
        try:
            if clock.now_s() - renewed_at_s > RENEW_S:
                renew(store, controller, epoch, clock.now_s())
                renewed_at_s = clock.now_s()
            before, begun_s = controller.state, time.monotonic()
            decision = controller.tick(clock.now_s())
            wait_s = decision.requeue_after_s
            ticked(before, decision, time.monotonic() - begun_s)
        except Fenced:
            raise
        except StoreError as error:
            controller.interrupt()
            log.warning("store_unavailable", error=str(error))
        except Exception:  # the daemon's loop: a bug in one tick must not end it
            log.exception("tick_failed")
        stop.wait(wait_s)


def _clean_up(
    store: Store, cloud: Cloud, controller: Controller, clock: RunClock, epoch: int, stop: threading.Event
) -> None:
    """Delete what the machines shared in the cloud, for up to CLEAN_UP_S. Raises Fenced, StoreError."""
    deadline_s = time.monotonic() + CLEAN_UP_S
    while not stop.is_set() and time.monotonic() < deadline_s:
        renew(store, controller, epoch, clock.now_s())
        try:
            cloud.clean_up()
            return
        except CloudUnavailable as error:
            log.warning("clean_up_failed", error=str(error))
        stop.wait(TROUBLE_WAIT_S)


class PlanWriter:
    """Writes a tick's plan to the store, for `grpo-orch explain`. Ignores store errors: a run does not need it."""

    def __init__(self, store: Store, spec: RunSpec) -> None:
        self._store, self._spec = store, spec
        self._written: Explanation | None = None
        self._explained_at_s = -math.inf

    def ticked(self, state: RunState, snapshot: Snapshot) -> None:
        previous = self._written
        if snapshot.now_s - self._explained_at_s < PLAN_EVERY_S:
            return
        plan = explain(state, snapshot, self._spec)
        self._explained_at_s = snapshot.now_s
        if previous is None or replace(plan, at_s=previous.at_s) != previous:
            with contextlib.suppress(StoreError):  # retried after PLAN_EVERY_S
                documents.PLAN.write(self._store, plan)
                self._written = plan


if __name__ == "__main__":
    sys.exit(main())
