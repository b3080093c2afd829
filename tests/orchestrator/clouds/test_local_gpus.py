"""The local cloud divides this machine's GPUs. Stood in for: the driver's tool that counts them, and the work."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from grpo_orch.orchestrator.clouds.local import LocalCloud, gpus_here, kill_all, marked_processes
from grpo_orch.orchestrator.clouds.protocol import CloudRefused, LaunchOrder
from grpo_orch.policies.model.gpus import VISIBLE, DriverFailed
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.vocabulary import MachineState, Market, Refusal, role_of
from grpo_orch.tasks.machine.launching import visible_gpus
from tests.budget import until
from tests.stand_ins.control_plane import STAND_IN
from tests.stand_ins.world import spec

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
    found = gpus_here({VISIBLE: visible})
    assert (found.names, found.environment) == (names, {})


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
    for look in (lambda: gpus_here({}).names, lambda: visible_gpus({})):
        with pytest.raises(DriverFailed, match=fails) if fails else contextlib.nullcontext():
            assert look() in ((), 0, None)
