"""The local cloud: every machine is a session of processes on this computer, with its own folder.

It can lose machines, send preemption notices and refuse launches for lack of capacity, so that a run's behaviour
can be tried at no cost.

A machine's folder holds `lock` and `machine.json` (see `tasks.machine.local_machine`), `log`, `work/` as its disk,
`work/notice` after a preemption notice, `gone` with the reason once it is lost, and `gpus` if it was assigned any.
Log and disk of a terminated machine stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from grpo_orch.checkpoint.store.codec import from_json
from grpo_orch.checkpoint.store.errors import Corrupt
from grpo_orch.orchestrator.clouds.protocol import CloudRefused, CloudUnavailable, LaunchOrder, Offer
from grpo_orch.orchestrator.clouds.wheel import wheel_digest
from grpo_orch.orchestrator.home import home
from grpo_orch.orchestrator.node_installer import State, python_of, state_of
from grpo_orch.policies.fleet.market import market_of
from grpo_orch.policies.fleet.plan import wanted_slots
from grpo_orch.policies.model.gpus import (
    TOOL,
    VISIBLE,
    DriverFailed,
    driver_failed,
    gpus_of,
    requests_gpus,
    visible_names,
)
from grpo_orch.policies.model.linux import BETWEEN_PROGRAMS_LOOKS, BETWEEN_PROGRAMS_S, is_between_programs
from grpo_orch.policies.model.node_contract import (
    LOCAL_MACHINE,
    MACHINE,
    NOTICE,
    SPOOL,
    SPOOL_PREFIX,
    WORK,
    WORKDIR_ENV,
    AttemptRecord,
)
from grpo_orch.policies.model.pools import PoolOffer
from grpo_orch.policies.model.spec import Prices, RunSpec
from grpo_orch.policies.model.vocabulary import MachineState, Market, Refusal, Role, role_of, slot_and_incarnation
from grpo_orch.policies.tick.snapshot import Machine


class LocalCloud:
    """Machines below `folder`, for the run that `spec` describes. The methods are those of `Cloud`."""

    def __init__(self, folder: Path, spec: RunSpec) -> None:
        self.folder = folder
        self._spec = spec

    def machines(self) -> dict[str, Machine]:
        machines = {}
        for path in sorted(self.folder.glob(f"*/{MACHINE}")):
            with contextlib.suppress(FileNotFoundError):  # it is being terminated
                machines[path.parent.name] = self._machine(path.parent)
        return machines

    def launch(self, order: LaunchOrder) -> None:
        self._check_capacity(order)
        folder = self.folder / order.node
        (folder / "work").mkdir(parents=True, exist_ok=True, mode=0o700)
        python = node_python()
        part = folder / "market.part"  # atomic: it is read in every tick, and the disk may be full
        part.write_text(order.market)
        part.replace(folder / "market")
        with share_for(folder, self._spec) as gpus:
            self._start(order, folder, python, gpus)

    def terminate(self, node: str) -> None:
        """Kill the processes immediately."""
        folder = self.folder / node
        if folder.exists():
            _destroy(folder)
            for name in (f"work/{NOTICE}", "gone", GPUS, MACHINE):  # the record last, in case of an interruption
                (folder / name).unlink(missing_ok=True)

    def confirm(self, node: str) -> None:
        """Do nothing: `machines` always checks the processes."""

    def notify(self, node: str) -> None:
        """Give the node a preemption notice, as a metadata service would."""
        (self.folder / node / "work" / NOTICE).touch()

    def preempt(self, node: str, why: str) -> None:
        """Kill all processes of the machine and record the reason."""
        folder = self.folder / node
        (folder / "gone").write_text(why)
        _destroy(folder)

    def refuse(self, slots: list[str], for_s: float) -> None:
        """Refuse launches for these slots during `for_s`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        document = {"slots": slots, "until_s": time.time() + for_s}
        (self.folder / "no_capacity.json").write_text(json.dumps(document))

    def offers(self) -> list[Offer]:
        return [
            Offer(
                role,
                market,
                "processes on this machine",
                self._price(role, market),
                max_usd_per_h=self._price(role, market),
                other_market_max_usd_per_h=self._price(role, market.other),
            )
            for role, _, _ in wanted_slots(self._spec)
            for market in (market_of(role, self._spec),)
        ]

    def pools(self) -> list[PoolOffer]:
        """Return no pools: there is no choice."""
        return []

    def log(self, node: str, *, follow: bool) -> Iterator[str]:
        return lines_of(self._logs()[node], follow)

    def logged_nodes(self) -> list[str]:
        return sorted(self._logs())

    def clean_up(self) -> None:
        """Do nothing: local machines share nothing."""

    def close(self) -> None:
        """Do nothing: nothing runs in the background."""

    def _start(self, order: LaunchOrder, folder: Path, python: str, gpus: dict[str, str]) -> None:
        environment = {
            **os.environ,
            **order.environment,
            **gpus,
            MARK: str(folder),
            WORKDIR_ENV: str(folder / "work"),
            "PYTHONUNBUFFERED": "1",
        }
        read_end, write_end = os.pipe()
        machine = [sys.executable, "-m", LOCAL_MACHINE]
        with (folder / "log").open("ab") as log:
            subprocess.Popen(
                [*machine, str(write_end), str(folder), str(order.attempt), python, "-m", WORK[order.role]],
                env=environment,
                cwd=self._spec.workdir or None,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(write_end,),
            )
        os.close(write_end)
        os.read(read_end, 1)  # returns when the machine is recorded or has ended
        os.close(read_end)

    def _logs(self) -> dict[str, Path]:
        """Return log files by node, by slot (that of its newest node), and the daemon's as `daemon`."""
        logs = {"daemon": self.folder.parent / "daemon.log"}
        for path in sorted(self.folder.glob("*/log"), key=lambda path: (len(path.parent.name), path.parent.name)):
            slot, _ = slot_and_incarnation(path.parent.name)
            logs[path.parent.name] = logs[slot] = path
        return {name: path for name, path in logs.items() if path.exists()}

    def _machine(self, folder: Path) -> Machine:
        record = machine_record(folder)
        state, why = MachineState.UP, ""
        if (folder / "gone").exists():
            state, why = MachineState.GONE, (folder / "gone").read_text(errors="replace")
        elif record.exit_code is None and not carries_mark(record.pid, folder):
            record = machine_record(folder)  # it may have ended since the first read
            if record.exit_code is None:
                _destroy(folder)  # processes that outlived the machine
                state, why = MachineState.GONE, "its processes died"
        market = _market_of(folder)
        role = role_of(folder.name)
        return Machine(
            node=folder.name,
            state=state,
            attempt=record.attempt,
            exit_code=record.exit_code,
            exit_reason=record.reason,
            reason=why,
            notice=(folder / "work" / NOTICE).exists(),
            market=market,
            price_usd_per_h=self._price(role, market),
            on_demand_usd_per_h=self._price(role, Market.ON_DEMAND),
        )

    def _price(self, role: Role, market: Market) -> float:
        rehearse = self._spec.rehearse
        if rehearse is None:
            return 0.0
        prices: Prices = rehearse.prices.trainer if role is Role.TRAINER else rehearse.prices.rollout
        return prices.spot_usd_per_h if market is Market.SPOT else prices.on_demand_usd_per_h

    def _check_capacity(self, order: LaunchOrder) -> None:
        path = self.folder / "no_capacity.json"
        if not path.exists():
            return
        document: dict[str, Any] = json.loads(path.read_text())
        slot, _ = slot_and_incarnation(order.node)
        if slot in document["slots"] and time.time() < document["until_s"]:
            raise CloudRefused(Refusal.NO_CAPACITY, f"no {order.market} capacity for {slot} (rehearsed)")


