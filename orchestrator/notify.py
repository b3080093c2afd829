"""Notifications: the messages made from journal entries, the channels that deliver them, and the notifier.

The notifier is a thread that never delays the daemon. A cursor in the store is moved after each delivery, so
after a crash the next daemon repeats every message that may not have arrived. See decision 057 in
docs/decisions/README.md. Each delivery runs in its own process group, which is killed at its time limit, so that a
slow name server, mail server or user script cannot delay the others.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import structlog

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.journal import Record
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import Notified, RunRecord
from grpo_orch.checkpoint.store.document import UnreadableDocuments
from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.home import notify_urls
from grpo_orch.policies.model.events import (
    BudgetNeared,
    BudgetReached,
    CapacityShortage,
    Event,
    RollbackStarted,
    RunMoved,
)
from grpo_orch.policies.model.spec import Notify
from grpo_orch.policies.model.vocabulary import RunPhase

log = structlog.get_logger()

TEXT_MAX = 1000  # characters, so that a message stays readable at a glance
_PHASES = {
    RunPhase.FINISHED: "finished",
    RunPhase.FAILED: "failed",
    RunPhase.PAUSED: "is paused",
    RunPhase.GAVE_UP: "gave up",
    RunPhase.PARKED: "is parked",
}


@dataclass(frozen=True, slots=True)
class Message:
    """A notification. Its `id` stays the same when it is delivered again."""

    id: str
    number: int  # of the journal entry
    time_s: float  # of the journal entry, seconds since the epoch
    run: str
    store: str
    kind: str  # as docs/monitoring.md lists them
    text: str  # one line


def messages_in(record: Record, run: str, run_id: str, store: str) -> Iterator[Message]:
    """Yield the messages of a journal entry; most entries have none. Raises Corrupt."""
    for index, event in enumerate(record.decoded()):
        if (found := _message_of(event)) is not None:
            kind, text = found
            line = f"{run} {' '.join(text.split())[:TEXT_MAX]}"
            yield Message(
                f"{run_id}/{record.number}.{index}", record.number, record.time_s, run, store, kind, line
            )


def _message_of(event: Event) -> tuple[str, str] | None:
    """Return the kind and text of an event's message; None for an event that needs no notification."""
    match event:
        case RunMoved() if event.phase in _PHASES:
            return f"{event.phase}", f"{_PHASES[event.phase]}: {event.reason}"
        case RunMoved(phase=RunPhase.STARTING, parked_s=parked_s) if parked_s is not None:
            return "unparked", f"is no longer parked: {event.reason}"
        case RollbackStarted():
            target = f"step {event.fork.start_at}, on timeline {event.fork.timeline}"
            return "rollback", f"rolls back from step {event.from_step} to {target}: {event.reason}"
        case CapacityShortage():
            return "no_capacity", f"is waiting for machines: {event.reason}"
        case BudgetNeared():
            return "budget_neared", f"has spent {event.spent_usd:.2f} of its {event.usd:.2f} USD"
        case BudgetReached():
            return "budget_reached", f"has reached its budget and pauses: {event.reason}"
        case _:
            return None


# Channels.

# apprise's command line, from this environment.
_APPRISE = (sys.executable, "-c", "from apprise.cli import main; main()", "-v", "--storage-mode=memory")
_TYPES = {"finished": "success", "failed": "failure", "gave_up": "failure", "unparked": "info"}
_SECRET_LENGTH_MIN = 4  # shorter parts of a URL are ports or paths such as `v1`
_TIMESTAMP = re.compile(r"^[-\d]+ [\d:,]+ - ")


EXPECTED_SERVICE_URL = (
    "not a URL that apprise supports; expected one such as slack://TOKEN_A/TOKEN_B/TOKEN_C, "
    "mailto://USER:PASSWORD@HOST or json://HOST/PATH (see https://appriseit.com/services)"
)


class DeliveryFailed(Exception):
    """A message was not delivered, or may not have been. The reason contains no URL, because URLs are secret."""


class Channel(Protocol):
    """A way to deliver messages. `name` is its key in the cursor."""

    name: str

    def deliver(self, message: Message, limit_s: float, /) -> None:
        """Deliver within `limit_s` seconds. Raises DeliveryFailed."""


