"""The local cloud: every machine is a session of processes on this one, in a folder of its own.

It does to real processes what a real cloud does, so that a run's behaviour can be tried at no cost: machines that
vanish, notices, refusals for lack of capacity.

A machine's folder holds `lock` and `machine.json` (see `tasks.machine.local_machine`), `log`, `work/` as its disk,
`work/notice` once it will be taken back, `gone` with the reason once it is lost, and its `gpus`, if it was given
some. Log and disk of a terminated one stay.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.clouds.local.gpus import GPUS, share_for
from orchestrator.clouds.local.processes import MARK, carries_mark, kill_all, on_record
from orchestrator.clouds.protocol import CloudRefused, Offer, Order
from policies.control.fleet.fill import wanted_slots
from policies.control.fleet.markets import market_of
from policies.control.snapshot import Machine
from policies.model.node_contract import LOCAL_MACHINE, MACHINE, NOTICE, SPOOL, SPOOL_PREFIX, WORK, WORKDIR_ENV
from policies.model.pools import PoolOffer
from policies.model.spec import Prices, RunSpec
from policies.model.vocabulary import MachineState, Market, Refusal, Role, role_of, slot_and_incarnation


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
