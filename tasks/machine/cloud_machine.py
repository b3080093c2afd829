"""A machine of a cloud, `python -m tasks.machine.cloud_machine ROLE`: runs the work, and says what becomes of it.

The controller cannot look into such a machine. So this process, whose child the work is, writes the machine's
report to the run's store: at the start, at a preemption notice or rebalance recommendation, and at the end of
the work, with its exit code.

An attempt runs once on a machine, however often it is started. A lock says whether another such process is at
work, `machine.json` which attempt it was and how it ended; both outlive a process that was killed. Started again

- while the attempt runs, this process leaves with 0;
- after it has ended, it reports the same exit code once more;
- after this process was killed (which ended the work), it reports that the work was killed, and the controller
  orders the next attempt.

A newer attempt is ordered when the one before has reported its end, a moment before its lock is free. It waits
that moment; should a process that hangs hold the lock for longer, it leaves with `exit_codes.HELD`.

SIGTERM is the notice of Slurm and of `sky cancel`, and of Kubernetes by a hook (`tasks/sky/notice.sh`). A trainer
is told at once, and stores what it has. A rollout node drains first, for as long as the shortest of their graces
allows, or until a second SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

import psutil
import structlog

from checkpoint.records import documents
from checkpoint.records.documents import MachineReport
from checkpoint.security.redaction import guard_output
from checkpoint.store.errors import StoreError
from checkpoint.store.run_store import Store
from policies.control.leaving import NOTICE_S
from policies.model import exit_codes
from policies.model.node_contract import NOTICE, REBALANCE, WORK
from policies.model.vocabulary import Role
from tasks.machine import dead_man, metadata
from tasks.machine.children import (
    Started,
    adopt_orphans,
    end_descendants,
    end_in_order,
    exit_code_of,
    record,
    start_child,
    started,
    take,
)
from tasks.machine.exit_note import take_reason
from tasks.machine.metadata import MetadataService
from tasks.machine.node_env import NodeEnv, NotANode, read_node_env

log = structlog.get_logger()

# Tells the run's store what becomes of this machine, in a thread of its own: the work never waits for it.

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
        self._report = report
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


LOCK_WAIT_S = 5.0
POLL_S = 0.05
DRAIN_S = 8.0  # SkyPilot kills 10 s after its SIGTERM; Kubernetes and Slurm, by default, after 30 s
GRACE_S = 5.0  # for what the work has started, to end in order
KILLED = 128 + signal.SIGKILL
MARK = "GRPO_ORCH_WORK"  # in the environment of the work and of all that it starts: the work's folder


def main() -> int:
    guard_output()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if len(sys.argv) != 2 or sys.argv[1] not in list(Role):
        print(f"usage: python -m tasks.machine.cloud_machine {'|'.join(Role)}", file=sys.stderr)
        return exit_codes.USAGE
    role = Role(sys.argv[1])
    try:
        env = read_node_env()
        drain_s = DRAIN_S if role is Role.ROLLOUT else 0.0
        return run(env, [sys.executable, "-m", WORK[role]], metadata.services(), drain_s)
    except (NotANode, StoreError) as error:
        print(f"grpo-orch machine: {error}", file=sys.stderr)
        return exit_codes.FAILED


def run(env: NodeEnv, argv: Sequence[str], known: Sequence[MetadataService], drain_s: float) -> int:
    """Run the work `argv` as the attempt that `env` names, unless it was. Returns the exit code.

    After SIGTERM the work is left alone for `drain_s`, but for the notice.

    Raises StoreError where the store's URL or options are wrong, before anything is started.
    """
    store = Store(env.run, retry_s=0.0)  # the reporter tries again by itself
    workdir = Path(env.workdir)
    workdir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (workdir / "lock").open("a") as lock:
        if not _locked(lock, workdir, env.attempt):
            if started(workdir).attempt >= env.attempt:
                log.info("already_running", attempt=env.attempt)
                return exit_codes.OK
            log.error("machine_held", attempt=env.attempt, hint="an earlier attempt's process does not end")
            return exit_codes.HELD
        before = started(workdir)
        if before.attempt > env.attempt:
            log.info("overtaken", attempt=env.attempt, by=before.attempt)
            return exit_codes.OK
        _kill_remains(workdir)
        if before.attempt == env.attempt:
            return _report_again(env, store, before)
        return _attempt(env, argv, known, drain_s, store)


def _locked(lock: TextIO, workdir: Path, attempt: int) -> bool:
    """Take the lock; False where the attempt is at work already, or an earlier one's process does not let go."""
    deadline_s = time.monotonic() + LOCK_WAIT_S
    while not take(lock):
        if started(workdir).attempt >= attempt or time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)  # a lock that is waited for with a deadline has no event
    return True