class Service:
    """Sends through apprise.

    Args:
        variable: the environment variable that holds the URL; the channel's name.
        url: an apprise URL, such as `slack://...`, `mailto://...` or `json://host/path`.
    """

    def __init__(self, variable: str, url: str) -> None:
        self.name = variable
        self._url = url

    def deliver(self, message: Message, limit_s: float) -> None:
        kind = _TYPES.get(message.kind, "warning")
        argv = (*_APPRISE, f"--notification-type={kind}")
        # In the environment, because other users can read a process' arguments.
        environment = {**os.environ, "APPRISE_URLS": self._url}
        body = f"{message.text} ({message.id})".encode()
        status, output = _run(self.name, argv, body, limit_s, env=environment, stdout=subprocess.PIPE)
        if status != 0:
            raise DeliveryFailed(f"{self.name}: {self._reason(output, status)}")

    def _reason(self, output: bytes, status: int) -> str:
        """Return apprise's last line without any part of the URL."""
        lines = output.decode(errors="replace").strip().splitlines()
        if not lines:
            return f"apprise returned {status}"
        reason = _TIMESTAMP.sub("", lines[-1])
        for part in re.split(r"[/:@?&=,\s]+", self._url):
            if len(part) >= _SECRET_LENGTH_MIN:
                reason = reason.replace(part, "***")
        return reason


def is_service_url(url: str) -> bool:
    """Return whether apprise can send to this URL, without sending anything."""
    import apprise  # takes half a second, and few commands need it

    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)  # its messages quote the URL
    return apprise.Apprise.instantiate(url, suppress_exceptions=True) is not None


class Command:
    """Runs a program with the message as one line of JSON on its standard input. Exit code 0 means delivered.

    Args:
        argv: the program and its arguments, run without a shell.
        folder: the working directory; None for the daemon's.
    """

    name = "command"

    def __init__(self, argv: tuple[str, ...], folder: str | None = None) -> None:
        self._argv = argv
        self._folder = folder

    def deliver(self, message: Message, limit_s: float) -> None:
        line = json.dumps(asdict(message)).encode() + b"\n"
        status, _ = _run(self._argv[0], self._argv, line, limit_s, cwd=self._folder)
        if status != 0:
            raise DeliveryFailed(f"{self._argv[0]} ended with exit code {status}")


