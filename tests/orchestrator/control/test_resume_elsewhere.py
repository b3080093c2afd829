"""`resume` and `down` on another machine: with the run's secret or without, with a shared SkyPilot or without."""

from __future__ import annotations

import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from checkpoint import journal
from checkpoint.records import documents
from checkpoint.records.documents import MachineReport, RunRecord
from checkpoint.store.run_store import OPTIONS_ENV, Store
from orchestrator import clouds
from orchestrator.cli import down, main, start
from orchestrator.clouds.protocol import CloudUnavailable
from orchestrator.clouds.sky.records import Cluster, ClusterState
from orchestrator.clouds.sky.watch import UnrecordedClusters
from orchestrator.control import daemon
from orchestrator.home import run_token, token_file
from policies.model import exit_codes
from policies.model.events import SpecProved
from policies.model.vocabulary import NodePhase
from tests.budget import HANG_S
from tests.stand_ins.cloud_worlds import hurry
from tests.stand_ins.sky_table import PREFIX, Table
from tests.stand_ins.world import spec

RUN_ID = "sim-0"


class World:
    """A run, SkyPilot as a table, and a user who changes machines. The daemon is a real one, in a thread."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.sky = Table()
        self.store = Store((folder / "store").as_uri())
        self._folder, self._monkeypatch, self._capsys = folder, monkeypatch, capsys
        self._stop = threading.Event()
        self._daemon = threading.Thread()
        trainer = replace(spec().trainer, resources={"infra": "aws/us-east-1"})
        run = replace(spec(), cloud="sky", storage=self.store.url, workdir=str(folder), trainer=trainer)
        documents.create_run(self.store, RunRecord(documents.SCHEMA, RUN_ID, time.time(), run))
        before = journal.Journal(self.store, "before/1")
        before.take_over(0.0, "before", 1, "up")
        before.append(0.0, (SpecProved(),))
        self.sit_at("first")

    def sit_at(self, machine: str) -> None:
        self._monkeypatch.setenv("GRPO_ORCH_HOME", str(self._folder / machine))

    def cli(self, *words: str) -> tuple[int, str]:
        """Run `grpo-orch`. Returns its exit code and what it said is wrong."""
        self._monkeypatch.setattr(sys, "argv", ["grpo-orch", *words, self.store.url])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), self._capsys.readouterr().err

    def says(self, node: str, attempt: int, exit_code: int | None = None) -> None:
        """A machine says what its work does."""
        report = MachineReport(node, attempt, exit_code, False)
        documents.machine(report.node).write(self.store, report)

    def start_daemon(self, store: Store, _: RunRecord, reason: str, _page: object = None) -> int:
        epoch = journal.recover(store).state.epoch
        self._stop = threading.Event()
        self._daemon = threading.Thread(target=daemon.steer, args=(store, reason, self._stop))
        self._daemon.start()
        self.until(lambda: self._steers(epoch) or not self._daemon.is_alive())
        return 1

    def _steers(self, before: int) -> bool:
        """Whether the daemon holds the lease, for which `launcher.start_daemon` waits."""
        lease = documents.LEASE.read(self.store)
        return lease is not None and lease.epoch > before

    def daemon_dies(self) -> None:
        self._stop.set()
        if self._daemon.is_alive():
            self._daemon.join(HANG_S)

    def until(self, wanted: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + HANG_S
        while not wanted():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[World]:
    hurry(monkeypatch)
    monkeypatch.setenv(OPTIONS_ENV, "")  # and put back: the command line sets it
    made = World(tmp_path, monkeypatch, capsys)
    monkeypatch.setattr(clouds, "_open_skypilot", lambda *_: made.sky)
    for command in (start, down):
        monkeypatch.setattr(command, "start_daemon", made.start_daemon)
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    monkeypatch.setattr(structlog, "configure", lambda **_: None)
    yield made
    made.daemon_dies()
    structlog.reset_defaults()


def phases(world: World) -> set[NodePhase]:
    return {node.phase for node in journal.recover(world.store).state.nodes.values()}


def nodes(world: World) -> list[str]:
    return sorted(journal.recover(world.store).state.nodes)


def test_machines_are_taken_over_with_their_secret_and_not_without(world: World, tmp_path: Path) -> None:
    assert world.cli("resume", "-d")[0] == 0
    world.until(lambda: PREFIX + "trainer-0-i1" in world.sky.table)
    held = token_file(RUN_ID)
    world.daemon_dies()

    world.sit_at("second")
    code, said = world.cli("resume", "-d")
    assert code == exit_codes.FAILED
    assert f"trainer-0-i1 hold a secret that this machine has not: bring {token_file(RUN_ID)}" in said
    shutil.copy(held, token_file(RUN_ID))
    assert world.cli("resume", "-d") == (0, "")
    world.daemon_dies()

    world.sit_at("third")
    world.start_daemon(world.store, documents.read_run(world.store), "down")  # one that was cut off
    world.daemon_dies()
    assert world.cli("resume", "-d")[0] == exit_codes.FAILED
    assert world.cli("down") == (0, "")
    assert world.sky.table == {}
    assert world.cli("resume", "-d") == (0, "")  # with a secret of its own
    world.until(lambda: any(run_token(RUN_ID) in work.secrets.values() for work in world.sky.works))
    world.daemon_dies()
    assert world.cli("resume", "-d") == (0, "")
    stored = [path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert not any(run_token(RUN_ID).encode() in data for data in stored)


def test_a_skypilot_that_launched_nothing_finds_watches_and_returns_the_runs_machines(world: World) -> None:
    assert world.cli("resume", "-d")[0] == 0
    world.until(lambda: len(world.sky.table) == 3)
    for node in nodes(world):
        world.says(node, 1)
    world.until(lambda: phases(world) == {NodePhase.BOOTING})
    world.daemon_dies()

    world.sky = Table(elsewhere=world.sky.table)
    assert world.cli("resume", "-d") == (0, "")
    del world.sky.elsewhere[PREFIX + "rollout-0-i1"]  # preempted
    world.until(lambda: PREFIX + "rollout-0-i2" in world.sky.table)
    world.says("trainer-0-i1", 1, exit_code=exit_codes.FAILED)
    world.until(lambda: PREFIX + "trainer-0-i2" in world.sky.table)
    world.until(lambda: "end trainer-0-i1" in world.sky.asked)
    assert not [asked for asked in world.sky.asked if re.fullmatch("launch .*-i1", asked)]
    assert set(world.sky.elsewhere) == {PREFIX + "rollout-1-i1"}

    assert world.cli("down") == (0, "")
    assert world.sky.table == world.sky.elsewhere == {}
    assert not world.sky.group


def test_what_appears_at_the_very_end_is_taken_back_before_the_security_group() -> None:
    late = Cluster(PREFIX + "rollout-0-i1", ClusterState.UP, "aws/us-east-1/us-east-1a", True, 0.4, None)
    sky = Table(elsewhere={late.name: late})
    sky.group = True
    unrecorded = UnrecordedClusters(sky, PREFIX, ["aws/us-east-1"])  # type: ignore[arg-type]  # the table stands in for SkyPilot
    with pytest.raises(CloudUnavailable, match=late.name):
        unrecorded.clean_up()
    assert (sky.elsewhere, sky.group) == ({}, True)
    unrecorded.clean_up()
    assert not sky.group


def test_down_returns_what_no_record_and_no_journal_knows(world: World) -> None:
    lost = Cluster(PREFIX + "rollout-5-i1", ClusterState.UP, "aws/us-east-1/us-east-1a", True, 0.4, None)
    foreign = replace(lost, name=PREFIX + "0a1b2c3d-rollout-0-i1")  # of a run whose name begins like this one's id
    world.sky = Table(elsewhere={one.name: one for one in (lost, foreign)})
    assert world.cli("down")[0] == 0
    assert list(world.sky.elsewhere) == [foreign.name]