def _report_again(env: NodeEnv, store: Store, before: Started) -> int:
    """The attempt has ended, or was killed: what of it may not have reached the store."""
    code = KILLED if before.exit_code is None else before.exit_code
    log.info("attempt_has_ended", attempt=before.attempt, exit_code=code)
    record(Path(env.workdir), Started(before.attempt, code, reason=before.reason))
    _reporter(env, store).finish(code, before.reason)
    return code


def _attempt(
    env: NodeEnv, argv: Sequence[str], known: Sequence[MetadataService], drain_s: float, store: Store
) -> int:
    workdir = Path(env.workdir)
    record(workdir, Started(env.attempt, pid=os.getpid()))  # which a Kubernetes pod's hook sends a SIGTERM to
    adopt_orphans()
    take_reason(workdir)  # of an earlier attempt
    work = start_child(list(argv), {**os.environ, MARK: str(workdir)})  # before there are threads: it forks
    # The threads below inherit it: SIGTERM then waits for the one that takes it. Until here it ends this process.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    reporter = _reporter(env, store)

    def located(zone: str) -> None:
        log.info("metadata_found", zone=zone)

    def noticed(why: str, lasts_s: float) -> None:
        log.warning("preemption_notice", why=why, lasts_s=lasts_s)
        (workdir / NOTICE).write_text(str(lasts_s))  # the work's word for it
        reporter.notice()

    def rebalance(why: str) -> None:
        log.warning("rebalance_recommended", why=why)
        (workdir / REBALANCE).touch()  # for the next attempt on this machine
        reporter.rebalance()

    stop, heard = threading.Event(), metadata.Heard(located, rebalance, noticed)
    threading.Thread(target=metadata.watch, args=(known, heard, stop), daemon=True).start()
    dead_man.start(store, os.environ, partial(end_in_order, work))
    threading.Thread(target=_pass_on_sigterm, args=(work, drain_s, noticed), daemon=True).start()
    code, reason = exit_code_of(work.wait()), take_reason(workdir)
    record(workdir, Started(env.attempt, code, reason=reason))
    stop.set()
    end_descendants(GRACE_S)  # what outlives its parent would be in the next attempt's way
    log.info("work_ended", attempt=env.attempt, exit_code=code)
    reporter.finish(code, reason)
    return code


def _kill_remains(workdir: Path) -> None:
    """SIGKILL what a killed process before this one has left: its work ended with it, but not all of the tree."""
    deadline_s = time.monotonic() + GRACE_S
    while (left := _of_work(workdir)) and time.monotonic() < deadline_s:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(POLL_S)


def _of_work(workdir: Path) -> list[psutil.Process]:
    """This user's living processes that carry the mark of the work here."""
    found = psutil.process_iter(["environ"])  # None: it is dead, or somebody else's
    return [process for process in found if (process.info["environ"] or {}).get(MARK) == str(workdir)]


def _pass_on_sigterm(work: subprocess.Popen[bytes], drain_s: float, noticed: Callable[[str, float], None]) -> None:
    signal.sigwait({signal.SIGTERM})
    noticed("SIGTERM", NOTICE_S)
    signal.sigtimedwait({signal.SIGTERM}, drain_s)  # a second one ends the waiting
    work.terminate()


def _reporter(env: NodeEnv, store: Store) -> Reporter:
    notice, recommended = ((Path(env.workdir) / name).exists() for name in (NOTICE, REBALANCE))
    report = MachineReport(env.node, env.attempt, None, notice, recommended)
    return Reporter(store, report)


if __name__ == "__main__":
    sys.exit(main())
