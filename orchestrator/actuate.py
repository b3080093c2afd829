"""Does what was decided, in threads; failures come back as observations.

Of each kind one call at a time for each node: a machine can be given up while it is still being launched.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import assert_never

import structlog

from orchestrator.clouds.protocol import Cloud, CloudRefused, CloudUnavailable, Order
from policies.snapshot import Action, Confirm, Launch, LaunchRefused, Terminate
from policies.vocabulary import Refusal, Role

log = structlog.get_logger()

UNAVAILABLE_WAIT_S = 2.0  # before a call that the cloud did not answer is made again
CLOSE_S = 5.0


class Actuator:
    """Runs actions against a cloud. `environment_of` gives a launch its environment, secrets included."""

    def __init__(self, cloud: Cloud, environment_of: Callable[[Launch], dict[str, str]]) -> None:
        self._cloud = cloud
        self._environment_of = environment_of
        self._running: dict[tuple[str, type[Action]], tuple[Action, Future[None]]] = {}
        self._not_before_s: dict[tuple[str, type[Action]], float] = {}

    def submit(self, actions: tuple[Action, ...]) -> None:
        """Start each action unless one like it is running for its node; what is skipped is asked for again."""
        for action in actions:
            key = (action.node, type(action))
            if key not in self._running and time.monotonic() >= self._not_before_s.get(key, 0.0):
                self._running[key] = (action, self._start(action))

    def collect(self) -> tuple[LaunchRefused, ...]:
        """Return the launches that were refused since the last call. Raises what a bug in a cloud raised."""
        refused = []
        for key, (action, future) in list(self._running.items()):
            if not future.done():
                continue
            del self._running[key]
            node = action.node
            try:
                future.result()
            except CloudRefused as error:
                refused.append(LaunchRefused(node, error.refusal, str(error)))
            except CloudUnavailable as error:
                self._not_before_s[key] = time.monotonic() + UNAVAILABLE_WAIT_S
                log.warning("cloud_unavailable", action=type(action).__name__, node=node, error=str(error))
            except OSError as error:
                if isinstance(action, Launch):
                    refused.append(LaunchRefused(node, Refusal.UNKNOWN, str(error)))
                else:
                    log.warning("action_failed", action=type(action).__name__, node=node, error=str(error))
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

        threading.Thread(target=run, name=f"{type(action).__name__} {action.node}", daemon=True).start()
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
            case _:
                assert_never(action)
