"""Does what was decided, in threads; failures come back as observations.

Of each kind one call at a time for each node, or each version: a machine can be given up while it is still being
launched.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import assert_never

import structlog

from checkpoint import exports, timelines
from checkpoint.errors import StoreError
from checkpoint.store import Store
from orchestrator.clouds.protocol import Cloud, CloudRefused, CloudUnavailable, Order
from policies.snapshot import Action, Confirm, Export, Launch, LaunchRefused, Terminate, WriteFork
from policies.vocabulary import PolicyVersion, Refusal, Role

log = structlog.get_logger()

UNAVAILABLE_WAIT_S = 2.0  # before a call that the cloud did not answer is made again
CLOSE_S = 5.0


class Actuator:
    """Runs actions against a cloud and the run's store. `environment_of` gives a launch its environment, secrets
    included."""

    def __init__(self, cloud: Cloud, store: Store, environment_of: Callable[[Launch], dict[str, str]]) -> None:
        self._cloud = cloud
        self._store = store
        self._environment_of = environment_of
        self._running: dict[tuple[str, type[Action]], tuple[Action, Future[None]]] = {}
        self._not_before_s: dict[tuple[str, type[Action]], float] = {}

    def submit(self, actions: tuple[Action, ...]) -> None:
        """Start each action unless one like it is running for its node; what is skipped is asked for again."""
        for action in actions:
            key = (_subject(action), type(action))
            if key not in self._running and time.monotonic() >= self._not_before_s.get(key, 0.0):
                self._running[key] = (action, self._start(action))

    def collect(self) -> tuple[LaunchRefused, ...]:
        """Return the launches that were refused since the last call. Raises what a bug in a cloud raised."""
        refused = []
        for key, (action, future) in list(self._running.items()):
            if not future.done():
                continue
            del self._running[key]
            of = key[0]
            try:
                future.result()
            except CloudRefused as error:
                refused.append(LaunchRefused(of, error.refusal, str(error)))
            except (CloudUnavailable, StoreError) as error:
                self._not_before_s[key] = time.monotonic() + UNAVAILABLE_WAIT_S
                log.warning("not_done_yet", action=type(action).__name__, of=of, error=str(error))
            except OSError as error:
                if isinstance(action, Launch):
                    refused.append(LaunchRefused(of, Refusal.UNKNOWN, str(error)))
                else:
                    log.warning("action_failed", action=type(action).__name__, of=of, error=str(error))
        return tuple(refused)

    def close(self) -> None:
        """Wait a moment for what is running. What takes longer is cut off with this process, as a crash would: the
        next controller finds what became of it."""
        wait([future for _, future in self._running.values()], CLOSE_S)

    def _start(self, action: Action) -> Future[None]:
        """Do it in a thread of its own, which does not keep this process alive."""
        future: Future[None] = Future()

        def run() -> None:
            try:
                self._do(action)
            except BaseException as error:  # noqa: BLE001 `collect` raises it
                future.set_exception(error)
            else:
                future.set_result(None)

        threading.Thread(target=run, name=f"{type(action).__name__} {_subject(action)}", daemon=True).start()
        return future

    def _do(self, action: Action) -> None:
        match action:
            case Launch():
                role = Role(action.slot.split("-")[0])
                order = Order(action.node, role, action.market, action.attempt, self._environment_of(action))
                self._cloud.launch(order)
            case Terminate():
                self._cloud.terminate(action.node)
            case Confirm():
                self._cloud.confirm(action.node)
            case WriteFork():
                timelines.write_fork(self._store, action.fork)
            case Export():
                exports.export_weights(self._store, PolicyVersion.parse(action.version))
            case _:
                assert_never(action)


def _subject(action: Action) -> str:
    """What the action is done to: a node, a timeline or a version."""
    match action:
        case WriteFork():
            return f"timeline {action.fork.timeline}"
        case Export():
            return action.version
        case _:
            return action.node
