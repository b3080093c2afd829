"""Each cloud with the world behind it: what is really there, whatever the cloud says, and what may befall it.

`LocalWorld` has real processes. `SkyWorld` has a table in the place of SkyPilot and of the machines behind it.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest

from checkpoint.records import documents
from checkpoint.records.documents import MachineReport, RunRecord
from checkpoint.store.run_store import Store
from orchestrator.clouds.local import LocalCloud, marked_processes, on_record
from orchestrator.clouds.protocol import Cloud, CloudRefused
from orchestrator.clouds.sky import watch
from orchestrator.clouds.sky.cloud import SkyCloud
from orchestrator.clouds.sky.records import Cluster
from orchestrator.clouds.sky.work import Work
from policies.model.vocabulary import Refusal, slot_and_incarnation
from tests.stand_ins.sky_table import PREFIX, Table
from tests.stand_ins.world import spec

EXIT = "STAND_IN_EXIT"  # in the environment of work that is to end at once: its exit code
STAND_IN = Path(__file__).parent / "stand_in_node.sh"
_stores = itertools.count()


class CloudWorld(Protocol):
    """The run's cloud, and the machines behind it."""

    keeps_logs: bool  # of machines that are gone

    def open(self) -> Cloud:
        """The cloud as one more controller opens it."""

    def exists(self, node: str) -> bool:
        """Whether anything of the machine is there."""

    def attempts(self, node: str) -> list[int]:
        """The attempts whose work was started on machines of that name."""

    def kill(self, node: str) -> None:
        """The machine dies by itself."""

    def notice(self, node: str) -> None:
        """The machine is told that it will be taken."""

    def capacity(self, slot: str, *, ok: bool) -> None:
        """Whether there are machines for this slot."""

    def close(self) -> None:
        """End everything."""


class LocalWorld:
    """Machines that are processes of this one."""

    keeps_logs = True

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GRPO_ORCH_NODE_PYTHON", str(STAND_IN))
        self._folder = folder / "machines"

    def open(self) -> LocalCloud:
        return LocalCloud(self._folder, spec())

    def exists(self, node: str) -> bool:
        return bool(marked_processes(self._folder / node))

    def attempts(self, node: str) -> list[int]:
        log = self._folder / node / "log"
        said = log.read_text().splitlines() if log.exists() else []
        return [int(line.removeprefix("attempt ")) for line in said]

    def kill(self, node: str) -> None:
        machine = on_record(self._folder / node).pid  # not the lowest of its processes: pids wrap
        os.kill(machine, signal.SIGKILL)

    def notice(self, node: str) -> None:
        self.open().notify(node)

    def capacity(self, slot: str, *, ok: bool) -> None:
        self.open().refuse([slot], 0.0 if ok else 600.0)

    def close(self) -> None:
        for folder in self._folder.glob("*/"):
            self.open().terminate(folder.name)


class _Machines(Table):
    """The table, with machines that work and say so in the store."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self.started: list[tuple[str, int]] = []
        self.full: set[str] = set()

    def launch(self, name: str, work: Work, timeout_s: float) -> Cluster:
        if slot_and_incarnation(name.removeprefix(PREFIX))[0] in self.full:
            raise CloudRefused(Refusal.NO_CAPACITY, "no capacity")
        made = super().launch(name, work, timeout_s)
        self._work(work)
        return made

    def run_again(self, name: str, work: Work, timeout_s: float) -> None:
        assert name in self.table
        super().run_again(name, work, timeout_s)
        self._work(work)

    def log(self, name: str, *, follow: bool) -> Iterator[str]:
        if name not in self.table:
            raise KeyError(name)
        assert not follow
        node = name.removeprefix(PREFIX)
        return iter([f"attempt {attempt}" for of, attempt in self.started if of == node])

    def _work(self, work: Work) -> None:
        node, attempt = work.env["GRPO_ORCH_NODE"], int(work.env["GRPO_ORCH_ATTEMPT"])
        self.started.append((node, attempt))
        self.says(node, attempt, int(work.env[EXIT]) if EXIT in work.env else None)

    def says(self, node: str, attempt: int, exit_code: int | None = None, *, notice: bool = False) -> None:
        report = MachineReport(node, attempt, exit_code, notice)
        documents.machine(report.node).write(self._store, report)


class SkyWorld:
    """Machines that SkyPilot's table has."""

    keeps_logs = False

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        hurry(monkeypatch)
        monkeypatch.setenv("GRPO_ORCH_HOME", str(folder / "home"))
        base = spec()
        trainer = replace(base.trainer, resources={"infra": "aws/us-east-1"})
        self._spec = replace(base, cloud="sky", workdir=str(folder), trainer=trainer)
        self._store = Store(f"memory://cloud-{next(_stores)}")
        self._sky = _Machines(self._store)
        self._opened: list[SkyCloud] = []

    def open(self) -> SkyCloud:
        record = RunRecord(1, "sim-0", 0.0, self._spec)
        made = SkyCloud(self._sky, record, self._store)  # type: ignore[arg-type]  # the table stands in for SkyPilot
        self._opened.append(made)
        return made

    def exists(self, node: str) -> bool:
        return PREFIX + node in self._sky.table

    def attempts(self, node: str) -> list[int]:
        return [attempt for of, attempt in self._sky.started if of == node]

    def kill(self, node: str) -> None:
        del self._sky.table[PREFIX + node]

    def notice(self, node: str) -> None:
        self._sky.says(node, self.attempts(node)[-1], notice=True)

    def capacity(self, slot: str, *, ok: bool) -> None:
        (self._sky.full.discard if ok else self._sky.full.add)(slot)

    def close(self) -> None:
        for cloud in self._opened:
            cloud.close()


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the threads that look do so all the time."""
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(watch, "READ_EVERY_S", 0.01)
