"""The rehearsal: injects the faults that run.yaml schedules into real processes.

`python -m grpo_orch.orchestrator.control.rehearse STORE-URL` is a separate process, since it also kills the
daemon. Each fault is injected once and recorded in the store.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time

import psutil
import structlog

from grpo_orch.checkpoint.journal import recover
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RehearsedFault, RunRecord, read_faults, write_fault
from grpo_orch.checkpoint.store.document import UnreadableDocuments
from grpo_orch.checkpoint.store.errors import StoreUnavailable
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.clouds import open_local
from grpo_orch.orchestrator.clouds.local import LocalCloud, marked_processes
from grpo_orch.orchestrator.control.lease import is_alive
from grpo_orch.orchestrator.home import run_dir
from grpo_orch.policies.model import node_contract
from grpo_orch.policies.model.phases import TERMINAL_RUN
from grpo_orch.policies.model.spec import Rehearsed
from grpo_orch.policies.model.vocabulary import MachineState, slot_and_incarnation

log = structlog.get_logger()

POLL_S = 0.1


def main() -> int:
    store = Store(sys.argv[1])
    record = documents.read_run(store)
    lock = (run_dir(record.run_id) / "rehearsal.lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0
    Rehearser(store, record).run()
    return 0


class Rehearser:
    """Waits for each fault's step, then injects it."""

    def __init__(self, store: Store, record: RunRecord) -> None:
        self._store = store
        self._record = record
        self._cloud: LocalCloud = open_local(record)

    def run(self) -> None:
        """Inject every remaining fault, in the order of their steps; return when the run ends."""
        done = {fault.number for fault in read_faults(self._store)}
        rehearse = self._record.spec.rehearse
        numbered = enumerate(rehearse.faults if rehearse else (), start=1)
        faults = sorted(numbered, key=lambda numbered_fault: numbered_fault[1].at_step)
        for number, fault in faults:
            if number in done:
                continue
            if not self._wait_for(fault.at_step):
                return
            now_s = time.time()
            detail = self._inject(fault)
            log.info(
                "fault_injected", fault=fault.fault, target=fault.target, at_step=fault.at_step, detail=detail
            )
            entry = RehearsedFault(number, fault.fault, fault.target, fault.at_step, now_s, detail)
            write_fault(self._store, entry)

    def _wait_for(self, step: int) -> bool:
        """Wait until the trainer is at `step`. Returns False if the run ends first."""
        polls = 0
        while True:
            polls += 1
            try:
                heartbeat = documents.TRAINER.read(self._store, UnreadableDocuments())
                if heartbeat is not None and heartbeat.step >= step and heartbeat.activity != "starting":
                    return heartbeat.activity != "done"
                if polls % 50 == 0 and recover(self._store).state.phase in TERMINAL_RUN:
                    return False
            except StoreUnavailable as error:
                log.warning("store_unavailable", error=str(error))
            time.sleep(POLL_S)

    def _inject(self, fault: Rehearsed) -> str:
        match fault.fault, fault.target:
            case "no_capacity", target:
                slots = self._slots(target)
                self._cloud.refuse(slots, fault.for_s)
                return f"no capacity for {', '.join(slots)} for {fault.for_s:g} s"
            case "kill", "daemon":
                return self._kill_daemon(fault.for_s)
            case "kill", "gateway":
                return self._kill_process(node_contract.GATEWAY)
            case "kill", "trainer":
                return self._kill_process(node_contract.TRAINER)
            case _, target:
                return self._preempt(self._machines(target), fault.notice_s)

    def _preempt(self, nodes: list[str], notice_s: float) -> str:
        if notice_s > 0:
            for node in nodes:
                self._cloud.notify(node)
            time.sleep(notice_s)
        for node in nodes:
            self._cloud.preempt(node, "preempted" if notice_s > 0 else "preempted without notice")
        return f"preempted {', '.join(nodes) or 'no machine'}"

    def _kill_daemon(self, for_s: float) -> str:
        lease = documents.LEASE.read(self._store, UnreadableDocuments())
        if lease is None or not is_alive(lease, time.time()):
            return "no daemon was running"
        os.kill(lease.pid, signal.SIGKILL)
        time.sleep(for_s)
        subprocess.run([sys.executable, "-m", "grpo_orch", "resume", self._store.url, "-d"], check=False)
        return f"killed pid {lease.pid}; resumed after {for_s:g} s"

    def _kill_process(self, module: str) -> str:
        killed = []
        for node in self._machines("trainer-0"):
            for pid in marked_processes(self._cloud.folder / node):
                if module in _command_line(pid):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(str(pid))
        return f"killed pid {', '.join(killed)}" if killed else "no process to kill"

    def _machines(self, target: str) -> list[str]:
        slots = self._slots(target)
        up = [name for name, machine in self._cloud.machines().items() if machine.state is MachineState.UP]
        return [name for name in up if slot_and_incarnation(name)[0] in slots]

    def _slots(self, target: str) -> list[str]:
        if target == "rollouts":
            return [f"rollout-{i}" for i in range(self._record.spec.rollout.replicas.max)]
        return [target]


def _command_line(pid: int) -> list[str]:
    try:
        return list(psutil.Process(pid).cmdline())
    except psutil.Error:
        return []


if __name__ == "__main__":
    sys.exit(main())
