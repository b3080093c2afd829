"""The local cloud divides this machine's GPUs. Stood in for: the driver's tool that counts them, and the work."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from orchestrator.clouds.local import LocalCloud, gpus_here, kill_all, marked_processes
from orchestrator.clouds.protocol import CloudRefused, Order
from policies.model.gpus import VISIBLE, DriverFailed
from policies.model.spec import RunSpec
from policies.model.vocabulary import MachineState, Market, Refusal, role_of
from tasks.machine.launching import visible_gpus
from tests.budget import HANG_S, until
from tests.stand_ins.world import spec

TRAINER = "trainer-0-i1"
NODES = [f"rollout-{i}-i1" for i in range(4)]


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Say how many GPUs there are."""
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("GRPO_ORCH_NODE_PYTHON", str(Path(__file__).parents[2] / "stand_ins" / "stand_in_node.sh"))
    monkeypatch.delenv(VISIBLE, raising=False)

    def have(count: int) -> None:
        (tools / "nvidia-smi").write_text(f"#!/bin/sh\nseq 0 {count - 1}\n")
        (tools / "nvidia-smi").chmod(0o755)

    return have


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., LocalCloud]]:
    """The cloud of one more controller of a run."""
    clouds: list[LocalCloud] = []

    def open_cloud(run: str = "a-run", of: RunSpec | None = None) -> LocalCloud:
        clouds.append(LocalCloud(tmp_path / "home" / run / "machines", of or spec()))
        return clouds[-1]

    yield open_cloud
    for cloud in clouds:
        for node in cloud.machines():
            cloud.terminate(node)


def launch(cloud: LocalCloud, node: str, attempt: int = 1, **environment: str) -> None:
    cloud.launch(Order(node, role_of(node), Market.SPOT, attempt, environment))


def seen_by(cloud: LocalCloud, node: str, variable: str = VISIBLE) -> str | None:
    """What the processes of the machine have for the variable, each the same."""
    until_s = time.monotonic() + HANG_S
    while time.monotonic() < until_s:
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has just ended
            every = [psutil.Process(pid).environ() for pid in marked_processes(cloud._folder / node)]
            if every and all(every):  # between two programs a process shows none
                (seen,) = {one.get(variable) for one in every}
                return None if seen is None else str(seen)
    raise AssertionError(f"the processes of {node} show no environment")


def sized(trainer: str, rollout: str) -> RunSpec:
    plain = spec()
    return replace(
        plain,
        trainer=replace(plain.trainer, resources={"accelerators": trainer}),
        rollout=replace(plain.rollout, resources={"accelerators": rollout}),
    )


def test_each_node_has_gpus_of_its_own(gpus: Callable[[int], None], opened: Callable[..., LocalCloud]) -> None:
    gpus(8)
    cloud = opened(of=sized("H100:4", "H100:2"))
    for node in (TRAINER, *NODES[:2]):
        launch(cloud, node)
    assert [seen_by(cloud, node) for node in (TRAINER, *NODES[:2])] == ["0,1,2,3", "4,5", "6,7"]
    with pytest.raises(CloudRefused, match="rollout-2-i1 takes 2 of 8 GPUs and 0 are free") as caught:
        launch(cloud, NODES[2])
    assert caught.value.refusal is Refusal.NO_CAPACITY
    assert "0,1,2,3 by a-run/trainer-0-i1" in str(caught.value)


def test_numbers_mean_the_same_to_the_tool_and_to_cuda(
    gpus: Callable[[int], None], opened: Callable[..., LocalCloud]
) -> None:
    gpus(1)
    cloud = opened()
    launch(cloud, TRAINER)
    assert seen_by(cloud, TRAINER, "CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def until_dead(cloud: LocalCloud, node: str) -> None:
    """A killed process is there for a moment yet."""
    until("its processes gone", lambda: not marked_processes(cloud._folder / node))


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param(lambda cloud, node: cloud.terminate(node), id="terminated"),
        pytest.param(lambda cloud, node: cloud.preempt(node, "preempted"), id="preempted"),
        pytest.param(lambda cloud, node: kill_all(cloud._folder / node), id="killed"),
    ],
)
def test_the_gpus_of_a_machine_that_ended_are_free(
    ends: Callable[[LocalCloud, str], None], gpus: Callable[[int], None], opened: Callable[..., LocalCloud]
) -> None:
    gpus(2)
    cloud = opened()
    launch(cloud, TRAINER)
    launch(cloud, NODES[0])
    ends(cloud, NODES[0])
    until_dead(cloud, NODES[0])
    launch(cloud, NODES[1])
    assert seen_by(cloud, NODES[1]) == "1"


def test_a_machine_that_is_being_taken_away_holds_its_gpus_until_its_processes_have_ended(
    gpus: Callable[[int], None], opened: Callable[..., LocalCloud]
) -> None:
    gpus(2)
    cloud = opened()
    launch(cloud, TRAINER)
    launch(cloud, NODES[0])
    (cloud._folder / NODES[0] / "gone").write_text("preempted")
    with pytest.raises(CloudRefused):
        launch(cloud, NODES[1])
    kill_all(cloud._folder / NODES[0])
    until_dead(cloud, NODES[0])
    launch(cloud, NODES[1])
    assert seen_by(cloud, NODES[1]) == "1"


