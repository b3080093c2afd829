"""What only the local cloud does: what it plays, its processes, spools, prices and GPUs. See test_conformance."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from grpo_orch.orchestrator.clouds.local import (
    MARK,
    LocalCloud,
    carries_mark,
    gpus_here,
    kill_all,
    machine_record,
    marked_processes,
)
from grpo_orch.orchestrator.clouds.protocol import CloudRefused, LaunchOrder
from grpo_orch.orchestrator.control.lease import process_started
from grpo_orch.policies.model.gpus import VISIBLE, DriverFailed
from grpo_orch.policies.model.linux import is_between_programs
from grpo_orch.policies.model.spec import Prices, Rehearsal, RehearsedPrices, RunSpec
from grpo_orch.policies.model.vocabulary import MachineState, Market, Refusal, Role, role_of
from grpo_orch.policies.tick.snapshot import Machine
from grpo_orch.tasks.machine.launching import visible_gpus
from tests.budget import until
from tests.stand_ins.control_plane import STAND_IN, LocalWorld
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


# The local cloud divides this machine's GPUs. Stood in for: the driver's tool that counts them, and the work.

TRAINER = "trainer-0-i1"
NODES = [f"rollout-{i}-i1" for i in range(4)]


class Here:
    """This machine, with as many GPUs as a test says; each call opens the cloud of one more controller."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tool = folder / "tools" / "nvidia-smi"
        self.tool.parent.mkdir()
        self.run: RunSpec = spec()

    def has(self, count: int) -> None:
        self.tool.write_text(f"#!/bin/sh\nseq 0 {count - 1}\n")
        self.tool.chmod(0o755)

    def cloud(self, run: str = "a-run") -> LocalCloud:
        return LocalCloud(self.folder / "home" / run / "machines", self.run)

    def launch(self, *nodes: str, run: str = "a-run", attempt: int = 1, **environment: str) -> None:
        for node in nodes:
            self.cloud(run).launch(LaunchOrder(node, role_of(node), Market.SPOT, attempt, environment))

    def pids(self, node: str, run: str = "a-run") -> list[int]:
        return marked_processes(self.folder / "home" / run / "machines" / node)

    def seen(self, node: str, variable: str = VISIBLE, run: str = "a-run") -> str | None:
        """What the processes of the machine have for the variable, each the same."""

        def look() -> list[str | None]:
            with contextlib.suppress(psutil.NoSuchProcess):  # one that has just ended
                every = [psutil.Process(pid).environ() for pid in self.pids(node, run)]
                if every and all(every):  # between two programs a process shows none
                    return [one.get(variable) for one in every]
            return []

        (found,) = set(until("an environment", look))
        return found

    def gone(self, node: str) -> None:
        """A killed process is there for a moment yet."""
        until("its processes gone", lambda: not self.pids(node))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    made = Here(tmp_path)
    monkeypatch.setenv("PATH", f"{made.tool.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("GRPO_ORCH_NODE_PYTHON", str(STAND_IN))
    monkeypatch.delenv(VISIBLE, raising=False)
    yield made
    for folder in (tmp_path / "home").glob("*"):
        for node in (cloud := made.cloud(folder.name)).machines():
            cloud.terminate(node)


def sized(trainer: str, rollout: str) -> RunSpec:
    plain = spec()
    return replace(
        plain,
        trainer=replace(plain.trainer, resources={"accelerators": trainer}),
        rollout=replace(plain.rollout, resources={"accelerators": rollout}),
    )


def test_each_node_has_its_own_gpus(here: Here) -> None:
    here.has(8)
    here.run = sized("H100:4", "H100:2")
    here.launch(TRAINER, *NODES[:2])
    assert [here.seen(node) for node in (TRAINER, *NODES[:2])] == ["0,1,2,3", "4,5", "6,7"]
    assert here.seen(TRAINER, "CUDA_DEVICE_ORDER") == "PCI_BUS_ID", "as the tool numbers them"
    with pytest.raises(CloudRefused, match="rollout-2-i1 needs 2 GPUs, but 0 of 8 are free") as caught:
        here.launch(NODES[2])
    assert caught.value.refusal is Refusal.NO_CAPACITY
    assert "0,1,2,3 by a-run/trainer-0-i1" in str(caught.value)


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param(lambda cloud, node: cloud.terminate(node), id="terminated"),
        pytest.param(lambda cloud, node: cloud.preempt(node, "preempted"), id="preempted"),
        pytest.param(lambda cloud, node: kill_all(cloud.folder / node), id="killed"),
    ],
)
def test_the_gpus_of_a_machine_that_ended_are_free(ends: Callable[[LocalCloud, str], None], here: Here) -> None:
    here.has(2)
    here.launch(TRAINER, NODES[0])
    ends(here.cloud(), NODES[0])
    here.gone(NODES[0])
    here.launch(NODES[1])
    assert here.seen(NODES[1]) == "1"


