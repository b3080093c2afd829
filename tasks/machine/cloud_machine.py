"""Run a node's work on a cloud machine, and report to the store.

`python -m grpo_orch.tasks.machine.cloud_machine ROLE`

The controller has no access to the machine. This process starts the work as its child, and writes the machine's
report to the run's store: at the start, at a preemption notice or rebalance recommendation, and at the end of the
work, with its exit code.

An attempt runs only once on a machine, even if it is started repeatedly. A lock shows whether another such process
is running, and `machine.json` records the attempt and how it ended; both survive a killed process. If an attempt
is started again

- while it runs, this process exits with 0;
- after it has ended, this process reports the same exit code again;
- after this process was killed (which also ended the work), it reports that the work was killed, and the
  controller starts the next attempt.

The controller starts a new attempt when the previous one has reported its end, shortly before that one releases
its lock. This process waits for the lock; if a hung process keeps it, this process exits with `exit_codes.HELD`.

SIGTERM is the preemption notice of Slurm, of `sky cancel`, and, through the hook `tasks/sky/notice.sh`, of
Kubernetes. It is passed on to a trainer immediately, which stores its checkpoint. A rollout node drains first, for
as long as the shortest of these grace periods allows, or until a second SIGTERM.
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

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import MachineReport
from grpo_orch.checkpoint.security.redaction import guard_output
from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.control.leaving import NOTICE_S
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.node_contract import NOTICE, REBALANCE, WORK, AttemptRecord
from grpo_orch.policies.model.vocabulary import Role
from grpo_orch.tasks.machine import dead_man, metadata
from grpo_orch.tasks.machine.children import (
    adopt_orphans,
    end_descendants,
    end_in_order,
    exit_code_of,
    read_attempt,
    record_attempt,
    start_child,
    try_lock,
)
from grpo_orch.tasks.machine.exit_note import take_reason
from grpo_orch.tasks.machine.metadata import MetadataService
from grpo_orch.tasks.machine.node_env import NodeEnv, NodeEnvMissing, read_node_env

log = structlog.get_logger()

RETRY_S = 2.0


class Reporter:
    """Writes this machine's newest report to the store in the background, retrying until it succeeds.

    A single thread writes, so that an older report never replaces a newer one.
    """

    def __init__(self, store: Store, first: MachineReport) -> None:
        self._store = store
        self._report = first
        self._written: MachineReport | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write, name="reporter", daemon=True)
        self._thread.start()

    def notice(self) -> None:
        """Report a preemption notice."""
        with self._changed:
            self._set(replace(self._report, notice=True))

    def rebalance(self) -> None:
        """Report a rebalance recommendation."""
        with self._changed:
            if not self._report.rebalance_recommended:
                self._set(replace(self._report, rebalance_recommended=True))

    def finish(self, exit_code: int, reason: str = "") -> None:
        """Report the end of the work and the reason it gave. Returns once the report is stored."""
        with self._changed:
            self._set(replace(self._report, exit_code=exit_code, exit_reason=reason))
            while self._written is not self._report and self._thread.is_alive():
                self._changed.wait(timeout=1.0)

    def _set(self, report: MachineReport) -> None:
        self._report = report
        self._changed.notify_all()

    def _write(self) -> None:
        while True:
            with self._changed:
                while self._written is self._report:
                    self._changed.wait()
                report = self._report
            try:
                documents.machine(report.node).write(self._store, report)
            except StoreError as error:  # even StoreDenied: credentials may be renewed
                log.warning("machine_report_failed", reason=str(error))
                time.sleep(RETRY_S)
                continue
            with self._changed:
                self._written = report
                self._changed.notify_all()


LOCK_WAIT_S = 5.0
POLL_S = 0.05
DRAIN_S = 8.0  # SkyPilot kills 10 s after its SIGTERM; Kubernetes and Slurm, by default, after 30 s
GRACE_S = 5.0  # for descendants of the work to shut down
KILLED = 128 + signal.SIGKILL
MARK = "GRPO_ORCH_WORK"  # variable of the work and its descendants, with the work's folder


def main() -> int:
    guard_output()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if len(sys.argv) != 2 or sys.argv[1] not in list(Role):
        print(f"usage: python -m grpo_orch.tasks.machine.cloud_machine {'|'.join(Role)}", file=sys.stderr)
        return exit_codes.USAGE
    role = Role(sys.argv[1])
    try:
        env = read_node_env()
        drain_s = DRAIN_S if role is Role.ROLLOUT else 0.0
        return run(env, [sys.executable, "-m", WORK[role]], metadata.services(), drain_s)
    except (NodeEnvMissing, StoreError) as error:
        print(f"grpo-orch machine: {error}", file=sys.stderr)
        return exit_codes.FAILED


def run(env: NodeEnv, argv: Sequence[str], services: Sequence[MetadataService], drain_s: float) -> int:
    """Run the work `argv` as the attempt in `env`, unless that attempt has run. Returns the exit code.

    After SIGTERM the work gets the preemption notice, and `drain_s` later SIGTERM.

    Raises StoreError for a wrong store URL or option, before anything is started.
    """
    store = Store(env.run, retry_s=0.0)  # the reporter retries itself
    workdir = Path(env.workdir)
    workdir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (workdir / "lock").open("a") as lock:
        if not _locked(lock, workdir, env.attempt):
            if read_attempt(workdir).attempt >= env.attempt:
                log.info("already_running", attempt=env.attempt)
                return exit_codes.OK
            log.error("machine_held", attempt=env.attempt, hint="the process of an earlier attempt has not ended")
            return exit_codes.HELD
        newest = read_attempt(workdir)
        if newest.attempt > env.attempt:
            log.info("attempt_superseded", attempt=env.attempt, by=newest.attempt)
            return exit_codes.OK
        _kill_leftovers(workdir)
        if newest.attempt == env.attempt:
            return _report_again(env, store, newest)
        return _run_attempt(env, argv, services, drain_s, store)


def _locked(lock: TextIO, workdir: Path, attempt: int) -> bool:
    """Take the lock. Returns False if the attempt is already running, or after LOCK_WAIT_S."""
    deadline_s = time.monotonic() + LOCK_WAIT_S
    while not try_lock(lock):
        if read_attempt(workdir).attempt >= attempt or time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)  # flock has no timeout
    return True


def _report_again(env: NodeEnv, store: Store, ended: AttemptRecord) -> int:
    """Report the end of an attempt that ended or was killed, since its report may not have reached the store."""
    code = KILLED if ended.exit_code is None else ended.exit_code
    log.info("attempt_already_ended", attempt=ended.attempt, exit_code=code)
    record_attempt(Path(env.workdir), AttemptRecord(ended.attempt, code, reason=ended.reason))
    _reporter(env, store).finish(code, ended.reason)
    return code


def _run_attempt(
    env: NodeEnv, argv: Sequence[str], services: Sequence[MetadataService], drain_s: float, store: Store
) -> int:
    workdir = Path(env.workdir)
    record_attempt(workdir, AttemptRecord(env.attempt, pid=os.getpid()))  # notice.sh sends SIGTERM to this pid
    adopt_orphans()
    take_reason(workdir)  # of an earlier attempt
    work = start_child(list(argv), {**os.environ, MARK: str(workdir)})  # forks, so before any thread starts
    # The threads below inherit the mask, so that only `sigwait` receives SIGTERM. Before, it ends this process.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    reporter = _reporter(env, store)

    def noticed(why: str, lasts_s: float) -> None:
        log.warning("preemption_notice", reason=why, lasts_s=lasts_s)
        (workdir / NOTICE).write_text(str(lasts_s))  # read by the work
        reporter.notice()

    def rebalance(why: str) -> None:
        log.warning("rebalance_recommended", reason=why)
        (workdir / REBALANCE).touch()  # for the next attempt on this machine
        reporter.rebalance()

    stop = threading.Event()
    threading.Thread(target=metadata.watch, args=(services, rebalance, noticed, stop), daemon=True).start()
    dead_man.start(store, os.environ, partial(end_in_order, work))
    threading.Thread(target=_pass_on_sigterm, args=(work, drain_s, noticed), daemon=True).start()
    code, reason = exit_code_of(work.wait()), take_reason(workdir)
    record_attempt(workdir, AttemptRecord(env.attempt, code, reason=reason))
    stop.set()
    end_descendants(GRACE_S)  # remaining processes would disturb the next attempt
    log.info("work_ended", attempt=env.attempt, exit_code=code)
    reporter.finish(code, reason)
    return code


def _kill_leftovers(workdir: Path) -> None:
    """Kill descendants of the work that outlived a killed predecessor of this process."""
    deadline_s = time.monotonic() + GRACE_S
    while (processes := _marked_processes(workdir)) and time.monotonic() < deadline_s:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(POLL_S)


def _marked_processes(workdir: Path) -> list[psutil.Process]:
    """Return this user's living processes with the mark of this work."""
    processes = psutil.process_iter(["environ"])  # environ is None for a dead process or another user's
    return [process for process in processes if (process.info["environ"] or {}).get(MARK) == str(workdir)]


def _pass_on_sigterm(work: subprocess.Popen[bytes], drain_s: float, noticed: Callable[[str, float], None]) -> None:
    signal.sigwait({signal.SIGTERM})
    noticed("SIGTERM", NOTICE_S)
    signal.sigtimedwait({signal.SIGTERM}, drain_s)  # a second SIGTERM ends the wait
    work.terminate()


def _reporter(env: NodeEnv, store: Store) -> Reporter:
    notice, recommended = ((Path(env.workdir) / name).exists() for name in (NOTICE, REBALANCE))
    report = MachineReport(env.node, env.attempt, None, notice, recommended)
    return Reporter(store, report)


if __name__ == "__main__":
    sys.exit(main())
