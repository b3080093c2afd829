"""Does what was decided, in threads, one call at a time for each node; failures come back as observations."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import assert_never

import structlog

from orchestrator.clouds.protocol import Cloud, CloudRefused, CloudUnavailable, Order
from policies.snapshot import Action, Launch, LaunchRefused, Terminate
from policies.vocabulary import Refusal, Role

log = structlog.get_logger()

THREADS = 8


class Actuator:
    """Runs actions against a cloud. `environment_of` gives a launch its environment, secrets included."""

    def __init__(self, cloud: Cloud, environment_of: Callable[[Launch], dict[str, str]]) -> None:
        self._cloud = cloud
        self._environment_of = environment_of
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="actuate")
        self._running: dict[str, tuple[Action, Future[None]]] = {}

    def submit(self, actions: tuple[Action, ...]) -> None:
        """Start each action unless one is already running for its node; what is skipped is asked for again."""
        for action in actions:
            if action.node not in self._running:
                self._running[action.node] = (action, self._pool.submit(self._do, action))

    def collect(self) -> tuple[LaunchRefused, ...]:
        """Return the launches that were refused since the last call. Raises what a bug in a cloud raised."""
        refused = []
        for node, (action, future) in list(self._running.items()):
            if not future.done():
                continue
            del self._running[node]
            try:
                future.result()
            except CloudRefused as error:
                refused.append(LaunchRefused(node, error.refusal, str(error)))
            except CloudUnavailable as error:
                log.warning("cloud_unavailable", action=type(action).__name__, node=node, error=str(error))
            except OSError as error:
                if isinstance(action, Launch):
                    refused.append(LaunchRefused(node, Refusal.UNKNOWN, str(error)))
                else:
                    log.warning("action_failed", action=type(action).__name__, node=node, error=str(error))
        return tuple(refused)

    def close(self) -> None:
        """Wait for what is running, then end the threads."""
        self._pool.shutdown(wait=True)

    def _do(self, action: Action) -> None:
        match action:
            case Launch():
                role = Role(action.slot.split("-")[0])
                order = Order(action.node, role, action.market, action.attempt, self._environment_of(action))
                self._cloud.launch(order)
            case Terminate():
                self._cloud.terminate(action.node)
            case _:
                assert_never(action)
