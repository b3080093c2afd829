"""Send notifications of journal events, in a thread that never delays the daemon's loop.

A cursor in the store is moved after each delivery. So after a crash the next daemon repeats every message that may
not have arrived. See decision 057 in docs/decisions/README.md.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import Notified, RunRecord
from grpo_orch.checkpoint.store.document import UnreadableDocuments
from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.home import notify_urls
from grpo_orch.orchestrator.notify.channels import Channel, Command, DeliveryFailed, Message, Service, messages_in
from grpo_orch.policies.model.spec import Notify

log = structlog.get_logger()

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
        self._other_cursors: dict[str, int] = {}  # of channels that an earlier daemon had and this one lacks
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
            self._other_cursors = dict(cursor.sent) if cursor else {}
            for queue in self._queues:
                queue.delivered = self._other_cursors.pop(queue.channel.name, 0)
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
        cursors = {queue.channel.name: queue.delivered for queue in self._queues}
        self._is_cursor_stale = True
        documents.NOTIFIED.write(self._store, Notified({**self._other_cursors, **cursors}))
        self._is_cursor_stale = False

    def _limit(self) -> float:
        """Return the seconds left for the next delivery."""
        left_s = self._limit_s if self._close_at_s is None else self._close_at_s - time.monotonic()
        return min(self._limit_s, left_s)
