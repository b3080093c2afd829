"""How a trainer's processes are started: how many, and whether this machine's GPUs can carry them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from checkpoint.store.codec import to_json
from policies.model import exit_codes, node_contract
from policies.model.gpus import TOOL, VISIBLE, DriverFailed, asks_for_gpus, driver_failed, visible_names
from policies.model.spec import RunSpec, processes_of
from policies.model.vocabulary import Role
from tasks.machine.node_env import NodeEnv

log = structlog.get_logger()

# Ranks that torchrun, mpirun or a cluster's operator give the processes of a job; accelerate reads all of them.
RANKS = frozenset(
    (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        *(
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    )
)
SMI_S = 60.0  # the driver answers within seconds; it has loaded itself by then


def trainer_argv(env: NodeEnv, spec: RunSpec) -> list[str]:
    """The trainer's command line: plain Python for one process, else accelerate's launcher."""
    own, processes = spec.trainer.accelerate, processes_of(spec)
    if own is None and processes == 1:
        return [sys.executable, "-m", node_contract.TRAINER]
    config = Path(env.workdir) / "accelerate.json"  # accelerate reads .json as well as .yaml
    kind = "MULTI_GPU" if processes > 1 else "NO"
    # Port 0: one that is free. On accelerate's own default two trainers of one machine would meet.
    defaults = {"distributed_type": kind, "main_process_port": 0}
    config.write_bytes(to_json({**defaults, **_with_whole_weights(own or {}), "num_processes": processes}))
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    return [*launcher, "-m", node_contract.TRAINER]


def _with_whole_weights(own: Mapping[str, Any]) -> dict[str, Any]:
    """An accelerate config by which checkpoints hold whole weights, which is not the default of those that divide
    them: a folder in shards is loaded by no `from_pretrained`."""
    sections: dict[str, dict[str, Any]] = {
        "deepspeed_config": {"zero3_save_16bit_model": True},
        "fsdp_config": {"fsdp_state_dict_type": "FULL_STATE_DICT"},
    }
    whole = {key: {**default, **own[key]} for key, default in sections.items() if own.get(key)}
    if "deepspeed_config_file" in whole.get("deepspeed_config", {}):  # accelerate takes no second word beside it
        del whole["deepspeed_config"]
    return {**own, **whole}


def without_ranks(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the ranks of a job that grpo-orch itself may be part of.

    The trainer would take itself for one of that job's processes, and wait for the others.
    """
    return {name: value for name, value in env.items() if name not in RANKS}


def with_own_builds(env: Mapping[str, str], workdir: Path) -> dict[str, str]:
    """An environment in which torch compiles its extensions, such as DeepSpeed's, into the machine's own folder.

    A process that is killed while it compiles leaves a lock there, for which every later one would wait for ever;
    here nobody else can hold one.
    """
    folder = workdir / "torch_extensions"
    for lock in folder.glob("*/lock"):
        lock.unlink()
    return {"TORCH_EXTENSIONS_DIR": str(folder), **env}


def with_one_gpu(env: Mapping[str, str]) -> dict[str, str]:
    """An environment in which one process sees one GPU, where there is any: an evaluation needs no more."""
    names = visible_names(env[VISIBLE]) if VISIBLE in env else ["0"]
    return {**env, VISIBLE: ",".join(names[:1])}


def visible_gpus(env: Mapping[str, str]) -> int | None:
    """How many NVIDIA GPUs a process with this environment sees; None where nothing here can tell.

    Raises DriverFailed.
    """
    visible = env.get(VISIBLE)
    if visible is not None:
        return len(visible_names(visible))
    if shutil.which(TOOL) is None:
        return None
    try:
        listed = subprocess.run([TOOL, "-L"], capture_output=True, timeout=SMI_S, check=False)
    except subprocess.TimeoutExpired:
        raise DriverFailed(f"{TOOL} has not answered for {SMI_S:.0f} s") from None
    except OSError as error:
        raise DriverFailed(f"{TOOL} cannot be run: {error.strerror}") from error
    if listed.returncode != 0:
        raise driver_failed(listed.returncode, (listed.stderr + b" " + listed.stdout).decode(errors="replace"))
    return sum(line.startswith(b"GPU ") for line in listed.stdout.splitlines())


def counted_gpus(role: Role, spec: RunSpec, env: Mapping[str, str]) -> int | None:
    """As `visible_gpus`, for a machine of that role: a driver that fails where no GPUs were asked for is logged,
    and counts as none. Raises DriverFailed."""
    try:
        return visible_gpus(env)
    except DriverFailed as error:
        if asks_for_gpus(role, spec):
            raise
        log.warning("no_gpus", why=str(error))
        return None


def unfit_gpus(spec: RunSpec, gpus: int | None) -> tuple[int, str] | None:
    """An exit code and why, where so many GPUs cannot carry the run's processes; None where they can."""
    processes = processes_of(spec)
    if gpus is None or spec.grpo.get("use_cpu") or gpus == processes:
        return None
    if gpus < processes and processes > 1:  # another machine may have them
        return exit_codes.UNFIT_MACHINE, f"{processes} processes are to train, and this machine shows {gpus} GPUs"
    if gpus > 1 and processes == 1:
        message = f"this machine shows {gpus} GPUs to one process, and TRL trains on one in each"
        expected = f"set trainer.accelerate.num_processes: {gpus}, or {VISIBLE}: '0' in trainer.env"
        return exit_codes.BAD_SPEC, f"{message}; {expected}"
    return None


# `setup` of run.yaml: the user's shell script that makes a machine ready, run once on each.


def set_up(workdir: Path, script: str) -> str | None:
    """Run the user's set-up script once on this machine. Returns in words how it failed, or None."""
    done = workdir / "setup.done"
    if not script or done.exists():
        return None
    here = Path(sys.executable).parent  # so that `pip` and `python` are this environment's, on any machine
    env = {**os.environ, "PATH": os.pathsep.join([str(here), os.environ.get("PATH", os.defpath)])}
    code = subprocess.run(["bash", "-euo", "pipefail", "-c", script], check=False, env=env).returncode
    if code != 0:
        log.error("setup_failed", exit_code=code, hint="see the lines above; it is `setup` of run.yaml")
        return f"setup failed with exit code {code}"
    with contextlib.suppress(OSError):  # a disk that is full now: the script runs once more at the next start
        done.touch()
    return None
