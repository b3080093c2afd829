"""What a control plane acts on, without a cloud: a run's store, the clouds with what is really there, a daemon.

`Run` is a store with what daemon, machines and trainer write into it. `LocalWorld` and `SkyWorld` are the clouds
of the conformance suite: real processes, and SkyPilot played by `Table`. `SkyUser` is a user who steers a run on
SkyPilot, with a real daemon in a thread. Times and decisions without any store: `tests.stand_ins.world`.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
import structlog

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.journal import Journal
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import MachineReport, RunRecord
from grpo_orch.checkpoint.store.run_store import OPTIONS_ENV, Store
from grpo_orch.checkpoint.stream.catalog import Catalog, Checkpoint
from grpo_orch.orchestrator import clouds
from grpo_orch.orchestrator.clouds.local import LocalCloud, machine_record, marked_processes
from grpo_orch.orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
from grpo_orch.orchestrator.clouds.sky import watch
from grpo_orch.orchestrator.clouds.sky.cloud import SkyCloud
from grpo_orch.orchestrator.clouds.sky.records import Cluster, ClusterState, Instance, SkyOffer
from grpo_orch.orchestrator.clouds.sky.work import Work
from grpo_orch.orchestrator.control import daemon
from grpo_orch.policies.model.events import ControllerTookOver, Event
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.state import RunState
from grpo_orch.policies.model.vocabulary import Refusal, slot_and_incarnation
from tests.budget import HANG_S, until
from tests.stand_ins.world import spec

RUN_ID = "sim-0"
PREFIX = f"grpo-{RUN_ID}-"  # of its clusters
EXIT = "STAND_IN_EXIT"  # in the environment of work that is to end at once: its exit code
STAND_IN = Path(__file__).parent / "stand_in_node.sh"
_stores = itertools.count()


class Run:
    """A run's store: in a folder, or in memory."""

    def __init__(self, folder: Path | None = None, run: RunSpec | None = None) -> None:
        url = f"memory://run-{next(_stores)}" if folder is None else f"file://{folder}"
        self.store = Store(url)
        workdir = "" if folder is None else str(folder.parent)
        stored = replace(run or spec(), storage=self.store.url, workdir=workdir)
        self.record = RunRecord(documents.SCHEMA, RUN_ID, time.time(), stored)

    def create(self) -> Self:
        documents.create_run(self.store, self.record)
        return self

    @property
    def state(self) -> RunState:
        return journal.recover(self.store).state

    def happens(self, *events: Event) -> None:
        """A controller takes the run and journals these."""
        writer = Journal(self.store, "test")
        writer.take_over(1.0, "test", 1, "test")
        writer.append(1.0, events)

    def saves(self, *versions: str) -> None:
        """Checkpoints, in the catalog alone."""
        for version in versions:
            Catalog(self.store, "test").commit(1.0, Checkpoint(version, f"m{version}", "", 1.0, 1), frozenset(), 0)

    def machine_says(
        self, node: str, attempt: int, exit_code: int | None = None, *, notice: bool = False, reason: str = ""
    ) -> None:
        report = MachineReport(node, attempt, exit_code, notice, exit_reason=reason)
        documents.machine(node).write(self.store, report)

    def taken_for(self) -> list[str]:
        """Why the run was taken over, each time."""
        events = [event for entry in journal.read(self.store) for event in entry.decoded()]
        return [event.reason for event in events if isinstance(event, ControllerTookOver)]


class Table:
    """SkyPilot as a table of clusters, with what was asked of it."""

    def __init__(self, elsewhere: dict[str, Cluster] | None = None) -> None:
        """`elsewhere`: what another SkyPilot has launched in the same account."""
        self.table: dict[str, Cluster] = {}
        self.elsewhere = elsewhere if elsewhere is not None else {}
        self.group = False  # whether the cloud has the machines' security group
        self.shutting_down = 0  # looks, after its machines are gone, until the cloud lets it go
        self.asked: list[str] = []
        self.works: list[Work] = []
        self.fails: Exception | None = None
        self.idle = False

    def clusters(self, prefix: str) -> list[Cluster]:
        if isinstance(self.fails, CloudUnavailable):
            raise self.fails
        return [cluster for name, cluster in self.table.items() if name.startswith(prefix)]

    def confirm(self, name: str, _: float) -> Cluster | None:
        self.asked.append(f"confirm {name.removeprefix(PREFIX)}")
        return self.table.get(name)

    def has_machines(self, name: str) -> bool:
        return name in self.table

    def is_bought(self, name: str) -> bool | None:
        return name in self.table

    def launch(self, name: str, work: Work, _: float) -> Cluster:
        self.asked.append(f"launch {name.removeprefix(PREFIX)}")
        self.works.append(work)
        self.group = True
        if self.fails is not None:
            raise self.fails
        zone = "aws/us-east-1/us-east-1a"
        spot = bool(work.resources["use_spot"])
        self.table[name] = Cluster(name, ClusterState.UP, zone, spot, 0.4, None)
        return self.table[name]

    def run_again(self, name: str, _work: Work, _: float) -> None:
        self.asked.append(f"run_again {name.removeprefix(PREFIX)}")

    def is_idle(self, _name: str, _: float) -> bool:
        return self.idle

    def down(self, name: str, _: float) -> None:
        self.asked.append(f"down {name.removeprefix(PREFIX)}")
        self.table.pop(name, None)

    def unrecorded(self, prefix: str, _: Iterable[str | None]) -> list[Instance]:
        names = [name for name in list(self.elsewhere) if name.startswith(prefix) and name not in self.table]
        up = ClusterState.UP
        return [Instance(f"i-{name}", name, "us-east-1", "us-east-1a", "m", True, up, None) for name in names]

    def as_cluster(self, instance: Instance) -> Cluster:
        return replace(self.elsewhere[instance.name], unrecorded=True)

    def terminate_instances(self, instances: Iterable[Instance]) -> None:
        for instance in instances:
            del self.elsewhere[instance.name]
            self.asked.append(f"end {instance.name.removeprefix(PREFIX)}")

    def drop_group(self, places: Iterable[str | None], _: float) -> None:
        assert None not in places
        if self.table or self.shutting_down:
            self.shutting_down -= 1
            raise CloudUnavailable("the security group is in use")
        self.group = False

    def log(self, name: str, *, follow: bool) -> Iterator[str]:
        yield name
        assert not follow

    def offers(self, resources: dict[str, Any], *, spot: bool) -> list[SkyOffer]:
        if spot and resources.get("instance_type") == "only-on-demand":
            raise CloudRefused(Refusal.QUOTA, "no spot of it")
        return [SkyOffer("aws/us-east-1/us-east-1a", "p5.48xlarge", "H100:8", spot, 21.5 if spot else 55.04)]


