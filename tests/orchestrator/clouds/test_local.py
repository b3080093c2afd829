"""What only the local cloud does: what it plays, its processes, spools and prices. See test_conformance."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_orch.orchestrator.clouds.local import MARK, LocalCloud, carries_mark, machine_record, marked_processes
from grpo_orch.orchestrator.clouds.protocol import CloudRefused, LaunchOrder
from grpo_orch.orchestrator.control.lease import process_started
from grpo_orch.policies.model.linux import is_between_programs
from grpo_orch.policies.model.spec import Prices, Rehearsal, RehearsedPrices
from grpo_orch.policies.model.vocabulary import MachineState, Market, Role, role_of
from grpo_orch.policies.tick.snapshot import Machine
from tests.budget import until
from tests.stand_ins.control_plane import LocalWorld
from tests.stand_ins.world import spec


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCloud]:
    world = LocalWorld(tmp_path, monkeypatch)
    yield world.open()
    world.close()


def order(node: str = "rollout-0-i1", attempt: int = 1, **environment: str) -> LaunchOrder:
    return LaunchOrder(node, role_of(node), Market.SPOT, attempt, environment)


def seen(cloud: LocalCloud, node: str, wanted: Callable[[Machine], bool]) -> Machine:
    """Look until the machine is as wanted: what the controller does, too."""
    until("so", lambda: node in (found := cloud.machines()) and wanted(found[node]))
    return cloud.machines()[node]


def up(machine: Machine) -> bool:
    return machine.state is MachineState.UP


def test_working_machine_accepts_no_other_work(cloud: LocalCloud, tmp_path: Path) -> None:
    cloud.launch(order())
    log = tmp_path / "machines" / "rollout-0-i1" / "log"
    while not log.read_text():
        seen(cloud, "rollout-0-i1", up)
    cloud.launch(order(attempt=2))
    assert seen(cloud, "rollout-0-i1", up).attempt == 1


def test_process_between_two_programs_belongs_to_its_machine(tmp_path: Path) -> None:
    again = tmp_path / "again.sh"
    again.write_text(f"exec sh {again}")
    process = subprocess.Popen(["sh", again], env={**os.environ, MARK: str(tmp_path)})
    try:
        assert all(process.pid in marked_processes(tmp_path) for _ in range(500))
    finally:
        process.kill()
        process.wait()


def test_process_of_a_folder_in_another_encoding_belongs_to_it(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: str(folder)})
    try:
        assert process.pid in marked_processes(folder)
    finally:
        process.kill()
        process.wait()


def test_a_process_may_be_called_anything(tmp_path: Path) -> None:
    """One that has ended has no environment, and its name is the first thing that is read of it then: of a longer
    one the kernel keeps fifteen bytes, wherever that cuts a letter in two."""
    names = "import ctypes; ctypes.CDLL(None).prctl(15, 'Überwachungö'.encode()[:-1])"
    process = subprocess.Popen([sys.executable, "-c", names])
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert b"\xc3) Z" in Path(f"/proc/{process.pid}/stat").read_bytes()
        assert not carries_mark(process.pid, tmp_path)
        assert process_started(process.pid) is None
    finally:
        process.wait()


def test_launch_on_a_full_disk_leaves_records_readable(cloud: LocalCloud) -> None:
    cloud.launch(order())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OSError):
            cloud.launch(order(attempt=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert cloud.machines()["rollout-0-i1"].market is Market.SPOT


def test_a_process_without_an_environment_belongs_to_no_machine(tmp_path: Path) -> None:
    process = subprocess.Popen(["cat"], env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"a")
        process.stdin.flush()
        assert process.stdout.read(1) == b"a"  # execve(2) is over once the program answers; Popen returns before
        assert not is_between_programs(Path(f"/proc/{process.pid}/stat").read_text())
        assert not carries_mark(process.pid, tmp_path)
    finally:
        process.kill()
        process.communicate()


def test_a_preempted_machine_is_gone_with_everything_on_it(cloud: LocalCloud) -> None:
    cloud.launch(order())
    seen(cloud, "rollout-0-i1", up)
    cloud.preempt("rollout-0-i1", "preempted")
    machine = cloud.machines()["rollout-0-i1"]
    assert (machine.state, machine.reason) == (MachineState.GONE, "preempted")
    assert marked_processes(cloud.folder / "rollout-0-i1") == []


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"{}", b'{"attempt": "1", "pid": 1}'])
def test_machine_with_damaged_record_is_gone_and_removable(cloud: LocalCloud, data: bytes) -> None:
    """As a power cut leaves it: every tick reads the records, and one must not hide the other machines."""
    cloud.launch(order("rollout-1-i1"))
    folder = cloud.folder / "rollout-0-i1"
    folder.mkdir()
    (folder / "machine.json").write_bytes(data)
    (folder / "market").write_bytes(data)
    states = {node: machine.state for node, machine in cloud.machines().items()}
    assert states == {"rollout-0-i1": MachineState.GONE, "rollout-1-i1": MachineState.UP}
    cloud.terminate("rollout-0-i1")
    assert list(cloud.machines()) == ["rollout-1-i1"]


def a_spool(cloud: LocalCloud, node: str, folder: Path) -> Path:
    """What a trainer leaves: a folder elsewhere with a checkpoint in it, and the link to it."""
    (folder / "checkpoint-50").mkdir(parents=True)
    (folder / "checkpoint-50" / "model.safetensors").write_bytes(b"weights")
    link = cloud.folder / node / "work" / "spool"
    link.symlink_to(folder)
    return link


def killed(cloud: LocalCloud, node: str) -> None:
    machine = machine_record(cloud.folder / node).pid  # which need not be the lowest of its processes: pids wrap
    os.kill(machine, signal.SIGKILL)
    seen(cloud, node, lambda m: m.state is MachineState.GONE)


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param(lambda cloud, node: cloud.terminate(node), id="terminate"),
        pytest.param(lambda cloud, node: cloud.preempt(node, "preempted"), id="preempt"),
        pytest.param(killed, id="its processes died"),
    ],
)
def test_the_memory_of_a_machine_is_given_back_with_it(
    ends: Callable[[LocalCloud, str], None], cloud: LocalCloud, tmp_path: Path
) -> None:
    links = {}
    for node in ("trainer-0-i1", "trainer-0-i2"):
        cloud.launch(order(node))
        seen(cloud, node, up)
        links[node] = a_spool(cloud, node, tmp_path / "memory" / f"grpo-orch-{node}")
    ends(cloud, "trainer-0-i1")
    assert [path.name for path in (tmp_path / "memory").iterdir()] == ["grpo-orch-trainer-0-i2"]
    assert not links["trainer-0-i1"].is_symlink()
    assert (links["trainer-0-i2"] / "checkpoint-50" / "model.safetensors").read_bytes() == b"weights"


def test_spool_outlives_work_and_other_names_are_kept(cloud: LocalCloud, tmp_path: Path) -> None:
    cloud.launch(order("trainer-0-i1", STAND_IN_EXIT="7"))
    seen(cloud, "trainer-0-i1", lambda m: m.exit_code is not None)
    link = a_spool(cloud, "trainer-0-i1", tmp_path / "grpo-orch-1")
    cloud.launch(order("trainer-0-i1", attempt=2))
    seen(cloud, "trainer-0-i1", lambda m: m.attempt == 2)
    assert (link / "checkpoint-50").exists()  # the next attempt stores what is in it

    link.unlink()
    a_spool(cloud, "trainer-0-i1", tmp_path / "theirs")
    cloud.terminate("trainer-0-i1")
    assert (tmp_path / "theirs" / "checkpoint-50" / "model.safetensors").exists()


def test_capacity_returns_automatically(cloud: LocalCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)
    cloud.refuse(["rollout-0"], 0.3)
    with pytest.raises(CloudRefused, match="no spot capacity for rollout-0"):
        cloud.launch(order())
    now_s += 0.35
    cloud.launch(order())
    seen(cloud, "rollout-0-i1", up)


def test_offers_have_the_rehearsals_prices(cloud: LocalCloud) -> None:
    priced = replace(
        spec(),
        rehearse=Rehearsal(
            prices=RehearsedPrices(rollout=Prices(spot_usd_per_h=1.5), trainer=Prices(on_demand_usd_per_h=4))
        ),
    )
    offers = LocalCloud(cloud.folder, priced).offers()
    assert [(o.role, o.market, o.price_usd_per_h) for o in offers] == [
        (Role.TRAINER, Market.ON_DEMAND, 4),
        (Role.ROLLOUT, Market.SPOT, 1.5),
        (Role.ROLLOUT, Market.SPOT, 1.5),
    ]
