"""Run trainer, gateway and uploader on the trainer's machine: `python -m grpo_orch.tasks.machine.trainer_machine`.

The gateway is restarted whenever it ends; its members and the trainer give it its state again. So is the uploader,
which finds its work in the spool and in the store. When the trainer ends, this process ends with its exit code,
and the controller decides.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import structlog

from grpo_orch.checkpoint.security.redaction import guard_output
from grpo_orch.checkpoint.security.vouched import UntrustedRun
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream.uploader import POLL_S
from grpo_orch.policies.model import exit_codes, node_contract
from grpo_orch.policies.model.gpus import DRIVER_HINT, DriverFailed
from grpo_orch.policies.model.vocabulary import Role
from grpo_orch.tasks.machine.children import exit_code_of, start_child
from grpo_orch.tasks.machine.exit_note import leave_reason, take_exit_code, trainer_exit_code
from grpo_orch.tasks.machine.launching import (
    counted_gpus,
    set_up,
    trainer_argv,
    unfit_gpus,
    with_one_gpu,
    with_own_builds,
    without_ranks,
)
from grpo_orch.tasks.machine.leaving import stop_file
from grpo_orch.tasks.machine.node_env import read_node_env, read_run_here
from grpo_orch.tasks.machine.spooling import find_spool

log = structlog.get_logger()

RESTART_WAIT_S = 0.2  # doubled while the process ends within STEADY_S of its start
RESTART_WAIT_MAX_S = 5.0
STEADY_S = 10.0
UPLOAD_S = 60.0  # after that the next attempt uploads the rest


def main() -> int:
    guard_output()
    env = read_node_env()
    try:
        record = read_run_here(Store(env.run), env.token)
    except UntrustedRun as error:
        _last_line(str(error))
        return exit_codes.BAD_SPEC
    spec = record.spec
    if (failed := set_up(Path(env.workdir), spec.trainer.setup)) is not None:
        _last_line(f"trainer.{failed}")
        return exit_codes.UNFIT_MACHINE
    environment = with_own_builds({**without_ranks(os.environ), **spec.trainer.env}, Path(env.workdir))
    try:
        gpus = counted_gpus(Role.TRAINER, spec, environment)
    except DriverFailed as error:
        _last_line(f"{error}; {DRIVER_HINT}")
        return exit_codes.UNFIT_MACHINE
    is_evaluation = record.evaluation is not None
    if is_evaluation:
        environment = with_one_gpu(environment)
    elif (unfit := unfit_gpus(spec, gpus)) is not None:
        code, reason = unfit
        _last_line(reason)
        return code
    take_exit_code(Path(env.workdir))  # of an earlier attempt
    argv = [sys.executable, "-m", node_contract.EVALUATOR] if is_evaluation else trainer_argv(env, spec)
    trainer = start_child(argv, environment)

    def end(*_: object) -> None:
        """Request all processes of the trainer to leave; a second signal kills it."""
        signal.signal(signal.SIGTERM, lambda *_: trainer.kill())
        stop_file(Path(env.workdir), env.attempt).touch()

    signal.signal(signal.SIGTERM, end)
    sidecars = [Sidecar("gateway", node_contract.GATEWAY), Sidecar("uploader", "grpo_orch.tasks.machine.uploader")]
    while True:
        pid, status = os.wait()
        if pid == trainer.pid:
            await_upload(Path(env.workdir))
            for sidecar in sidecars:
                sidecar.end()
            ended = exit_code_of(os.waitstatus_to_exitcode(status))
            code = trainer_exit_code(Path(env.workdir), ended)
            if ended == exit_codes.OK != code:
                _last_line("the trainer's process exited with 0 before training ended, for example by os._exit(0)")
            return code
        for sidecar in sidecars:
            if pid == sidecar.process.pid:
                sidecar.restart(status)


def _last_line(reason: str) -> None:
    """Print why the work ends, and note it for the controller."""
    leave_reason(Path(read_node_env().workdir), reason)
    print(f"grpo-orch trainer machine: {reason}", file=sys.stderr, flush=True)


def await_upload(workdir: Path, timeout_s: float = UPLOAD_S) -> None:
    """Wait for the uploader to store sealed checkpoints after the trainer's end: the machine may end soon."""
    deadline_s = time.monotonic() + timeout_s
    spool = find_spool(workdir)
    while spool is not None and spool.sealed() and time.monotonic() < deadline_s:
        time.sleep(POLL_S)


class Sidecar:
    """A process next to the trainer that is restarted when it ends. `module` is what it runs."""

    def __init__(self, name: str, module: str) -> None:
        self._name, self._module = name, module
        self._wait_s = RESTART_WAIT_S
        self.process = self._start()

    def restart(self, status: int) -> None:
        """Restart the process after it ended with a wait status, with exponential backoff."""
        is_steady = time.monotonic() - self._started_at_s > STEADY_S
        self._wait_s = RESTART_WAIT_S if is_steady else min(2 * self._wait_s, RESTART_WAIT_MAX_S)
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