class LocalWorld:
    """Machines that are processes of this one."""

    keeps_logs = True  # of machines that are gone

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
        machine = machine_record(self._folder / node).pid  # not the lowest of its processes: pids wrap
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

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run
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
        exit_code = int(work.env[EXIT]) if EXIT in work.env else None
        self._run.machine_says(node, attempt, exit_code, reason=work.env.get("STAND_IN_REASON", ""))


class SkyWorld:
    """Machines that SkyPilot's table has: with work of their own, or (`idle`) as a test says."""

    keeps_logs = False

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, idle: bool = False) -> None:
        hurry(monkeypatch)
        monkeypatch.setenv("GRPO_ORCH_HOME", str(folder / "home"))
        self.run = Run(run=on_sky("aws/us-east-1"))
        self.spec = replace(self.run.record.spec, workdir=str(folder))
        self.machines = _Machines(self.run)
        self.sky: Table = Table() if idle else self.machines
        self._opened: list[SkyCloud] = []

    def open(self) -> SkyCloud:
        record = replace(self.run.record, spec=self.spec)
        made = SkyCloud(self.sky, record, self.run.store)  # type: ignore[arg-type]  # a table for SkyPilot
        self._opened.append(made)
        return made

    def exists(self, node: str) -> bool:
        return PREFIX + node in self.sky.table

    def attempts(self, node: str) -> list[int]:
        return [attempt for of, attempt in self.machines.started if of == node]

    def kill(self, node: str) -> None:
        del self.sky.table[PREFIX + node]

    def notice(self, node: str) -> None:
        self.run.machine_says(node, self.attempts(node)[-1], notice=True)

    def capacity(self, slot: str, *, ok: bool) -> None:
        (self.machines.full.discard if ok else self.machines.full.add)(slot)

    def close(self) -> None:
        for cloud in self._opened:
            cloud.close()


CloudWorld = LocalWorld | SkyWorld


class SkyUser(Run):
    """A run on SkyPilot and the user who steers it, with a daemon in a thread; `sky` is what commands speak to."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, run: RunSpec) -> None:
        super().__init__(folder / "store", run)
        self.sky = Table()
        self._folder, self._monkeypatch = folder, monkeypatch
        self._stop, self._daemon = threading.Event(), threading.Thread()
        self.sit_at("first")
        hurry(monkeypatch)
        monkeypatch.setenv(OPTIONS_ENV, "")  # and put back: the command line sets it
        monkeypatch.setattr(clouds, "open_skypilot", lambda *_: self.sky)
        # What the daemon says is said elsewhere.
        structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
        monkeypatch.setattr(structlog, "configure", lambda **_: None)

    def sit_at(self, machine: str) -> None:
        self._monkeypatch.setenv("GRPO_ORCH_HOME", str(self._folder / machine))

    def start_daemon(self, store: Store, _: RunRecord, reason: str, _page: object = None) -> int:
        """As `launcher.start_daemon`: return once it holds the lease."""
        epoch = self.state.epoch
        self.steer(store, reason)
        until("it steers", lambda: self._has_taken(epoch) or not self.is_steered())
        return 1

    def steer(self, store: Store, reason: str) -> None:
        self._stop = threading.Event()
        self._daemon = threading.Thread(target=daemon.control_run, args=(store, reason, self._stop), daemon=True)
        self._daemon.start()

    def is_steered(self) -> bool:
        return self._daemon.is_alive()

    def daemon_dies(self) -> None:
        """It leaves its machines as they are."""
        self._stop.set()
        if self.is_steered():
            self._daemon.join(HANG_S)

    def _has_taken(self, before: int) -> bool:
        lease = documents.LEASE.read(self.store)
        return lease is not None and lease.epoch > before


def on_sky(trainer: str, rollout: str | None = None) -> RunSpec:
    """A run on SkyPilot, with its trainer there."""
    base = spec()
    resources = {} if rollout is None else {"infra": rollout}
    placed = replace(base.trainer, resources={"infra": trainer})
    return replace(base, cloud="sky", trainer=placed, rollout=replace(base.rollout, resources=resources))


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the threads that look do so all the time."""
    for module, name, value_s in (
        (watch, "SCAN_EVERY_S", 0.01),
        (watch, "READ_EVERY_S", 0.01),
        (daemon, "TROUBLE_WAIT_S", 0.01),
    ):
        monkeypatch.setattr(module, name, value_s)
