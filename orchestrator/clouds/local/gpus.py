"""This machine's GPUs, divided over the machines of the local cloud.

A machine's folder names its GPUs in `gpus`, written before its first process starts. They are taken while a
process of it runs, and between two attempts of its work. So any daemon knows who holds which, in this run and in
the others of this user.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.clouds.local.processes import marked_processes, on_record
from orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
from policies.model.gpus import TOOL, VISIBLE, DriverFailed, asks_for_gpus, driver_failed, gpus_of, visible_names
from policies.model.spec import RunSpec
from policies.model.vocabulary import Refusal, Role, role_of

GPUS = "gpus"  # in the machine's folder: names as VISIBLE takes them
COUNT = (TOOL, "--query-gpu=index", "--format=csv,noheader")
COUNT_S = 60.0  # the first call wakes the driver


@dataclass(frozen=True, slots=True)
class Gpus:
    """Names of GPUs, and what a process needs in its environment for them to mean the same there."""

    names: tuple[str, ...]
    environment: Mapping[str, str]


def gpus_here(environment: Mapping[str, str] = os.environ) -> Gpus:
    """The GPUs that processes started from here may use; none where the driver's tool is missing or finds none.

    Raises DriverFailed, and CloudUnavailable when it does not answer.
    """
    if VISIBLE in environment:
        return Gpus(visible_names(environment[VISIBLE]), {})
    if shutil.which(TOOL) is None:
        return Gpus((), {})
    try:
        done = subprocess.run(COUNT, capture_output=True, timeout=COUNT_S, check=False)
    except OSError as error:  # it is no program of this machine's
        raise DriverFailed(f"{TOOL} cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise CloudUnavailable(f"{COUNT[0]} has not answered for {COUNT_S:.0f} s") from None
    if done.returncode != 0:
        raise driver_failed(done.returncode, (done.stderr + b" " + done.stdout).decode(errors="replace"))
    lines = done.stdout.decode(errors="replace").split("\n")
    names = (line.strip() for line in lines if line.strip().isdecimal())  # it may say other things
    # The tool counts along the bus; CUDA by itself puts the fastest first.
    return Gpus(tuple(names), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})


@contextlib.contextmanager
def share_for(folder: Path, spec: RunSpec) -> Iterator[dict[str, str]]:
    """The environment by which the machine in `folder` has its own GPUs. Within, no other is given any.

    The machine must be on record at the end, or have ended.

    Raises CloudRefused where too few are free, CloudUnavailable.
    """
    role = role_of(folder.name)
    wanted = gpus_of(role, spec)
    try:
        here = gpus_here()
    except DriverFailed as error:
        if asks_for_gpus(role, spec):
            raise CloudRefused(Refusal.UNKNOWN, str(error)) from error
        here = Gpus((), {})
    if not here.names or wanted == 0:
        yield {}
        return
    runs = folder.parents[2]
    with (runs / "gpus.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        names = _given(folder) if _holds(folder) else _free(folder, spec, here.names, wanted)
        (folder / GPUS).write_text(",".join(names))
        yield {**here.environment, VISIBLE: ",".join(names)}


def _free(folder: Path, spec: RunSpec, here: Sequence[str], wanted: int) -> list[str]:
    machines = [path.parent for path in folder.parents[2].glob(f"*/{folder.parent.name}/*/{GPUS}")]
    holders = {machine: _given(machine) for machine in machines if _holds(machine)}
    taken = {name for names in holders.values() for name in names}
    free = [name for name in here if name not in taken]
    kept = 0 if role_of(folder.name) is Role.TRAINER else _for_trainer(folder.parent, holders, spec)
    if len(free) - kept < wanted:
        held = (f"{','.join(names)} by {one.parents[1].name}/{one.name}" for one, names in holders.items())
        also = f" ({kept} for the trainer)" if kept else ""
        counts = f"takes {wanted} of {len(here)} GPUs and {len(free)} are free{also}"
        message = f"{folder.name} {counts}; held: {', '.join(held) or 'none'}"
        raise CloudRefused(Refusal.NO_CAPACITY, message)
    return free[:wanted]


def _for_trainer(machines: Path, holders: Mapping[Path, Sequence[str]], spec: RunSpec) -> int:
    """What rollout nodes may not take, for without a trainer they are of no use."""
    has_its_own = any(one.parent == machines and role_of(one.name) is Role.TRAINER for one in holders)
    return 0 if has_its_own else gpus_of(Role.TRAINER, spec)


def _given(machine: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):  # it is being terminated
        return (machine / GPUS).read_text().split(",")
    return []


def _holds(machine: Path) -> bool:
    """Whether a machine that was given GPUs still has them."""
    if not _given(machine):
        return False
    if marked_processes(machine):
        return True
    with contextlib.suppress(FileNotFoundError):
        # Its work has ended and it is up: its next attempt takes them.
        return on_record(machine).exit_code is not None and not (machine / "gone").exists()
    return False