class NoNodeEnvironment(CloudRefused):
    """This machine has no node environment that works; `grpo-orch node-env` makes it."""

    def __init__(self, problem: str) -> None:
        super().__init__(Refusal.CREDENTIALS, f"{problem}; make it with `grpo-orch node-env`")


def node_python() -> str:
    """Return the Python that runs node work.

    This is `$GRPO_ORCH_NODE_PYTHON`, that of `.venv-node` next to this environment or in the current folder, that
    of `node_env_folder()`, or this one if it has vLLM.

    Raises:
        CloudRefused: `$GRPO_ORCH_NODE_PYTHON` does not exist.
        NoNodeEnvironment: none exists, or the one in `node_env_folder()` is unfinished or outdated.
    """
    configured = os.environ.get("GRPO_ORCH_NODE_PYTHON")
    if configured is not None and not Path(configured).exists():
        raise CloudRefused(Refusal.CREDENTIALS, f"GRPO_ORCH_NODE_PYTHON={configured}: no such file")
    sibling, in_current = (parent / ".venv-node" for parent in (Path(sys.prefix).parent, Path.cwd()))
    for candidate in (Path(configured) if configured else None, python_of(sibling), python_of(in_current)):
        if candidate is not None and candidate.exists():
            return str(candidate)
    own = node_env_folder()
    match state_of(own, wheel_digest()) if own.exists() else State.MISSING:
        case State.READY:
            return str(python_of(own))
        case State.HALF_MADE:
            raise NoNodeEnvironment(f"the node environment in {own} is unfinished")
        case State.OUTDATED:
            raise NoNodeEnvironment(f"the node environment in {own} is of another version of grpo-orch")
        case State.MISSING if importlib.util.find_spec("vllm"):
            return sys.executable
    raise NoNodeEnvironment("no node environment")