def test_machine_being_terminated_holds_gpus_until_processes_end(here: Here) -> None:
    here.has(2)
    here.launch(TRAINER, NODES[0])
    (here.cloud().folder / NODES[0] / "gone").write_text("preempted")
    with pytest.raises(CloudRefused):
        here.launch(NODES[1])
    kill_all(here.cloud().folder / NODES[0])
    here.gone(NODES[0])
    here.launch(NODES[1])
    assert here.seen(NODES[1]) == "1"


def test_gpu_holders_are_known_to_next_daemon_and_other_runs(here: Here) -> None:
    here.has(3)
    here.launch(TRAINER, NODES[0])
    here.launch(TRAINER, run="another-run")
    assert here.seen(TRAINER, run="another-run") == "2"
    with pytest.raises(CloudRefused, match="1 by a-run/rollout-0-i1"):
        here.launch(NODES[1])


def test_launches_at_the_same_moment_are_given_different_gpus(here: Here) -> None:
    here.has(5)
    with ThreadPoolExecutor() as threads:  # a controller's calls run beside each other, and another's too
        list(threads.map(here.launch, (TRAINER, *NODES)))
    assert {here.seen(node) for node in (TRAINER, *NODES)} == set("01234")


def test_between_two_attempts_a_machine_keeps_its_gpus(here: Here) -> None:
    here.has(2)
    here.launch(TRAINER, STAND_IN_EXIT="77")
    until("its end", lambda: here.cloud().machines()[TRAINER].exit_code == 77 and not here.pids(TRAINER))
    here.launch(NODES[0])
    here.launch(TRAINER, attempt=2)
    assert here.cloud().machines()[TRAINER].state is MachineState.UP
    assert (here.seen(TRAINER), here.seen(NODES[0])) == ("0", "1")


def test_trainers_gpus_are_reserved(here: Here) -> None:
    here.has(2)
    here.launch(TRAINER, NODES[0])
    here.cloud().preempt(TRAINER, "preempted")
    with pytest.raises(CloudRefused, match=r"needs 1 GPUs, but 1 of 2 are free \(1 reserved for the trainer\)"):
        here.launch(NODES[1])
    here.launch("trainer-0-i2")
    assert here.seen("trainer-0-i2") == "0"


def test_first_name_in_claim_file_is_void_if_machine_never_came(here: Here) -> None:
    here.has(2)
    here.launch(TRAINER)
    folder = here.cloud().folder / NODES[0]
    folder.mkdir()
    (folder / "gpus").write_text("0")  # of a daemon that was killed before it started anything
    here.launch(NODES[0])
    assert here.seen(NODES[0]) == "1"


@pytest.mark.parametrize(
    ("count", "run"), [(0, sized("H100:8", "H100:8")), (1, replace(spec(), grpo={"use_cpu": True}))]
)
def test_without_gpus_or_on_cpu_a_run_is_left_all_it_sees(here: Here, count: int, run: RunSpec) -> None:
    here.has(count)
    here.run = run
    here.launch(TRAINER, *NODES)
    assert here.seen(TRAINER) is None


def test_failing_driver_refuses_only_gpu_requests(here: Here) -> None:
    here.has(0)
    here.tool.write_text("#!/bin/sh\necho no driver\nexit 9\n")
    here.run = sized("H100:8", "H100:8")
    with pytest.raises(CloudRefused, match="nvidia-smi ends with exit code 9: no driver") as caught:
        here.launch(TRAINER)
    assert caught.value.refusal is Refusal.UNKNOWN
    here.run = spec()
    here.launch(TRAINER)
    assert here.seen(TRAINER) is None


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("2,3", ("2", "3")),
        ("GPU-8932f937, GPU-46b1a2c0", ("GPU-8932f937", "GPU-46b1a2c0")),
        ("", ()),
        ("1,-1,0", ("1",)),
        ("0,0,1", ("0", "1")),
    ],
)
def test_visible_devices_are_divided(visible: str, names: tuple[str, ...]) -> None:
    assert gpus_here({VISIBLE: visible}) == names


@pytest.mark.parametrize(
    ("tool", "mode", "fails"),
    [
        (b"#!/bin/sh\necho 'No devices found.'\n", 0o755, ""),
        (b"#!/bin/sh\nprintf '\\377\\376\\n'\n", 0o755, ""),
        (b"#!/bin/sh\n", 0o644, ""),
        (b"\x7fELF of another machine", 0o755, "nvidia-smi cannot be run: Exec format error"),
        (b"#!/bin/sh\nprintf '\\377\\n' >&2; exit 9\n", 0o755, "nvidia-smi ends with exit code 9: \ufffd"),
        (b"#!/bin/sh\nexit 255\n", 0o755, "nvidia-smi ends with exit code 255: no output"),
    ],
)
def test_driver_tool_listing_none_differs_from_a_failing_one(
    tool: bytes, mode: int, fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_bytes(tool)
    (tmp_path / "nvidia-smi").chmod(mode)
    monkeypatch.setenv("PATH", str(tmp_path))
    for look in (lambda: gpus_here({}), lambda: visible_gpus({})):
        with pytest.raises(DriverFailed, match=fails) if fails else contextlib.nullcontext():
            assert look() in ((), 0, None)
