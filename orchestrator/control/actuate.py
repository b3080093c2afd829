"""Does what was decided, in threads; failures come back as observations.

For each node, timeline or version one call of a kind runs at a time: a machine can be given up while it is still
being launched.

A moment before a call the journal was seen not to have moved on; a call that cannot begin within ACT_WITHIN_S of
that (this process was stopped, a laptop slept) is not made. What remains is a controller that is stopped inside a
call for so long that another one takes over. Its launch makes a machine that the other one does not know and takes
down; its termination names one machine, and no later one has that name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import assert_never

import structlog

from checkpoint.records import documents
from checkpoint.store.errors import StoreError
from checkpoint.store.run_store import Store
from checkpoint.stream import transfer
from orchestrator.clouds.protocol import Cloud, CloudRefused, CloudUnavailable, Order
from orchestrator.control.run_clock import awake_or_asleep_s
from policies.model.vocabulary import PolicyVersion, Refusal, role_of
from policies.tick.snapshot import (
    Action,
    AskToStop,
    Confirm,
    Export,
    Launch,
    LaunchRefused,
    Terminate,
    WriteFork,
)

log = structlog.get_logger()

UNAVAILABLE_WAIT_S = 2.0  # before a call that the cloud did not answer is made again
CLOSE_S = 5.0
ACT_WITHIN_S = 15.0  # of the look at the journal, which itself may be answered late (a store is retried for 10 s)


class _TooLate(Exception):
    """The journal was looked at too long ago; the next tick asks again."""


class Actuator:
    """Runs actions against a cloud and the run's store.

    Args:
        cloud: where the machines are.
        store: the run's.
        environment_of: gives a launch its environment, secrets included. Raises CloudRefused without them.
        redact: blanks them in what is journalled.
        clock: seconds on a clock that goes on while this process is stopped.
    """

    def __init__(
        self,
        cloud: Cloud,
        store: Store,
        environment_of: Callable[[Launch], dict[str, str]],
        redact: Callable[[str], str] = str,
        clock: Callable[[], float] = awake_or_asleep_s,
    ) -> None:
        self._cloud = cloud
        self._store = store
        self._environment_of = environment_of
        self._redact = redact
        self._clock = clock
        self._running: dict[tuple[str, type[Action]], tuple[Action, Future[None]]] = {}
        self._not_before_s: dict[tuple[str, type[Action]], float] = {}
        self._refused: dict[str, LaunchRefused] = {}  # by node, until they are told

    def submit(self, actions: tuple[Action, ...], fence: Callable[[], None]) -> None:
        """Start each action unless one like it is running for its node; what is skipped is asked for again.

        `fence` is called once before any is started. Raises what it raises.
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
        """Return the launches that were refused since the last call; of a machine that is being given back, once
        that is done, for only then it shows whether there was any. Raises what a bug in a cloud raised."""
        for key, (action, future) in list(self._running.items()):
            if not future.done():
                continue
            del self._running[key]
            of = key[0]
            try:
                future.result()
            except _TooLate:
                log.warning("not_done_in_time", action=type(action).__name__, of=of)
            except CloudRefused as error:
                self._refused[of] = LaunchRefused(of, error.refusal, self._redact(str(error)), error.left)
            except (CloudUnavailable, StoreError) as error:
                self._not_before_s[key] = self._clock() + UNAVAILABLE_WAIT_S
                log.warning("not_done_yet", action=type(action).__name__, of=of, error=str(error))
            except OSError as error:
                if isinstance(action, Launch):
                    self._refused[of] = LaunchRefused(of, Refusal.UNKNOWN, self._redact(str(error)))
                else:
                    log.warning("action_failed", action=type(action).__name__, of=of, error=str(error))
        told = [node for node in self._refused if (node, Terminate) not in self._running]
        return tuple(self._refused.pop(node) for node in told)

    def close(self) -> None:
        """Wait a moment for what is running. What takes longer is cut off with this process, as in a crash; the
        next controller finds what became of it."""
        wait([future for _, future in self._running.values()], CLOSE_S)

    def _start(self, action: Action, until_s: float) -> Future[None]:
        """Do it, but not after `until_s`, beside the controller's loop."""
        future: Future[None] = Future()

        def run() -> None:
            try:
                if self._clock() > until_s:
                    raise _TooLate
                self._do(action)
            except BaseException as error:  # noqa: BLE001 `collect` raises it
                future.set_exception(error)
            else:
                future.set_result(None)

        self._spawn(run, f"{type(action).__name__} {_subject(action)}")
        return future

    def _spawn(self, run: Callable[[], None], name: str) -> None:
        """Call it in a thread of its own, which does not keep this process alive."""
        threading.Thread(target=run, name=name, daemon=True).start()

    def _do(self, action: Action) -> None:
        match action:
            case Launch():
                role = role_of(action.slot)
                environment = self._environment_of(action)
                order = Order(action.node, role, action.market, action.attempt, environment, action.pool)
                self._cloud.launch(order)
            case Terminate():
                self._cloud.terminate(action.node)
            case Confirm():
                self._cloud.confirm(action.node)
            case AskToStop():
                documents.ask_to_stop(self._store, action.node, action.attempt, time.time())
            case WriteFork():
                documents.write_fork(self._store, action.fork)
            case Export():
                transfer.export_weights(self._store, PolicyVersion.parse(action.version))
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