def _run(
    name: str,
    argv: Sequence[str],
    stdin: bytes,
    limit_s: float,
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: int = subprocess.DEVNULL,
) -> tuple[int, bytes]:
    """Run a program in its own process group; return its exit code and its output.

    Raises DeliveryFailed if it cannot be started or does not end within `limit_s`.
    """
    try:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=env,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise DeliveryFailed(f"{name}: {getattr(error, 'strerror', None) or error}") from None
    try:
        output, _ = process.communicate(stdin, timeout=limit_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise DeliveryFailed(f"{name} did not finish within {limit_s:.0f} s") from None
    return process.returncode, output or b""


# The notifier.

LIMIT_S = 15.0  # for one delivery
DRAIN_S = 15.0  # for pending messages when the daemon exits; a delivery in progress may take its own limit
RETRY_S = 5.0
RETRY_MAX_S = 600.0


def start_notifier(store: Store, record: RunRecord, environment: MutableMapping[str, str]) -> Notifier:
    """Start the notifier that run.yaml configures.

    Remove the URLs from `environment`, because the processes of local nodes inherit it.
    """
    urls = notify_urls(record.spec, environment)
    for name in record.spec.notify.url_env:
        environment.pop(name, None)
        if name not in urls:
            log.warning("notify_url_missing", variable=name)
    # An evaluation sends no notifications, because its user is waiting for it.
    settings = Notify() if record.evaluation is not None else record.spec.notify
    channels: list[Channel] = [Service(name, urls[name]) for name in settings.url_env if name in urls]
    if settings.command:
        folder = record.spec.workdir if Path(record.spec.workdir).is_dir() else None
        channels.append(Command(settings.command, folder))
    return Notifier(store, record.spec.name, record.run_id, channels)


@dataclass
class _Queue:
    """A channel, its pending messages, and the time of its next retry."""

    channel: Channel
    delivered: int  # all messages of journal entries up to this number are delivered
    pending: deque[Message] = field(default_factory=deque)
    failures: int = 0
    retry_at_s: float = 0.0  # on the monotonic clock


class Notifier:
    """Delivers a run's messages in its own thread: to each channel at least once, in the journal's order.

    Args:
        store: the run's store.
        run: the run's name.
        run_id: the run's unique id.
        channels: where to deliver messages; may be empty.
        limit_s: time limit of one delivery.
        retry_s: after the first failure in a row; doubles with each further failure.
        retry_max_s: the longest such time.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        run_id: str,
        channels: Sequence[Channel],
        limit_s: float = LIMIT_S,
        retry_s: float = RETRY_S,
        retry_max_s: float = RETRY_MAX_S,
    ) -> None:
        self._store = store
        self._identity = run, run_id, store.url
        self._limit_s = limit_s
        self._retry_s, self._retry_max_s = retry_s, retry_max_s
        self._queues = [_Queue(channel, 0) for channel in channels]
        self._read_up_to: int | None = None  # a journal entry; None: the cursor has not been read
        self._sent: dict[str, int] = {}  # the cursor, by channel; also those that only an earlier daemon had
        self._is_cursor_stale = False  # the cursor in the store is behind
        self._retry_at_s: float | None = None  # on the monotonic clock, after an error of the store
        self._wakeup = threading.Event()
        self._close_at_s: float | None = None  # on the monotonic clock; None: not closing
        self._thread = threading.Thread(target=self._work, name="notifier", daemon=True)
        if self._queues:
            self._wakeup.set()
            self._thread.start()

    def wake(self) -> None:
        """Check the journal for new entries."""
        self._wakeup.set()

    def close(self, *, drain_s: float) -> None:
        """Try each channel once more, deliver pending messages for up to `drain_s` seconds, then stop."""
        self._close_at_s = time.monotonic() + drain_s
        self._wakeup.set()
        if self._queues:
            self._thread.join(drain_s + 2 * self._limit_s)

    def _work(self) -> None:
        while True:
            self._wakeup.wait(self._wait_s())
            self._wakeup.clear()
            is_closing = self._close_at_s is not None
            try:
                self._read_journal()
                for queue in self._queues:
                    self._deliver(queue)
                if is_closing or self._is_cursor_stale:
                    self._write_cursor()
                self._retry_at_s = None
            except StoreError as error:
                self._retry_at_s = time.monotonic() + self._retry_s
                log.warning("notify_store_unavailable", error=str(error))
            except Exception:  # an error here must not affect the run
                self._retry_at_s = time.monotonic() + self._retry_s
                log.exception("notify_failed")
            if is_closing:
                return

    def _wait_s(self) -> float | None:
        """Return the seconds until the next retry; None: wait until woken."""
        due = [queue.retry_at_s for queue in self._queues if queue.pending]
        if self._retry_at_s is not None:  # deliveries need the store too
            due = [self._retry_at_s]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _read_journal(self) -> None:
        """Queue the messages of new journal entries. Raises StoreError."""
        if self._read_up_to is None:
            cursor = documents.NOTIFIED.read(self._store, UnreadableDocuments())
            self._sent = dict(cursor.sent) if cursor else {}
            for queue in self._queues:
                queue.delivered = self._sent.get(queue.channel.name, 0)
            self._read_up_to = min(queue.delivered for queue in self._queues)
        for record in journal.read(self._store, self._read_up_to):
            for message in messages_in(record, *self._identity):
                for queue in self._queues:
                    if message.number > queue.delivered:
                        queue.pending.append(message)
            self._read_up_to = record.number

    def _deliver(self, queue: _Queue) -> None:
        """Deliver a channel's pending messages until none is left or a delivery fails. Raises StoreError."""
        while queue.pending and (self._close_at_s is not None or time.monotonic() >= queue.retry_at_s):
            limit_s = self._limit()
            if limit_s <= 0:
                return
            message = queue.pending[0]
            try:
                queue.channel.deliver(message, limit_s)
            except Exception as error:  # noqa: BLE001 the other channels must still be served
                queue.failures += 1
                wait_s = min(self._retry_max_s, self._retry_s * 2 ** min(queue.failures - 1, 10))
                queue.retry_at_s = time.monotonic() + wait_s
                # The message of any other exception may contain a secret.
                reason = str(error) if isinstance(error, DeliveryFailed) else type(error).__name__
                name = queue.channel.name
                log.warning("notification_failed", channel=name, id=message.id, reason=reason, retry_in_s=wait_s)
                return
            queue.failures, queue.retry_at_s = 0, 0.0
            queue.pending.popleft()
            if not queue.pending or queue.pending[0].number != message.number:
                queue.delivered = message.number
                self._write_cursor()

    def _write_cursor(self) -> None:
        """Write the cursor; a channel without pending messages counts as delivered. Raises StoreError."""
        for queue in self._queues:
            if not queue.pending:
                queue.delivered = max(queue.delivered, self._read_up_to or 0)
            self._sent[queue.channel.name] = queue.delivered
        self._is_cursor_stale = True
        documents.NOTIFIED.write(self._store, Notified(self._sent))
        self._is_cursor_stale = False

    def _limit(self) -> float:
        """Return the seconds left for the next delivery."""
        left_s = self._limit_s if self._close_at_s is None else self._close_at_s - time.monotonic()
        return min(self._limit_s, left_s)
