"""Start the daemon and the rehearsal, each in its own process session."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.store.document import UnreadableDocuments
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.control.lease import is_held
from grpo_orch.orchestrator.home import known_run, run_dir
from grpo_orch.policies.model import exit_codes

START_TIMEOUT_S = 300.0  # usually a second or two; minutes on busy cores
OTHER_LEASE_TIMEOUT_S = 30.0  # for the lease of a daemon that started first
POLL_S = 0.05
# Completions, dataset rows and file names hold any character; printing them must not raise, whatever the locale.
PRINT_ANY_TEXT = {"PYTHONIOENCODING": "utf-8:backslashreplace"}


class DaemonFailed(Exception):
    """The daemon did not start; the message has the reason and the path of its log."""


class AlreadyControlled(DaemonFailed):
    """Another daemon took over the run at the same moment and controls it."""


def start_daemon(store: Store, record: RunRecord, reason: str) -> int:
    """Start a daemon for the run and return its pid once it holds the lease. Raises DaemonFailed, UntrustedRun.

    If another daemon controls the run or takes it over first, raise AlreadyControlled once that daemon holds the
    lease. Of several daemons started for one epoch, the first wins.
    """
    known_run(store)  # the daemon would also refuse an unknown run, but only in its log
    epoch = journal.recover(store).state.epoch  # before the lease, so that a later take-over is detected
    if is_held(lambda: documents.LEASE.read(store, UnreadableDocuments())):
        raise _taken(store, time.monotonic())
    log = run_dir(record.run_id) / "daemon.log"
    process = spawn(["-m", "grpo_orch.orchestrator.control.daemon", store.url, reason, str(epoch)], log)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        lease = documents.LEASE.read(store, UnreadableDocuments())
        if lease is not None and lease.pid == process.pid:
            return process.pid
        if process.poll() is not None:
            if process.returncode == exit_codes.OK:
                return process.pid  # the run had already ended
            if process.returncode == exit_codes.HELD:
                raise _taken(store, time.monotonic() + OTHER_LEASE_TIMEOUT_S)
            last_line = (log.read_text("utf-8", "replace").strip().splitlines() or ["no output"])[-1]
            message = f"the daemon ended with exit code {process.returncode}: {last_line}"
            raise DaemonFailed(f"{message}; its log is {log}")
        time.sleep(POLL_S)
    raise DaemonFailed(f"the daemon did not take over the run within {START_TIMEOUT_S:.0f} s; its log is {log}")


def _taken(store: Store, until_s: float) -> AlreadyControlled:
    """Wait for the other daemon's lease, then return the error."""
    while time.monotonic() < until_s and not is_held(lambda: documents.LEASE.read(store, UnreadableDocuments())):
        time.sleep(POLL_S)
    message = f"another daemon took over {store.url} at the same moment"
    return AlreadyControlled(f"{message}; watch it with `grpo-orch status -w {store.quoted}`")


def start_rehearsal(store: Store, record: RunRecord) -> None:
    """Start the rehearsal process if the run has faults to rehearse; a second process exits immediately."""
    if record.spec.rehearse is not None and record.spec.rehearse.faults:
        spawn(
            ["-m", "grpo_orch.orchestrator.control.rehearse", store.url], run_dir(record.run_id) / "rehearsal.log"
        )


def spawn(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start Python in a session of its own, with its output appended to `log`. Raises DaemonFailed."""
    try:
        out = log.open("ab")
    except OSError as error:
        raise DaemonFailed(f"{log}: {error.strerror}") from None
    with out:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **PRINT_ANY_TEXT},
        )