def node_env_folder() -> Path:
    """Return the folder of the environment that `grpo-orch node-env` makes."""
    return home() / "node-env"


def _market_of(folder: Path) -> Market:
    """Return the market of a machine; on demand if the file is unreadable, as after a power failure."""
    try:
        return Market((folder / "market").read_text())
    except ValueError:
        return Market.ON_DEMAND


def _destroy(folder: Path) -> None:
    """Kill the machine's processes and delete the spool, which its trainer may keep in memory."""
    kill_all(folder)
    link = folder / "work" / SPOOL
    if link.is_symlink() and (spool := link.resolve()).name.startswith(SPOOL_PREFIX):
        shutil.rmtree(spool, ignore_errors=True)
        link.unlink(missing_ok=True)


def lines_of(path: Path, follow: bool) -> Iterator[str]:
    """Yield the lines of a file; `follow` waits for new ones."""
    with path.open(encoding="utf-8", errors="replace") as log:
        while True:
            line = log.readline()
            if line:
                yield line.rstrip("\n")
            elif follow:
                time.sleep(0.2)  # poll, as tail -f does: no file event is portable
            else:
                return


# Dividing this computer's GPUs among the local machines. A machine's folder lists its GPUs in `gpus`, written
# before its first process starts. The machine holds them while a process of it runs, and between two attempts of
# its work. So every daemon knows the assignment, in this and in all other runs of the user.

GPUS = "gpus"  # in the machine's folder: names as VISIBLE takes them
COUNT = (TOOL, "--query-gpu=index", "--format=csv,noheader")
COUNT_S = 60.0  # the first call wakes the driver


