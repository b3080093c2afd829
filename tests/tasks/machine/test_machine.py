"""The wrapper around a node's work on a cloud's machine: a real process over real work, killed and told things."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib import resources as package_data
from pathlib import Path
from typing import Literal

import pytest

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import MachineReport, RunRecord
from grpo_orch.checkpoint.security.vouched import sign_run
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.node_contract import AttemptRecord
from grpo_orch.policies.model.spec import Dataset, RunSpec, TrainerSpec
from grpo_orch.tasks.machine.children import record_attempt
from grpo_orch.tasks.machine.exit_note import leave_reason
from grpo_orch.tasks.machine.node_env import read_run_here
from tests.budget import HANG_S, until
from tests.rigs.metadata import fake_metadata
from tests.rigs.processes import alive

NODE = "rollout-0-i1"
# Runs the wrapper over the work that its arguments name, with one metadata service.
WRAPPER = """
import sys
from grpo_orch.tasks.machine import cloud_machine
from grpo_orch.tasks.machine.metadata import Aws
from grpo_orch.tasks.machine.node_env import read_node_env
cloud_machine.LOCK_WAIT_S = float(sys.argv[3])
sys.exit(cloud_machine.run(read_node_env(), sys.argv[4:], [Aws(sys.argv[2])], drain_s=float(sys.argv[1])))
"""
# Says that it runs, and ends when it is told how: by a file with the exit code. On SIGTERM it ends with 20.
WORK = """
import os, signal, subprocess, sys, time
from pathlib import Path
folder = Path(os.environ["GRPO_ORCH_WORKDIR"])
signal.signal(signal.SIGTERM, lambda *_: os._exit(20))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with (folder / "runs").open("a") as runs:
    runs.write(f"{os.environ['GRPO_ORCH_ATTEMPT']} {os.getpid()} {child.pid}\\n")
while not (folder / "end").exists():
    time.sleep(0.01)
code = (folder / "end").read_text()
(folder / "end").unlink()
os._exit(int(code))
"""


@dataclass
class Rig:
    """One machine below `folder`, and the store of its run."""

    folder: Path
    drain_s: float = 600.0
    lock_wait_s: float = HANG_S  # for one that only ends slowly
    metadata_url: str = "http://127.0.0.1:1"
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def workdir(self) -> Path:
        return self.folder / "work"

    @property
    def store_folder(self) -> Path:
        return self.folder / "store"

    def start(self, attempt: int = 1, work: str = WORK) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "GRPO_ORCH_RUN": f"file://{self.store_folder}",
            "GRPO_ORCH_NODE": NODE,
            "GRPO_ORCH_TOKEN": "secret",
            "GRPO_ORCH_ATTEMPT": str(attempt),
            "GRPO_ORCH_WORKDIR": str(self.workdir),
            "GRPO_ORCH_NODE_HOST": "10.0.0.7",
        }
        told = [str(self.drain_s), self.metadata_url, str(self.lock_wait_s)]
        argv = [sys.executable, "-c", WRAPPER, *told, sys.executable, "-c", work]
        self.processes.append(subprocess.Popen(argv, env=environment))
        return self.processes[-1]

    def runs(self) -> list[list[int]]:
        """Attempt, pid and child's pid of each time that the work ran."""
        path = self.workdir / "runs"
        lines = path.read_text().splitlines() if path.exists() else []
        return [[int(word) for word in line.split()] for line in lines]

    def end_work(self, code: int) -> None:
        part = self.workdir / "end.part"
        part.write_text(str(code))
        part.replace(self.workdir / "end")

    def report(self) -> MachineReport | None:
        return documents.machine(NODE).read(Store(f"file://{self.store_folder}"))

    def reported(self, wanted: Callable[[MachineReport], bool]) -> MachineReport:
        def look() -> MachineReport | None:
            report = self.report()
            return report if report is not None and wanted(report) else None

        return until("the report", look)

    def running(self, count: int = 1) -> list[int]:
        """Wait until the work has been started so often; its newest attempt, pid and child."""
        until("the work", lambda: len(self.runs()) >= count)
        return self.runs()[-1]

    def break_store(self) -> None:
        """From now on nobody can write: a file stands where the folder was."""
        self.store_folder.rename(self.folder / "store.away")
        self.store_folder.write_text("")

    def mend_store(self) -> None:
        self.store_folder.unlink()
        (self.folder / "store.away").rename(self.store_folder)

    def close(self) -> None:
        """End every process that is left of it."""
        for process in self.processes:
            process.kill()
            process.wait()
        for _, _, child in self.runs():
            if alive(child):
                os.kill(child, signal.SIGKILL)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def gone(*pids: int) -> None:
    until("the end of the work", lambda: not any(alive(pid) for pid in pids))


