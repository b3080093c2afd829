"""Tells the run's store what becomes of this machine, in a thread of its own: the work never waits for it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import structlog

from checkpoint.records import documents
from checkpoint.records.documents import MachineReport
from checkpoint.store.errors import StoreError
from checkpoint.store.run_store import Store

log = structlog.get_logger()

RETRY_S = 0.5  # doubled with each failure in a row
RETRY_MAX_S = 10.0


class Reporter:
    """Keeps the newest report in the store, for as long as it takes: a store that is away is tried again.

    One thread writes, so that an older report never replaces a newer one.
    """

    def __init__(self, store: Store, first: MachineReport) -> None:
        self._store = store
        self._report = first
        self._written: MachineReport | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write, name="reporter", daemon=True)
        self._thread.start()

    def locate(self, zone: str) -> None:
        """The cloud has said in which zone the machine is."""
        with self._changed:
            self._say(replace(self._report, zone=zone))

    def notice(self) -> None:
        """The cloud has said that it will take the machine back."""
        with self._changed:
            self._say(replace(self._report, notice=True))

    def rebalance(self) -> None:
        """The cloud recommends a rebalance."""
        with self._changed:
            if not self._report.rebalance_recommended:
                self._say(replace(self._report, rebalance_recommended=True))

    def finish(self, exit_code: int, reason: str = "") -> None:
        """The work has ended, for the reason that it gave itself. Returns when the store has it."""
        with self._changed:
            self._say(replace(self._report, exit_code=exit_code, exit_reason=reason))
            while self._written is not self._report and self._thread.is_alive():
                self._changed.wait(timeout=1.0)

    def _say(self, report: MachineReport) -> None:
        self._report = replace(report, at_s=time.time())
        self._changed.notify_all()

    def _write(self) -> None:
        failed = 0
        while True:
            with self._changed:
                while self._written is self._report:
                    self._changed.wait()
                report = self._report
            try:
                documents.machine(report.node).write(self._store, report)
            except StoreError as error:  # denied, too: credentials are renewed, and an exit code is worth waiting
                wait_s = min(RETRY_S * 2**failed, RETRY_MAX_S)
                failed += 1
                log.warning("machine_not_reported", why=str(error), again_in_s=wait_s)
                time.sleep(wait_s)
                continue
            failed = 0
            with self._changed:
                self._written = report
                self._changed.notify_all()


def first_report(
    node: str, attempt: int, address: str, *, notice: bool, rebalance_recommended: bool
) -> MachineReport:
    """Return a machine's report at the start of the work."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return MachineReport(node, attempt, None, notice, address, "", boot_id, time.time(), rebalance_recommended)
