"""Run the decided actions in threads and return failures as observations.

Per node or timeline, one call of each kind runs at a time; so a machine can be released while its launch
is still running.

The fence checks the journal just before the calls. A call that cannot start within ACT_WITHIN_S of the check (the
process was stopped, a laptop slept) is dropped. One case remains: a controller is stopped inside a call until
another one takes over. Its launch then creates a machine that the new controller does not know and terminates; its
termination names one machine, and names are never reused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import assert_never

import structlog

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.clouds.protocol import Cloud, CloudRefused, CloudUnavailable, LaunchOrder
from grpo_orch.orchestrator.control.run_clock import awake_or_asleep_s
from grpo_orch.policies.model.vocabulary import Refusal, role_of
from grpo_orch.policies.tick.snapshot import (
    Action,
    Confirm,
    Launch,
    LaunchRefused,
    RequestStop,
    Terminate,
    WriteFork,
)

log = structlog.get_logger()

UNAVAILABLE_WAIT_S = 2.0  # before a retry when the cloud does not answer
CLOSE_S = 5.0
ACT_WITHIN_S = 15.0  # of the journal check, which may itself take 10 s of store retries


class _Expired(Exception):
    """The journal check is too old; the next tick requests the action again."""


class Actuator:
    """Runs actions against a cloud and the run's store.

    Args:
        cloud: where the machines are.
        store: the run's store.
        environment_of: returns a launch's environment, with secrets. Raises CloudRefused if a secret is missing.
        redact: removes secrets from journalled text.
        clock: seconds on a clock that runs on while this process is stopped.
        unavailable_wait_s: before a retry when the cloud or the store does not answer.
    """

    def __init__(
        self,
        cloud: Cloud,
        store: Store,
        environment_of: Callable[[Launch], dict[str, str]],
        redact: Callable[[str], str] = str,
        clock: Callable[[], float] = awake_or_asleep_s,
        unavailable_wait_s: float = UNAVAILABLE_WAIT_S,
    ) -> None:
        self._cloud = cloud
        self._store = store
        self._environment_of = environment_of
        self._redact = redact
        self._clock = clock
        self._unavailable_wait_s = unavailable_wait_s
        self._running: dict[tuple[str, type[Action]], tuple[Action, Future[None]]] = {}
        self._not_before_s: dict[tuple[str, type[Action]], float] = {}
        self._refused: dict[str, LaunchRefused] = {}  # by node, until collected

    def submit(self, actions: tuple[Action, ...], fence: Callable[[], None]) -> None:
        """Start each action unless one of its kind runs for its node; later ticks request skipped ones again.

        Calls `fence` once before any action starts; its exceptions are passed on.
        """
        due = {
            key: action
            for action in actions
            if (key := (_subject(action), type(action))) not in self._running
            and self._clock() >= self._not_before_s.get(key, 0.0)
        }
        if not due:
            return
        until_s = self._clock() + ACT_WITHIN_S
        fence()
        for key, action in due.items():
            self._running[key] = (action, self._start(action, until_s))

    def collect(self) -> tuple[LaunchRefused, ...]:
        """Return the launches refused since the last call. Passes on unexpected exceptions of a cloud.

        The refusal of a node that is being terminated is returned after the termination, which shows whether the
        launch left a machine.
        """
        for key, (action, future) in list(self._running.items()):
            if not future.done():
                continue
            del self._running[key]
            subject = key[0]
            try:
                future.result()
            except _Expired:
                log.warning("action_expired", action=type(action).__name__, subject=subject)
            except CloudRefused as error:
                reason = self._redact(str(error))
                self._refused[subject] = LaunchRefused(subject, error.refusal, reason, error.machine_exists)
            except (CloudUnavailable, StoreError) as error:
                self._not_before_s[key] = self._clock() + self._unavailable_wait_s
                log.warning("action_delayed", action=type(action).__name__, subject=subject, error=str(error))
            except OSError as error:
                if isinstance(action, Launch):
                    self._refused[subject] = LaunchRefused(subject, Refusal.UNKNOWN, self._redact(str(error)))
                else:
                    log.warning("action_failed", action=type(action).__name__, subject=subject, error=str(error))
        settled = [node for node in self._refused if (node, Terminate) not in self._running]
        return tuple(self._refused.pop(node) for node in settled)

    def close(self) -> None:
        """Wait up to CLOSE_S for running actions; the next controller observes the outcome of the others."""
        wait([future for _, future in self._running.values()], CLOSE_S)

    def _start(self, action: Action, until_s: float) -> Future[None]:
        """Run the action in a thread, unless `until_s` has passed."""
        future: Future[None] = Future()

        def run() -> None:
            try:
                if self._clock() > until_s:
                    raise _Expired
                self._do(action)
            except BaseException as error:  # noqa: BLE001  # `collect` raises it
                future.set_exception(error)
            else:
                future.set_result(None)

        self._spawn(run, f"{type(action).__name__} {_subject(action)}")
        return future

    def _spawn(self, run: Callable[[], None], name: str) -> None:
        """Call `run` in a daemon thread."""
        threading.Thread(target=run, name=name, daemon=True).start()

    def _do(self, action: Action) -> None:
        match action:
            case Launch():
                role = role_of(action.slot)
                environment = self._environment_of(action)
                order = LaunchOrder(action.node, role, action.market, action.attempt, environment, action.pool)
                self._cloud.launch(order)
            case Terminate():
                self._cloud.terminate(action.node)
            case Confirm():
                self._cloud.confirm(action.node)
            case RequestStop():
                documents.request_stop(self._store, action.node, action.attempt, time.time())
            case WriteFork():
                documents.write_fork(self._store, action.fork)
            case _:
                assert_never(action)


def _subject(action: Action) -> str:
    """Return the node or timeline that the action changes."""
    return f"timeline {action.fork.timeline}" if isinstance(action, WriteFork) else action.node
