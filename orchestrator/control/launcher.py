"""Starts the daemon, and the rehearsal beside it, in process sessions of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from checkpoint import journal
from checkpoint.records import documents
from checkpoint.records.documents import RunRecord
from checkpoint.store.document import Unreadable
from checkpoint.store.run_store import Store
from orchestrator.control.lease import is_held
from orchestrator.home import known_run, run_dir
from policies.model import exit_codes

START_TIMEOUT_S = 300.0  # it loads in a second or two: minutes on busy cores; one that fails ends by itself
TAKEN_S = 30.0  # until another that was quicker says so
POLL_S = 0.05
# Completions, dataset rows and file names are in no locale's alphabet: printing one must not raise in any process.
PRINTS_ANY_TEXT = {"PYTHONIOENCODING": "utf-8:backslashreplace"}


class DaemonFailed(Exception):
    """The daemon did not come up; the message says why and where its log is."""


class TakenByAnother(DaemonFailed):
    """Another daemon took the run at the same moment, and steers it."""


def start_daemon(store: Store, record: RunRecord, reason: str, page: socket.socket | None = None) -> int:
    """Start a daemon for the run and return its pid once it holds the lease. Raises DaemonFailed, NotVouched.

    `page` is a socket that listens: the daemon has the run page served there. Where somebody steers, or another
    daemon is quicker, TakenByAnother comes once that one holds the lease: of all that are started at once, the
    first takes the epoch that each of them was started for.
    """
    known_run(store)  # or the daemon would refuse it, and nobody reads its log
    epoch = journal.recover(store).state.epoch  # before the lease: whoever takes the run after this is seen
    if is_held(lambda: documents.LEASE.read(store, Unreadable())):
        raise _taken(store, time.monotonic())
    log = run_dir(record.run_id) / "daemon.log"
    fds = () if page is None else (page.fileno(),)
    process = _spawn(["-m", "orchestrator.control.daemon", store.url, reason, *map(str, (epoch, *fds))], log, fds)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        lease = documents.LEASE.read(store, Unreadable())
        if lease is not None and lease.pid == process.pid:
            return process.pid
        if process.poll() is not None:
            if process.returncode == exit_codes.OK:
                return process.pid  # nothing was left to steer
            if process.returncode == exit_codes.HELD:
                raise _taken(store, time.monotonic() + TAKEN_S)
            last = (log.read_text("utf-8", "replace").strip().splitlines() or ["no output"])[-1]
            raise DaemonFailed(f"the daemon ended with exit code {process.returncode}: {last}; its log is {log}")
        time.sleep(POLL_S)
    raise DaemonFailed(f"the daemon did not take the run within {START_TIMEOUT_S:.0f} s; its log is {log}")


def _taken(store: Store, until_s: float) -> TakenByAnother:
    """Wait for the lease of the daemon that was quicker: until then nothing says that somebody steers."""
    while time.monotonic() < until_s and not is_held(lambda: documents.LEASE.read(store, Unreadable())):
        time.sleep(POLL_S)
    told = f"another daemon took {store.url} at the same moment"
    return TakenByAnother(f"{told}; watch it with `grpo-orch status -w {store.quoted}`")


def start_rehearsal(store: Store, record: RunRecord) -> None:
    """Start the rehearsal's process if the run has faults to rehearse; a second one ends at once."""
    if record.spec.rehearse is not None and record.spec.rehearse.faults:
        _spawn(["-m", "orchestrator.control.rehearse", store.url], run_dir(record.run_id) / "rehearsal.log")


def _spawn(arguments: list[str], log: Path, fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
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
            pass_fds=fds,
            env={**os.environ, **PRINTS_ANY_TEXT},
        )
