"""The trainer's machine: trainer, gateway and uploader, side by side, `python -m tasks.machine.trainer_machine`.

The gateway is started again whenever it ends, within a moment: it holds nothing that its members and the trainer
do not tell it anew. So is the uploader, which finds its work in the spool and in the store. The trainer is not:
when it ends, this process ends with its exit code, and the controller decides.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import structlog

from checkpoint.security.redaction import guard_output
from checkpoint.security.vouched import NotVouched
from checkpoint.store.run_store import Store
from checkpoint.stream.uploader import LOOK_S
from policies.model import exit_codes, node_contract
from policies.model.gpus import DRIVER_HINT, DriverFailed
from policies.model.vocabulary import Role
from tasks.machine.children import exit_code_of, start_child
from tasks.machine.exit_note import leave_reason, take_exit_code, told_exit_code
from tasks.machine.launching import (
    counted_gpus,
    set_up,
    trainer_argv,
    unfit_gpus,
    with_one_gpu,
    with_own_builds,
    without_ranks,
)
from tasks.machine.leaving import stop_file
from tasks.machine.node_env import read_node_env, read_run_here
from tasks.machine.spooling import find_spool

log = structlog.get_logger()

RESTART_WAIT_S = 0.2  # doubled while it ends within STEADY_S of its start
RESTART_WAIT_MAX_S = 5.0
STEADY_S = 10.0
UPLOAD_S = 60.0  # the next attempt takes up what takes longer


def main() -> int:
    guard_output()
    env = read_node_env()
    try:
        record = read_run_here(Store(env.run), env.token)
    except NotVouched as error:
        _last_line(str(error))
        return exit_codes.BAD_SPEC
    spec = record.spec
    if (failed := set_up(Path(env.workdir), spec.trainer.setup)) is not None:
        _last_line(f"trainer.{failed}")
        return exit_codes.UNFIT_MACHINE
    told = with_own_builds({**without_ranks(os.environ), **spec.trainer.env}, Path(env.workdir))
    try:
        gpus = counted_gpus(Role.TRAINER, spec, told)
    except DriverFailed as error:
        _last_line(f"{error}; {DRIVER_HINT}")
        return exit_codes.UNFIT_MACHINE
    evaluates = record.evaluation is not None
    if evaluates:
        told = with_one_gpu(told)
    elif (unfit := unfit_gpus(spec, gpus)) is not None:
        code, why = unfit
        _last_line(why)
        return code
    take_exit_code(Path(env.workdir))  # of an earlier attempt
    argv = [sys.executable, "-m", node_contract.EVALUATOR] if evaluates else trainer_argv(env, spec)
    trainer = start_child(argv, told)

    def end(*_: object) -> None:
        """Ask all processes of the trainer to leave; a second signal kills it."""
        signal.signal(signal.SIGTERM, lambda *_: trainer.kill())
        stop_file(Path(env.workdir), env.attempt).touch()

    signal.signal(signal.SIGTERM, end)
    beside = [Beside("gateway", node_contract.GATEWAY), Beside("uploader", "tasks.machine.uploader")]
    while True:
        pid, status = os.wait()
        if pid == trainer.pid:
            let_upload(Path(env.workdir))
            for one in beside:
                one.end()
            ended = exit_code_of(os.waitstatus_to_exitcode(status))
            code = told_exit_code(Path(env.workdir), ended)
            if ended == exit_codes.OK != code:
                why = "its process ended with 0 before its end, as os._exit(0) in a reward function has it do"
                _last_line(why)
            return code
        for one in beside:
            if pid == one.process.pid:
                one.restart(status)


def _last_line(why: str) -> None:
    """Print why the work here ends, and note it for the controller."""
    leave_reason(Path(read_node_env().workdir), why)
    print(f"grpo-orch trainer machine: {why}", file=sys.stderr, flush=True)


def let_upload(workdir: Path, timeout_s: float = UPLOAD_S) -> None:
    """Give the uploader a while to store what a trainer that has died had sealed; it may be the machine's end."""
    deadline_s = time.monotonic() + timeout_s
    spool = find_spool(workdir)
    while spool is not None and spool.sealed() and time.monotonic() < deadline_s:
        time.sleep(LOOK_S)


class Beside:
    """A process that is kept up beside the trainer. `module` is what it runs."""

    def __init__(self, name: str, module: str) -> None:
        self._name, self._module = name, module
        self._wait_s = RESTART_WAIT_S
        self.process = self._start()

    def restart(self, status: int) -> None:
        """Start it again after it has ended with a wait status, later each time if it ends at once."""
        steady = time.monotonic() - self._started_at_s > STEADY_S
        self._wait_s = RESTART_WAIT_S if steady else min(2 * self._wait_s, RESTART_WAIT_MAX_S)
        code = os.waitstatus_to_exitcode(status)
        log.warning(f"{self._name}_ended", exit_code=code, restart_in_s=self._wait_s)
        time.sleep(self._wait_s)
        self.process = self._start()

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        self._started_at_s = time.monotonic()
        return start_child([sys.executable, "-m", self._module], dict(os.environ))


if __name__ == "__main__":
    sys.exit(main())