def tell_pod(rig: Rig, home: Path) -> subprocess.Popen[bytes]:
    """What SkyPilot runs in a pod that is about to end, in a home where this machine's folder is."""
    folder = home / ".grpo-orch/work/run" / NODE
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.exists():
        folder.symlink_to(rig.workdir)
    hook = (package_data.files("grpo_orch.tasks") / "sky" / "notice.sh").read_text()
    told = subprocess.Popen(["/bin/sh", "-c", f"NODE={NODE}\n{hook}"], env={**os.environ, "HOME": str(home)})
    rig.processes.append(told)
    return told


def test_a_pods_end_is_a_notice_and_the_pod_waits_for_the_work(rig: Rig, tmp_path: Path) -> None:
    machine = rig.start()
    rig.running()
    told = tell_pod(rig, tmp_path / "home")
    rig.reported(lambda report: report.notice)
    assert machine.poll() is None  # it drains
    assert told.poll() is None
    rig.end_work(exit_codes.OK)
    assert machine.wait(HANG_S) == exit_codes.OK
    assert told.wait(HANG_S) == 0


def test_pods_end_signals_no_process_with_a_reused_pid(rig: Rig, tmp_path: Path) -> None:
    rig.workdir.mkdir()
    anothers = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    rig.processes.append(anothers)
    record_attempt(rig.workdir, AttemptRecord(1, pid=anothers.pid))
    assert tell_pod(rig, tmp_path / "home").wait(HANG_S) == 0
    assert anothers.poll() is None


def test_start_end_and_exit_code_of_work_are_reported(rig: Rig) -> None:
    wrapper = rig.start()
    _, _, child = rig.running()
    report = rig.reported(lambda _: True)
    assert (report.node, report.attempt, report.exit_code, report.notice) == (NODE, 1, None, False)
    rig.end_work(7)
    assert wrapper.wait(timeout=HANG_S) == 7
    assert not alive(child), "what the work has started ends with it"
    ended = rig.report()
    assert ended is not None
    assert (ended.attempt, ended.exit_code) == (1, 7)


def test_killed_work_has_the_shells_exit_code(rig: Rig) -> None:
    wrapper = rig.start()
    _, work, _ = rig.running()
    os.kill(work, signal.SIGKILL)
    assert wrapper.wait(timeout=HANG_S) == 128 + signal.SIGKILL
    rig.reported(lambda report: report.exit_code == 128 + signal.SIGKILL)


def test_one_of_many_simultaneous_starts_works(rig: Rig) -> None:
    wrappers = [rig.start() for _ in range(5)]
    rig.running()
    until("the others' end", lambda: sum(wrapper.poll() == exit_codes.OK for wrapper in wrappers) == 4)
    rig.end_work(3)
    assert sorted(wrapper.wait(timeout=HANG_S) for wrapper in wrappers) == [0, 0, 0, 0, 3]
    assert len(rig.runs()) == 1


def test_an_attempt_that_has_ended_is_reported_again_and_not_run(rig: Rig) -> None:
    wrapper = rig.start()
    rig.running()
    leave_reason(rig.workdir, "no such column")
    rig.end_work(5)
    wrapper.wait(timeout=HANG_S)
    rig.reported(lambda report: report.exit_reason == "no such column")
    (rig.store_folder / "machines" / f"{NODE}.json").unlink()  # as if it had been lost
    assert rig.start().wait(timeout=HANG_S) == 5
    assert len(rig.runs()) == 1
    again = rig.reported(lambda report: (report.attempt, report.exit_code) == (1, 5))
    assert again.exit_reason == "no such column"


def test_killed_wrapper_ends_its_work_and_next_one_reports_it(rig: Rig) -> None:
    wrapper = rig.start()
    _, work, child = rig.running()
    wrapper.kill()
    wrapper.wait()
    gone(work)
    assert alive(child)
    assert rig.start().wait(timeout=HANG_S) == 128 + signal.SIGKILL
    assert not alive(child)
    assert len(rig.runs()) == 1
    rig.reported(lambda report: (report.attempt, report.exit_code) == (1, 128 + signal.SIGKILL))
    rig.start(attempt=2)
    assert rig.running(2)[0] == 2
    rig.reported(lambda report: (report.attempt, report.exit_code) == (2, None))


def test_the_next_attempt_runs_and_an_older_one_leaves_it_alone(rig: Rig) -> None:
    wrapper = rig.start(attempt=1)
    rig.running()
    rig.end_work(1)
    wrapper.wait(timeout=HANG_S)
    rig.start(attempt=2)
    assert rig.running(2)[0] == 2
    report = rig.reported(lambda report: report.attempt == 2)
    assert rig.start(attempt=1).wait(timeout=HANG_S) == exit_codes.OK
    assert rig.report() == report
    rig.end_work(0)
    rig.processes[1].wait(timeout=HANG_S)
    assert rig.start(attempt=1).wait(timeout=HANG_S) == exit_codes.OK
    ended = rig.report()
    assert ended is not None
    assert (ended.attempt, ended.exit_code) == (2, 0)


