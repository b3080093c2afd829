"""Tells people what the journal says, beside the daemon's loop, which never waits for it.

What was told is known by a cursor in the store, moved after each delivery: so whatever dies in between, the next
daemon tells again what may not have arrived. See decision 057 in docs/decisions/README.md.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from checkpoint import journal
from checkpoint.records import documents
from checkpoint.records.documents import Notified, RunRecord
from checkpoint.store.document import Unreadable
from checkpoint.store.errors import StoreError
from checkpoint.store.run_store import Store
from orchestrator.home import notify_urls
from orchestrator.notify.channels import Channel, Command, Message, Service, Undelivered, messages_in
from policies.model.spec import Notify

log = structlog.get_logger()

LIMIT_S = 15.0  # for one delivery
DRAIN_S = 15.0  # for all that are left when the daemon ends; the one under way may take its own limit
RETRY_S = 5.0  # after the first failure in a row, then twice as long each time
RETRY_MAX_S = 600.0


def start_notifier(store: Store, record: RunRecord, environment: MutableMapping[str, str]) -> Notifier:
    """Start the notifier that run.yaml asks for.

    Removes the URLs from `environment`, because the processes of local nodes inherit it.
    """
    urls = notify_urls(record.spec, environment)
    for name in record.spec.notify.url_env:
        environment.pop(name, None)
        if name not in urls:
            log.warning("notify_url_missing", variable=name)
    # An evaluation sends nothing: whoever started it is waiting for it.
    wanted = Notify() if record.evaluation is not None else record.spec.notify
    channels: list[Channel] = [Service(name, urls[name]) for name in wanted.url_env if name in urls]
    if wanted.command:
        folder = record.spec.workdir if Path(record.spec.workdir).is_dir() else None
        channels.append(Command(wanted.command, folder))
    return Notifier(store, record.spec.name, record.run_id, channels)


@dataclass
class _Way:
    """A channel, what it has still to be told, and when it is tried again after a failure."""

    channel: Channel
    told: int  # journal entries up to this number need not be told any more
    waiting: deque[Message] = field(default_factory=deque)
    failures: int = 0
    retry_at_s: float = 0.0  # on the monotonic clock


class Notifier:
    """One run's, in a thread of its own. Each channel is told everything at least once, in the journal's order.

    Args:
        store: the run's.
        run: its name.
        run_id: what tells it from others of that name.
        channels: where to tell; none is fine.
        limit_s: for one delivery.
    """

    def __init__(
        self, store: Store, run: str, run_id: str, channels: Sequence[Channel], limit_s: float = LIMIT_S
    ) -> None:
        self._store = store
        self._named = run, run_id, store.url
        self._limit_s = limit_s
        self._ways = [_Way(channel, 0) for channel in channels]
        self._read_up_to: int | None = None  # None: the cursor has not been read
        self._others: dict[str, int] = {}  # of channels that another daemon had and this one has not
        self._owed = False  # the cursor in the store is behind
        self._again_at_s: float | None = None  # on the monotonic clock: the store was away
        self._woken = threading.Event()
        self._ends_at_s: float | None = None  # on the monotonic clock; None: it goes on
        self._thread = threading.Thread(target=self._work, name="notifier", daemon=True)
        if self._ways:
            self._woken.set()
            self._thread.start()

    def wake(self) -> None:
        """Something was journalled."""
        self._woken.set()

    def close(self, *, drain_s: float) -> None:
        """End, after up to `drain_s` seconds for what is still to be told; each channel is tried once more."""
        self._ends_at_s = time.monotonic() + drain_s
        self._woken.set()
        if self._ways:
            self._thread.join(drain_s + 2 * self._limit_s)

    def _work(self) -> None:
        while True:
            self._woken.wait(self._wait_s())
            self._woken.clear()
            ending = self._ends_at_s is not None
            try:
                self._look()
                for way in self._ways:
                    self._tell(way)
                if ending or self._owed:
                    self._keep()
                self._again_at_s = None
            except StoreError as error:
                self._again_at_s = time.monotonic() + RETRY_S
                log.warning("notify_store_away", error=str(error))
            except Exception:  # what goes wrong here is never the run's
                self._again_at_s = time.monotonic() + RETRY_S
                log.exception("notify_failed")
            if ending:
                return

    def _wait_s(self) -> float | None:
        """Until the next try; None: until somebody wakes it."""
        due = [way.retry_at_s for way in self._ways if way.waiting]
        if self._again_at_s is not None:  # what waits needs the store, too
            due = [self._again_at_s]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _look(self) -> None:
        """Take what was journalled since the last look. Raises StoreError."""
        if self._read_up_to is None:
            found = documents.NOTIFIED.read(self._store, Unreadable())
            self._others = dict(found.told) if found else {}
            for way in self._ways:
                way.told = self._others.pop(way.channel.name, 0)
            self._read_up_to = min(way.told for way in self._ways)
        for record in journal.read(self._store, self._read_up_to):
            for message in messages_in(record, *self._named):
                for way in self._ways:
                    if message.number > way.told:
                        way.waiting.append(message)
            self._read_up_to = record.number

    def _tell(self, way: _Way) -> None:
        """Tell a channel what waits for it, until that is all or it fails. Raises StoreError."""
        while way.waiting and (self._ends_at_s is not None or time.monotonic() >= way.retry_at_s):
            limit_s = self._limit()
            if limit_s <= 0:
                return
            message = way.waiting[0]
            try:
                way.channel.deliver(message, limit_s)
            except Exception as error:  # noqa: BLE001 whatever it is, the other channels are told
                way.failures += 1
                wait_s = min(RETRY_MAX_S, RETRY_S * 2 ** min(way.failures - 1, 10))
                way.retry_at_s = time.monotonic() + wait_s
                why = (
                    str(error) if isinstance(error, Undelivered) else type(error).__name__
                )  # it may quote a secret
                log.warning("not_notified", by=way.channel.name, id=message.id, why=why, again_in_s=wait_s)
                return
            way.failures, way.retry_at_s = 0, 0.0
            way.waiting.popleft()
            if not way.waiting or way.waiting[0].number != message.number:
                way.told = message.number
                self._keep()

    def _keep(self) -> None:
        """Write the cursor. Entries without a message are told with those before them. Raises StoreError."""
        for way in self._ways:
            if not way.waiting:
                way.told = max(way.told, self._read_up_to or 0)
        told = {**self._others, **{one.channel.name: one.told for one in self._ways}}
        self._owed = True
        documents.NOTIFIED.write(self._store, Notified(told))
        self._owed = False

    def _limit(self) -> float:
        """Seconds for the next delivery."""
        left_s = self._limit_s if self._ends_at_s is None else self._ends_at_s - time.monotonic()
        return min(self._limit_s, left_s)
