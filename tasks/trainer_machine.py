"""The trainer's machine: the gateway and the trainer, side by side, `python -m tasks.trainer_machine`.

The gateway is started again whenever it ends, within a moment: it holds nothing that its members and the trainer
do not tell it anew. The trainer is not: when it ends, this process ends with its exit code, and the controller
decides.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import structlog

from checkpoint import documents
from checkpoint.codec import to_json
from checkpoint.store import Store
from policies import exit_codes
from policies.spec import TrainerSpec
from tasks.children import start_child
from tasks.machine_setup import set_up
from tasks.node_env import NodeEnv, read_node_env

log = structlog.get_logger()

GATEWAY_RESTART_WAIT_S = 0.2  # doubled while it ends within GATEWAY_STEADY_S of its start
GATEWAY_RESTART_WAIT_MAX_S = 5.0
GATEWAY_STEADY_S = 10.0


def main() -> int:
    env = read_node_env()
    spec = documents.read_run(Store(env.run)).spec
    if not set_up(Path(env.workdir), spec.trainer.setup):
        return exit_codes.BAD_SPEC
    trainer = start_child(trainer_argv(env, spec.trainer), {**os.environ, **spec.trainer.env})
    signal.signal(signal.SIGTERM, lambda *_: trainer.terminate())
    gateway = _start_gateway()
    started_at_s, wait_s = time.monotonic(), GATEWAY_RESTART_WAIT_S
    while True:
        pid, status = os.wait()
        if pid == trainer.pid:
            gateway.terminate()
            gateway.wait()
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if pid == gateway.pid:
            steady = time.monotonic() - started_at_s > GATEWAY_STEADY_S
            wait_s = GATEWAY_RESTART_WAIT_S if steady else min(2 * wait_s, GATEWAY_RESTART_WAIT_MAX_S)
            log.warning("gateway_ended", exit_code=os.waitstatus_to_exitcode(status), restart_in_s=wait_s)
            time.sleep(wait_s)
            gateway, started_at_s = _start_gateway(), time.monotonic()


def trainer_argv(env: NodeEnv, trainer: TrainerSpec) -> list[str]:
    """The trainer's command line: plain Python, or accelerate's launcher when run.yaml configures it."""
    if trainer.accelerate is None:
        return [sys.executable, "-m", "tasks.trainer"]
    config = Path(env.workdir) / "accelerate.json"  # accelerate reads .json as well as .yaml
    config.write_bytes(to_json(trainer.accelerate))
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    return [*launcher, "-m", "tasks.trainer"]


def _start_gateway() -> subprocess.Popen[bytes]:
    return start_child([sys.executable, "-m", "orchestrator.gateway"], dict(os.environ))


if __name__ == "__main__":
    sys.exit(main())
