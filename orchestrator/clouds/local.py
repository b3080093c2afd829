"""The local cloud: every machine is a session of processes on this one, in a folder of its own.

It does to real processes what a real cloud does, so that a run's behaviour can be tried at no cost: machines that
vanish, notices, refusals for lack of capacity.

A machine's folder holds `lock` and `machine.json` (see `tasks.machine.local_machine`), `log`, `work/` as its disk,
`work/notice` once it will be taken back, `gone` with the reason once it is lost, and its `gpus`, if it was given
some. Log and disk of a terminated machine stay.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from checkpoint.store.codec import from_json
from checkpoint.store.errors import Corrupt
from orchestrator.clouds.protocol import CloudRefused, CloudUnavailable, Offer, Order
from policies.fleet.market import market_of
from policies.fleet.plan import wanted_slots
from policies.model.gpus import TOOL, VISIBLE, DriverFailed, asks_for_gpus, driver_failed, gpus_of, visible_names
from policies.model.linux import BETWEEN_PROGRAMS_LOOKS, BETWEEN_PROGRAMS_S, is_between_programs
from policies.model.node_contract import LOCAL_MACHINE, MACHINE, NOTICE, SPOOL, SPOOL_PREFIX, WORK, WORKDIR_ENV
from policies.model.pools import PoolOffer
from policies.model.spec import Prices, RunSpec
from policies.model.vocabulary import MachineState, Market, Refusal, Role, role_of, slot_and_incarnation
from policies.tick.snapshot import Machine


class LocalCloud:
    """Machines below `folder`, for the run that `spec` describes."""

    def __init__(self, folder: Path, spec: RunSpec) -> None:
        self._folder = folder
        self._spec = spec

    def machines(self) -> dict[str, Machine]:
        """See `Cloud.machines`."""
        found = {}
        for path in sorted(self._folder.glob(f"*/{MACHINE}")):
            with contextlib.suppress(FileNotFoundError):  # it is being terminated
                found[path.parent.name] = self._machine(path.parent)
        return found

    def launch(self, order: Order) -> None:
        """See `Cloud.launch`."""
        self._check_capacity(order)
        folder = self._folder / order.node
        (folder / "work").mkdir(parents=True, exist_ok=True, mode=0o700)
        python = node_python()
        part = folder / "market.part"  # it is read in every tick, and a full disk would leave half of it
        part.write_text(order.market)
        part.replace(folder / "market")
        with share_for(folder, self._spec) as gpus:
            self._start(order, folder, python, gpus)

    def terminate(self, node: str) -> None:
        """See `Cloud.terminate`. At once, as a real cloud does it in the end."""
        folder = self._folder / node
        if folder.exists():
            _destroy(folder)
            for name in (f"work/{NOTICE}", "gone", GPUS, MACHINE):  # the record last: it may be cut off
                (folder / name).unlink(missing_ok=True)

    def confirm(self, node: str) -> None:
        """See `Cloud.confirm`. Nothing to do: `machines` looks at the processes themselves."""

    def notify(self, node: str) -> None:
        """Tell the node, as a metadata service would, that its machine will be taken back."""
        (self._folder / node / "work" / NOTICE).touch()

    def preempt(self, node: str, why: str) -> None:
        """Take the machine away: every process of it is killed, and the cloud says why."""
        folder = self._folder / node
        (folder / "gone").write_text(why)
        _destroy(folder)

    def refuse(self, slots: list[str], for_s: float) -> None:
        """Have no capacity for these slots for a while."""
        self._folder.mkdir(parents=True, exist_ok=True)
        document = {"slots": slots, "until_s": time.time() + for_s}
        (self._folder / "no_capacity.json").write_text(json.dumps(document))

    def offers(self) -> list[Offer]:
        """See `Cloud.offers`."""
        return [
            Offer(
                role,
                market,
                "processes on this machine",
                self._price(role, market),
                most_usd_per_h=self._price(role, market),
                other_market_most_usd_per_h=self._price(role, market.other),
            )
            for role, _, _ in wanted_slots(self._spec)
            for market in (market_of(role, self._spec),)
        ]

    def without_quota(self) -> list[str]:
        """See `Cloud.without_quota`."""
        return []

    def pools(self) -> list[PoolOffer]:
        """See `Cloud.pools`. There is one machine."""
        return []

    def log(self, node: str, *, follow: bool) -> Iterator[str]:
        """See `Cloud.log`."""
        return lines_of(self._logs()[node], follow)

    def logged_nodes(self) -> list[str]:
        """See `Cloud.logged_nodes`."""
        return sorted(self._logs())

    def clean_up(self) -> None:
        """See `Cloud.clean_up`. They share nothing."""

    def close(self) -> None:
        """See `Cloud.close`. Nothing looks on its own."""

    def _start(self, order: Order, folder: Path, python: str, gpus: dict[str, str]) -> None:
        environment = {
            **os.environ,
            **order.environment,
            **gpus,
            MARK: str(folder),
            WORKDIR_ENV: str(folder / "work"),
            "PYTHONUNBUFFERED": "1",
        }
        registered, registers = os.pipe()
        machine = [sys.executable, "-m", LOCAL_MACHINE]
        with (folder / "log").open("ab") as log:
            subprocess.Popen(
                [*machine, str(registers), str(folder), str(order.attempt), python, "-m", WORK[order.role]],
                env=environment,
                cwd=self._spec.workdir or None,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(registers,),
            )
        os.close(registers)
        os.read(registered, 1)  # returns when the machine is on record, or has ended
        os.close(registered)

    def _logs(self) -> dict[str, Path]:
        """Log files by node, by slot (its newest node's) and, for the daemon, by its name."""
        found = {"daemon": self._folder.parent / "daemon.log"}
        for path in sorted(self._folder.glob("*/log"), key=lambda path: (len(path.parent.name), path.parent.name)):
            slot, _ = slot_and_incarnation(path.parent.name)
            found[path.parent.name] = found[slot] = path
        return {name: path for name, path in found.items() if path.exists()}

    def _machine(self, folder: Path) -> Machine:
        found = on_record(folder)
        state, why = MachineState.UP, ""
        if (folder / "gone").exists():
            state, why = MachineState.GONE, (folder / "gone").read_text(errors="replace")
        elif found.exit_code is None and not carries_mark(found.pid, folder):
            found = on_record(folder)  # it may have ended between the two looks
            if found.exit_code is None:
                _destroy(folder)  # what has outlived the machine
                state, why = MachineState.GONE, "its processes died"
        market = _market_of(folder)
        role = role_of(folder.name)
        return Machine(
            node=folder.name,
            state=state,
            attempt=found.attempt,
            exit_code=found.exit_code,
            exit_reason=found.reason,
            why=why,
            notice=(folder / "work" / NOTICE).exists(),
            market=market,
            price_usd_per_h=self._price(role, market),
            on_demand_usd_per_h=self._price(role, Market.ON_DEMAND),
        )

    def _price(self, role: Role, market: Market) -> float:
        rehearse = self._spec.rehearse
        if rehearse is None:
            return 0.0
        prices: Prices = rehearse.trainer_prices if role is Role.TRAINER else rehearse.rollout_prices
        return prices.spot_usd_per_h if market is Market.SPOT else prices.on_demand_usd_per_h

    def _check_capacity(self, order: Order) -> None:
        path = self._folder / "no_capacity.json"
        if not path.exists():
            return
        document: dict[str, Any] = json.loads(path.read_text())
        slot, _ = slot_and_incarnation(order.node)
        if slot in document["slots"] and time.time() < document["until_s"]:
            raise CloudRefused(Refusal.NO_CAPACITY, f"no {order.market} capacity for {slot} (rehearsed)")


def node_python() -> str:
    """The Python that runs node work: `$GRPO_ORCH_NODE_PYTHON`, `.venv-node` beside this environment or in the
    current folder, or this one if it has vLLM.

    Raises:
        CloudRefused: there is none; says how to make it.
    """
    named = os.environ.get("GRPO_ORCH_NODE_PYTHON")
    if named is not None and not Path(named).exists():
        raise CloudRefused(Refusal.CREDENTIALS, f"GRPO_ORCH_NODE_PYTHON={named}: no such file")
    beside = Path(sys.prefix).parent / ".venv-node" / "bin" / "python"
    here = Path.cwd() / ".venv-node" / "bin" / "python"
    for candidate in (Path(named) if named else None, beside, here):
        if candidate is not None and candidate.exists():
            return str(candidate)
    if importlib.util.find_spec("vllm"):
        return sys.executable
    raise CloudRefused(Refusal.CREDENTIALS, f"no node environment at {beside}; make it with `make node-env`")


def _market_of(folder: Path) -> Market:
    """The market of a machine; on demand where a power cut has left no readable note of it."""
    try:
        return Market((folder / "market").read_text())
    except ValueError:
        return Market.ON_DEMAND


def _destroy(folder: Path) -> None:
    """End the machine's processes and give back its memory: the spool, which its trainer may have put there."""
    kill_all(folder)
    link = folder / "work" / SPOOL
    if link.is_symlink() and (spool := link.resolve()).name.startswith(SPOOL_PREFIX):
        shutil.rmtree(spool, ignore_errors=True)
        link.unlink(missing_ok=True)


def lines_of(path: Path, follow: bool) -> Iterator[str]:
    """The lines of a file; with `follow`, on as they come."""
    with path.open(encoding="utf-8", errors="replace") as log:
        while True:
            line = log.readline()
            if line:
                yield line.rstrip("\n")
            elif follow:
                time.sleep(0.2)  # files have no event that is portable; this is how tail -f does it, too
            else:
                return


# This machine's GPUs, divided over the local machines. A machine's folder names its GPUs in `gpus`, written
# before its first process starts. They are taken while a process of it runs, and between two attempts of its
# work. So any daemon knows which machine holds which, in this run and in the others of this user.

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


# A machine's processes: each carries the machine's mark in its environment.

MARK = "GRPO_ORCH_MACHINE"  # in the environment of every process of a machine: its folder


def kill_all(folder: Path) -> None:
    """SIGKILL every process that carries the machine's mark, until none is left."""
    while pids := marked_processes(folder):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def marked_processes(folder: Path) -> list[int]:
    """The pids of a machine."""
    return [pid for pid in psutil.pids() if carries_mark(pid, folder)]


def carries_mark(pid: int, folder: Path) -> bool:
    """Whether the process belongs to the machine. A dead one does not, also while it waits to be reaped."""
    mark = os.fsencode(f"{MARK}={folder}")
    with contextlib.suppress(OSError):
        for _ in range(BETWEEN_PROGRAMS_LOOKS):
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if environment or not is_between_programs(Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")):
                return mark in environment.split(b"\0")
            time.sleep(BETWEEN_PROGRAMS_S)
    return False


@dataclass(frozen=True, slots=True)
class OnRecord:
    """A machine's newest attempt. `exit_code` is None until it has ended, `pid` is the machine's own process and
    `reason` the last line of the work that ended."""

    attempt: int
    pid: int
    exit_code: int | None = None
    reason: str = ""


_DIED = OnRecord(0, 0)  # no process has the pid 0


def on_record(folder: Path) -> OnRecord:
    """Read the machine's record. Raises FileNotFoundError.

    A damaged record counts as that of a machine whose process died: a power cut, which ends the processes too, may
    leave it empty. The daemon reads it in every tick, and launches of other runs read it.
    """
    data = (folder / MACHINE).read_bytes()
    try:
        return from_json(data, OnRecord, str(folder / MACHINE))
    except Corrupt:
        return _DIED