def test_who_holds_what_is_known_to_the_next_daemon_and_to_other_runs(
    gpus: Callable[[int], None], opened: Callable[..., LocalCloud]
) -> None:
    gpus(3)
    launch(opened(), TRAINER)
    launch(opened(), NODES[0])
    other = opened("another-run")
    launch(other, TRAINER)
    assert seen_by(other, TRAINER) == "2"
    with pytest.raises(CloudRefused, match="1 by a-run/rollout-0-i1"):
        launch(opened(), NODES[1])


def test_launches_at_the_same_moment_are_given_different_gpus(
    gpus: Callable[[int], None], opened: Callable[..., LocalCloud]
) -> None:
    gpus(5)
    with ThreadPoolExecutor() as threads:  # a controller's calls run beside each other, and another's too
        list(threads.map(lambda node: launch(opened(), node), (TRAINER, *NODES)))
    assert {seen_by(opened(), node) for node in (TRAINER, *NODES)} == set("01234")


def test_between_two_attempts_a_machine_keeps_its_gpus(
    gpus: Callable[[int], None], opened: Callable[..., LocalCloud]
) -> None:
    gpus(2)
    cloud = opened()
    launch(cloud, TRAINER, STAND_IN_EXIT="77")
    until(
        "as it is to be at the cloud",
        lambda: cloud.machines()[TRAINER].exit_code == 77 and not marked_processes(cloud._folder / TRAINER),
    )
    launch(cloud, NODES[0])
    launch(opened(), TRAINER, attempt=2)
    assert cloud.machines()[TRAINER].state is MachineState.UP
    assert (seen_by(cloud, TRAINER), seen_by(cloud, NODES[0])) == ("0", "1")


def test_what_the_trainer_needs_is_kept_for_it(
    gpus: Callable[[int], None], opened: Callable[..., LocalCloud]
) -> None:
    gpus(2)
    cloud = opened()
    launch(cloud, TRAINER)
    launch(cloud, NODES[0])
    cloud.preempt(TRAINER, "preempted")
    with pytest.raises(CloudRefused, match=r"takes 1 of 2 GPUs and 1 are free \(1 for the trainer\)"):
        launch(cloud, NODES[1])
    launch(cloud, "trainer-0-i2")
    assert seen_by(cloud, "trainer-0-i2") == "0"


def test_the_first_name_in_a_file_is_no_claim_once_its_machine_never_came(
    gpus: Callable[[int], None], opened: Callable[..., LocalCloud]
) -> None:
    gpus(2)
    cloud = opened()
    launch(cloud, TRAINER)
    folder = cloud._folder / NODES[0]
    folder.mkdir()
    (folder / "gpus").write_text("0")  # of a daemon that was killed before it started anything
    launch(cloud, NODES[0])
    assert seen_by(cloud, NODES[0]) == "1"


def test_without_gpus_nothing_changes(gpus: Callable[[int], None], opened: Callable[..., LocalCloud]) -> None:
    gpus(0)
    cloud = opened(of=sized("H100:8", "H100:8"))
    launch(cloud, TRAINER)
    assert seen_by(cloud, TRAINER) is None


def test_a_driver_that_fails_refuses_what_asks_for_gpus_and_nothing_else(
    gpus: Callable[[int], None], opened: Callable[..., LocalCloud], tmp_path: Path
) -> None:
    gpus(0)
    (tmp_path / "tools" / "nvidia-smi").write_text("#!/bin/sh\necho no driver\nexit 9\n")
    with pytest.raises(CloudRefused, match="nvidia-smi ends with exit code 9: no driver") as caught:
        launch(opened(of=sized("H100:8", "H100:8")), TRAINER)
    assert caught.value.refusal is Refusal.UNKNOWN
    cloud = opened()
    launch(cloud, TRAINER)
    assert seen_by(cloud, TRAINER) is None


def test_a_run_on_cpu_is_left_all_it_sees(gpus: Callable[[int], None], opened: Callable[..., LocalCloud]) -> None:
    gpus(1)
    cloud = opened(of=replace(spec(), grpo={"use_cpu": True}))
    for node in (TRAINER, *NODES):
        launch(cloud, node)
    assert seen_by(cloud, TRAINER) is None


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
def test_a_list_in_our_own_environment_is_what_is_divided(visible: str, names: tuple[str, ...]) -> None:
    here = gpus_here({VISIBLE: visible})
    assert (here.names, here.environment) == (names, {})


@pytest.mark.parametrize(
    ("tool", "mode", "fails"),
    [
        (b"#!/bin/sh\necho 'No devices found.'\n", 0o755, ""),
        (b"#!/bin/sh\nprintf '\\377\\376\\n'\n", 0o755, ""),
        (b"#!/bin/sh\n", 0o644, ""),
        (b"\x7fELF of another machine", 0o755, "nvidia-smi cannot be run: Exec format error"),
        (b"#!/bin/sh\nprintf '\\377\\n' >&2; exit 9\n", 0o755, "nvidia-smi ends with exit code 9: \ufffd"),
        (b"#!/bin/sh\nexit 255\n", 0o755, "nvidia-smi ends with exit code 255: it says nothing"),
    ],
)
def test_a_driver_tool_that_lists_none_has_no_gpus_and_one_that_fails_says_so(
    tool: bytes, mode: int, fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_bytes(tool)
    (tmp_path / "nvidia-smi").chmod(mode)
    monkeypatch.setenv("PATH", str(tmp_path))
    for look in (lambda: gpus_here({}).names, lambda: visible_gpus({})):
        with pytest.raises(DriverFailed, match=fails) if fails else contextlib.nullcontext():
            assert look() in ((), 0, None)