def gpus_here(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the GPUs that child processes may use; empty if the driver's tool is missing or finds none.

    Raises DriverFailed, and CloudUnavailable when the tool does not answer.
    """
    if VISIBLE in environment:
        return visible_names(environment[VISIBLE])
    if shutil.which(TOOL) is None:
        return ()
    try:
        done = subprocess.run(COUNT, capture_output=True, timeout=COUNT_S, check=False)
    except OSError as error:  # not an executable of this platform
        raise DriverFailed(f"{TOOL} cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise CloudUnavailable(f"{COUNT[0]} did not answer within {COUNT_S:.0f} s") from None
    if done.returncode != 0:
        raise driver_failed(done.returncode, (done.stderr + b" " + done.stdout).decode(errors="replace"))
    lines = done.stdout.decode(errors="replace").split("\n")
    return tuple(line.strip() for line in lines if line.strip().isdecimal())  # skip other output


@contextlib.contextmanager
def share_for(folder: Path, spec: RunSpec) -> Iterator[dict[str, str]]:
    """Assign GPUs to the machine in `folder` and yield the environment that selects them, under a lock.

    On exit the machine must be recorded or have ended.

    Raises CloudRefused when too few are free, and CloudUnavailable.
    """
    role = role_of(folder.name)
    wanted = gpus_of(role, spec)
    try:
        available = gpus_here()
    except DriverFailed as error:
        if requests_gpus(role, spec):
            raise CloudRefused(Refusal.UNKNOWN, str(error)) from error
        available = ()
    if not available or wanted == 0:
        yield {}
        return
    runs = folder.parents[2]
    with (runs / "gpus.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        names = _assigned(folder) if _holds_gpus(folder) else _free_gpus(folder, spec, available, wanted)
        (folder / GPUS).write_text(",".join(names))
        # The driver's tool numbers GPUs by bus id; CUDA's default order puts the fastest first.
        order = {} if VISIBLE in os.environ else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        yield {**order, VISIBLE: ",".join(names)}


def _free_gpus(folder: Path, spec: RunSpec, available: Sequence[str], wanted: int) -> list[str]:
    machines = [path.parent for path in folder.parents[2].glob(f"*/{folder.parent.name}/*/{GPUS}")]
    holders = {machine: _assigned(machine) for machine in machines if _holds_gpus(machine)}
    taken = {name for names in holders.values() for name in names}
    free = [name for name in available if name not in taken]
    reserved = 0 if role_of(folder.name) is Role.TRAINER else _reserved_for_trainer(folder.parent, holders, spec)
    if len(free) - reserved < wanted:
        held = (f"{','.join(names)} by {path.parents[1].name}/{path.name}" for path, names in holders.items())
        note = f" ({reserved} reserved for the trainer)" if reserved else ""
        counts = f"needs {wanted} GPUs, but {len(free)} of {len(available)} are free{note}"
        message = f"{folder.name} {counts}; in use: {', '.join(held) or 'none'}"
        raise CloudRefused(Refusal.NO_CAPACITY, message)
    return free[:wanted]


def _reserved_for_trainer(machines: Path, holders: Mapping[Path, Sequence[str]], spec: RunSpec) -> int:
    """Return how many GPUs rollout nodes must leave free: they are useless without a trainer."""
    trainer_has_gpus = any(path.parent == machines and role_of(path.name) is Role.TRAINER for path in holders)
    return 0 if trainer_has_gpus else gpus_of(Role.TRAINER, spec)


def _assigned(machine: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):  # it is being terminated
        return (machine / GPUS).read_text().split(",")
    return []


def _holds_gpus(machine: Path) -> bool:
    """Whether a machine still holds the GPUs that were assigned to it."""
    if not _assigned(machine):
        return False
    if marked_processes(machine):
        return True
    with contextlib.suppress(FileNotFoundError):
        # The machine is up and its work has ended: the next attempt needs the GPUs.
        return machine_record(machine).exit_code is not None and not (machine / "gone").exists()
    return False


# A machine's processes. Each carries the machine's mark in its environment.

MARK = "GRPO_ORCH_MACHINE"  # environment variable of every process of a machine; its value is the machine's folder


def kill_all(folder: Path) -> None:
    """SIGKILL the processes that carry the machine's mark until none is left."""
    while pids := marked_processes(folder):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def marked_processes(folder: Path) -> list[int]:
    """Return the pids of a machine."""
    return [pid for pid in psutil.pids() if carries_mark(pid, folder)]


def carries_mark(pid: int, folder: Path) -> bool:
    """Whether the process belongs to the machine. False for a zombie."""
    mark = os.fsencode(f"{MARK}={folder}")
    with contextlib.suppress(OSError):
        for _ in range(BETWEEN_PROGRAMS_LOOKS):
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if environment or not is_between_programs(Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")):
                return mark in environment.split(b"\0")
            time.sleep(BETWEEN_PROGRAMS_S)
    return False


def machine_record(folder: Path) -> AttemptRecord:
    """Read the machine's record. Raises FileNotFoundError.

    A damaged record counts as a dead machine: a power failure, which also ends the processes, may leave it empty.
    Raising would stop every tick of the daemon and the launches of other runs, which read it as well.
    """
    data = (folder / MACHINE).read_bytes()
    try:
        return from_json(data, AttemptRecord, str(folder / MACHINE))
    except Corrupt:
        return AttemptRecord(0)  # no process has the pid 0