def test_a_newer_attempt_starts_when_the_older_one_lets_go(rig: Rig) -> None:
    older = rig.start(attempt=1)
    rig.running()
    newer = rig.start(attempt=2)
    rig.end_work(1)
    assert older.wait(timeout=HANG_S) == 1
    assert rig.running(2)[0] == 2
    assert newer.poll() is None


def test_a_newer_attempt_does_not_wait_for_ever(rig: Rig) -> None:
    older = rig.start(attempt=1)
    rig.running()
    rig.lock_wait_s = 1.0
    assert rig.start(attempt=2).wait(HANG_S) == exit_codes.HELD
    assert older.poll() is None
    assert len(rig.runs()) == 1


def test_store_outage_delays_the_exit_code_and_no_notice(rig: Rig) -> None:
    with fake_metadata("aws") as cloud:
        rig.metadata_url = cloud.url
        wrapper = rig.start()
        rig.running()
        rig.reported(lambda _: True)
        rig.break_store()
        cloud.noticed = True
        until("the notice", lambda: (rig.workdir / "notice").exists())
        rig.end_work(9)
        until("the local state", lambda: '"exit_code":9' in (rig.workdir / "machine.json").read_text())
        assert wrapper.poll() is None
        rig.mend_store()
        assert wrapper.wait(timeout=HANG_S) == 9
        rig.reported(lambda report: report.notice and report.exit_code == 9)


def test_notices_are_reported_by_later_attempts_too(rig: Rig) -> None:
    with fake_metadata("aws") as cloud:
        rig.metadata_url = cloud.url
        wrapper = rig.start()
        rig.running()
        first = rig.reported(lambda report: report.exit_code is None)
        assert (first.notice, first.rebalance_recommended) == (False, False)
        cloud.rebalance = True
        assert rig.reported(lambda report: report.rebalance_recommended).notice is False
        assert not (rig.workdir / "notice").exists(), "nobody leaves for it"
        cloud.noticed = True
        rig.reported(lambda report: report.notice)
        assert (rig.workdir / "notice").exists()
        rig.end_work(4)
        assert wrapper.wait(timeout=HANG_S) == 4
    rig.reported(lambda report: report.notice and report.exit_code == 4)
    rig.start(attempt=2)  # with no metadata service to tell it again
    second = rig.reported(lambda report: report.attempt == 2)
    assert (second.notice, second.rebalance_recommended) == (True, True)


@pytest.mark.parametrize("signals", [1, 2])
def test_a_rollout_node_drains_on_sigterm_until_the_second(rig: Rig, signals: int) -> None:
    wrapper = rig.start()
    rig.running()
    rig.reported(lambda _: True)
    wrapper.terminate()
    assert rig.reported(lambda report: report.notice).exit_code is None
    assert (rig.workdir / "notice").exists()
    if signals == 2:
        wrapper.terminate()
    else:
        rig.end_work(6)
    code = {1: 6, 2: 20}[signals]
    assert wrapper.wait(timeout=HANG_S) == code
    rig.reported(lambda report: report.exit_code == code)


@pytest.mark.parametrize("drain_s", [0.0, 0.2])  # a trainer's, and one that is over before the work has ended
def test_draining_has_an_end_and_the_notice_is_reported(rig: Rig, drain_s: float) -> None:
    rig.drain_s = drain_s
    wrapper = rig.start()
    rig.running()
    rig.reported(lambda _: True)
    wrapper.terminate()
    assert wrapper.wait(timeout=HANG_S) == 20
    rig.reported(lambda report: report.notice and report.exit_code == 20)


@pytest.mark.parametrize(("cloud", "found"), [("local", "/home/me/run"), ("sky", "")])
def test_the_folder_of_run_yaml_is_where_it_is_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cloud: Literal["local", "sky"], found: str
) -> None:
    store = Store(f"file://{tmp_path}/store")
    spec = RunSpec(
        name="t",
        storage=store.url,
        trainer=TrainerSpec(model="model", dataset=Dataset(path="json"), reward_funcs=()),
        grpo={},
        cloud=cloud,
        workdir="/home/me/run",
    )
    documents.create_run(store, RunRecord(documents.SCHEMA, "r", 0.0, spec))
    sign_run(store, "secret")
    monkeypatch.chdir(tmp_path)
    assert read_run_here(store, "secret").spec == replace(spec, workdir=found or str(tmp_path))


def test_unopenable_store_is_one_line(tmp_path: Path) -> None:
    names = {"RUN": "ftp", "NODE": NODE, "TOKEN": "t", "ATTEMPT": "1", "WORKDIR": str(tmp_path / "work")}
    environment = {**os.environ, **{f"GRPO_ORCH_{name}": value for name, value in names.items()}}
    argv = [sys.executable, "-m", "grpo_orch.tasks.machine.cloud_machine", "rollout"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == exit_codes.FAILED
    assert len(done.stderr.splitlines()) == 1
    assert "expected a URL" in done.stderr
    assert not (tmp_path / "work" / "machine.json").exists()
