"""Prepare the trainer's processes: command line, environment, check of the machine's GPUs, and user set-up."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from grpo_orch.checkpoint.store.codec import to_json
from grpo_orch.policies.model import exit_codes, node_contract
from grpo_orch.policies.model.gpus import TOOL, VISIBLE, DriverFailed, driver_failed, requests_gpus, visible_names
from grpo_orch.policies.model.spec import RunSpec, processes_of
from grpo_orch.policies.model.vocabulary import Role
from grpo_orch.tasks.machine.node_env import NodeEnv

log = structlog.get_logger()

# Variables that torchrun, mpirun or a cluster's operator set for the processes of a job; accelerate reads them.
RANKS = re.compile(
    r"(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|(PMI|MPI|OMPI|MV2)_[A-Z_]*(RANK|SIZE)[A-Z]*"
)
SMI_S = 60.0  # nvidia-smi answers within seconds, even if it has to load the driver


def trainer_argv(env: NodeEnv, spec: RunSpec) -> list[str]:
    """Return the trainer's command line: plain Python for one process, else accelerate's launcher."""
    own, processes = spec.trainer.accelerate, processes_of(spec)
    if own is None and processes == 1:
        return [sys.executable, "-m", node_contract.TRAINER]
    config = Path(env.workdir) / "accelerate.json"  # accelerate reads .json as well as .yaml
    kind = "MULTI_GPU" if processes > 1 else "NO"
    # Port 0 picks a free port. With accelerate's default, two trainers on one machine would collide.
    defaults = {"distributed_type": kind, "main_process_port": 0}
    config.write_bytes(to_json({**defaults, **_with_whole_weights(own or {}), "num_processes": processes}))
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    return [*launcher, "-m", node_contract.TRAINER]


def _with_whole_weights(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return an accelerate config with which DeepSpeed and FSDP2 save whole weights.

    By default they save shards, which `from_pretrained` cannot load, and accelerate takes FSDP1.
    """
    sections: dict[str, dict[str, Any]] = {
        "deepspeed_config": {"zero3_save_16bit_model": True},
        "fsdp_config": {"fsdp_version": 2, "fsdp_state_dict_type": "FULL_STATE_DICT"},
    }
    whole = {key: {**default, **own[key]} for key, default in sections.items() if own.get(key)}
    if "deepspeed_config_file" in whole.get("deepspeed_config", {}):  # accelerate accepts nothing else with it
        del whole["deepspeed_config"]
    return {**own, **whole}


def without_ranks(env: Mapping[str, str]) -> dict[str, str]:
    """Remove the variables of a distributed job that grpo-orch itself may run in.

    With them the trainer would join that job and wait for its other processes.
    """
    return {name: value for name, value in env.items() if not RANKS.fullmatch(name)}


def with_own_builds(env: Mapping[str, str], workdir: Path) -> dict[str, str]:
    """Make torch compile extensions, such as DeepSpeed's, into this machine's folder. Remove stale locks there.

    A process killed during compilation leaves a lock, and later processes would wait for it forever. In this
    folder no other process can hold a lock.
    """
    folder = workdir / "torch_extensions"
    for lock in folder.glob("*/lock"):
        lock.unlink()
    return {"TORCH_EXTENSIONS_DIR": str(folder), **env}


def with_one_gpu(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with only the first visible GPU, for an evaluation."""
    names = visible_names(env[VISIBLE]) if VISIBLE in env else ["0"]
    return {**env, VISIBLE: ",".join(names[:1])}


def visible_gpus(env: Mapping[str, str]) -> int | None:
    """Return the number of NVIDIA GPUs visible in this environment; None if it is unknown. Raises DriverFailed."""
    visible = env.get(VISIBLE)
    if visible is not None:
        return len(visible_names(visible))
    if shutil.which(TOOL) is None:
        return None
    try:
        listed = subprocess.run([TOOL, "-L"], capture_output=True, timeout=SMI_S, check=False)
    except subprocess.TimeoutExpired:
        raise DriverFailed(f"{TOOL} did not respond within {SMI_S:.0f} s") from None
    except OSError as error:
        raise DriverFailed(f"{TOOL} cannot be run: {error.strerror}") from error
    if listed.returncode != 0:
        raise driver_failed(listed.returncode, (listed.stderr + b" " + listed.stdout).decode(errors="replace"))
    return sum(line.startswith(b"GPU ") for line in listed.stdout.splitlines())


def counted_gpus(role: Role, spec: RunSpec, env: Mapping[str, str]) -> int | None:
    """Return `visible_gpus`, or None with a warning if the driver fails but the role needs no GPUs.

    Raises DriverFailed if the role needs GPUs.
    """
    try:
        return visible_gpus(env)
    except DriverFailed as error:
        if requests_gpus(role, spec):
            raise
        log.warning("no_gpus", reason=str(error))
        return None


def unfit_gpus(spec: RunSpec, gpus: int | None) -> tuple[int, str] | None:
    """Check the number of GPUs against the run's processes. Returns an exit code and a reason, or None."""
    processes = processes_of(spec)
    if gpus is None or spec.grpo.get("use_cpu") or gpus == processes:
        return None
    if gpus < processes and processes > 1:  # another machine may have them
        reason = f"training needs {processes} GPUs, one per process, but this machine has {gpus}"
        return exit_codes.UNFIT_MACHINE, reason
    if gpus > 1 and processes == 1:
        message = f"this machine has {gpus} GPUs, but training has one process, which uses one GPU"
        expected = f"set trainer.accelerate.num_processes: {gpus}, or {VISIBLE}: '0' in trainer.env"
        return exit_codes.BAD_SPEC, f"{message}; {expected}"
    return None


def set_up(workdir: Path, script: str) -> str | None:
    """Run the user's script, `setup` in run.yaml, once on this machine. Returns an error message or None."""
    done = workdir / "setup.done"
    if not script or done.exists():
        return None
    bin_folder = Path(sys.executable).parent  # so that `pip` and `python` are those of this environment
    env = {**os.environ, "PATH": os.pathsep.join([str(bin_folder), os.environ.get("PATH", os.defpath)])}
    code = subprocess.run(["bash", "-euo", "pipefail", "-c", script], check=False, env=env).returncode
    if code != 0:
        log.error("setup_failed", exit_code=code, hint="see the output of `setup` (run.yaml) above")
        return f"setup failed with exit code {code}"
    with contextlib.suppress(OSError):  # the disk is full; the script runs again at the next start
        done.touch()
    return None
