"""The scripts of a controller machine, run as SkyPilot runs them: bash, a home folder, an environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import ControllerTookOver, RunCreated, RunMoved
from grpo_orch.policies.model.vocabulary import RunPhase
from tests.budget import HANG_S
from tests.stand_ins.world import spec
from tests.tasks.sky.test_sky_scripts import PYTHON, SCRIPTS, UV, MachineRig, program

RUN_ID = "sim-0"

# Stands for the daemon: it notes why it was started, and ends as it is told, line by line.
DAEMON = """#!/bin/bash
echo "$*" >> "$HOME/daemon.calls"
env | grep -E '^(GRPO_ORCH_(HOME|RUN_FOLDER)|PYTHONPATH)=' | sort > "$HOME/daemon.env"
pwd >> "$HOME/daemon.env"
[[ -p $HOME/hold ]] && read -r < "$HOME/hold"
code=$(head -n 1 "$HOME/exits")
sed -i 1d "$HOME/exits"
[[ $code == KILL ]] && kill -KILL $$
exit "${code:-0}"
"""


def end(process: subprocess.Popen[str]) -> None:
    """Kill what still runs of a script, that and what it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


@dataclass
class ControllerRig(MachineRig):
    """A controller machine's home, and its two scripts."""

    reason: str = "up"

    def start(self, *scripts: str, **more: str) -> subprocess.Popen[str]:
        environment = self.environment | {"GRPO_ORCH_REASON": self.reason, "GRPO_ORCH_CLOUDS": "aws,gcp"} | more
        argv = ["bash", "-c", "".join((SCRIPTS / script).read_text() for script in scripts)]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            argv, env=environment, cwd=self.home, text=True, start_new_session=True, stdout=pipe, stderr=pipe
        )

    def finish(self, *scripts: str, **more: str) -> tuple[int, list[str], list[str]]:
        process = self.start(*scripts, **more)
        try:
            out, err = process.communicate(timeout=HANG_S)
        finally:
            end(process)
        return process.returncode, out.splitlines(), err.splitlines()

    def set_up(self, **more: str) -> tuple[int, list[str], list[str]]:
        return self.finish("controller_setup.sh", "setup.sh", **more)

    def noted(self, name: str) -> list[str]:
        path = self.home / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> ControllerRig:
    """A bare machine with uv, as SkyPilot leaves it."""
    rig = ControllerRig(tmp_path)
    (rig.home / "sky_workdir").mkdir(parents=True)
    rig.ship()
    rig.offer("gcloud")
    rig.offer("sleep", '#!/bin/sh\necho "$1" >> "$HOME/sleeps"\n')
    program(rig.home / ".local" / "bin" / "uv", UV)
    return rig


@pytest.fixture
def ready(machine: ControllerRig) -> ControllerRig:
    """One that was set up, on an image with an environment."""
    program(machine.prepared / "bin" / "python", PYTHON)
    assert machine.set_up()[0] == 0
    program(machine.prepared / "bin" / "python", DAEMON)
    (machine.home / "exits").write_text("")
    return machine


def test_bare_controller_gets_skypilot_for_its_clouds_once(machine: ControllerRig) -> None:
    code, out, err = machine.set_up()
    env = machine.home / ".grpo-orch" / "controller"
    assert (code, err) == (0, [])
    assert out[0] == "grpo-orch setup: making the environment with SkyPilot for aws,gcp; this takes minutes"
    assert out[-1] == "grpo-orch setup: ready"
    assert machine.uv_calls() == [
        f"venv --quiet --allow-existing --seed --python 3.11 {env}",
        f"pip install --quiet --python {env}/bin/python --constraint {env}/lock.txt "
        f"grpo-orch[sky] @ file://{machine.home}/{machine.wheel} skypilot[aws,gcp]",
    ]
    assert (env / "lock.txt").read_text() == (SCRIPTS / "locks" / "controller.txt").read_text()
    assert (machine.code / "grpo_orch" / "orchestrator" / "control" / "daemon.py").is_file()
    assert machine.set_up()[0] == 0
    assert len(machine.uv_calls()) == 2
    assert machine.set_up(GRPO_ORCH_CLOUDS="aws")[0] == 0
    assert len(machine.uv_calls()) == 4, "other clouds need other libraries"
    assert machine.set_up(GRPO_ORCH_CLOUDS="aws,azure")[0] == 0
    assert "--constraint" not in machine.uv_calls()[-1], "Azure's go with no lock of ours"


def test_a_prepared_controller_environment_is_used(machine: ControllerRig) -> None:
    program(machine.prepared / "bin" / "python", PYTHON)
    for there in Path("/usr/bin").iterdir():
        if there.name != "kubectl" and not (machine.folder / "bin" / there.name).exists():
            (machine.folder / "bin" / there.name).symlink_to(there)
    code, out, _ = machine.set_up(GRPO_ORCH_CLOUDS="aws,kubernetes", PATH=f"{machine.folder}/bin")
    assert code == 0
    assert out[0] == ("grpo-orch setup: SkyPilot cannot use kubernetes without kubectl; add it to the image")
    assert out[1] == f"grpo-orch setup: using the prepared environment {machine.prepared}"
    assert machine.uv_calls() == []


@pytest.mark.parametrize(
    ("step", "line"), [("venv", "failed to make an environment"), ("pip", "failed to install")]
)
def test_failed_setup_is_reported_and_repeated(machine: ControllerRig, step: str, line: str) -> None:
    code, _, err = machine.set_up(UV_FAILS=step)
    assert code == 1
    assert len(err) == 1
    assert f"grpo-orch setup: uv {line}" in err[0]
    assert not machine.code.exists()
    assert machine.set_up()[0] == 0


def test_daemon_starts_from_shipped_wheel_in_shipped_folder(ready: ControllerRig) -> None:
    code, out, err = ready.finish("controller_run.sh")
    assert (code, err) == (0, [])
    assert out == [
        "grpo-orch controller: starting the daemon: up",
        "grpo-orch controller: the daemon has finished",
    ]
    assert ready.noted("daemon.calls") == [
        f"-m grpo_orch.orchestrator.control.daemon file://{ready.folder}/store up"
    ]
    assert ready.noted("daemon.env") == [
        f"GRPO_ORCH_HOME={ready.home}/.grpo-orch/runs",
        f"GRPO_ORCH_RUN_FOLDER={ready.home}/sky_workdir",
        f"PYTHONPATH={ready.code}",
        f"{ready.home}/sky_workdir",
    ]


def test_real_daemon_takes_over_and_ships_the_same_wheel(ready: ControllerRig) -> None:
    program(ready.prepared / "bin" / "python", PYTHON)
    store = Store(f"file://{ready.folder}/store")
    documents.create_run(store, RunRecord(documents.SCHEMA, RUN_ID, 0.0, spec()))
    writer = journal.Journal(store, "test")
    writer.take_over(1.0, "laptop", 1, "up")
    writer.append(
        2.0, (RunCreated("sim", RUN_ID), RunMoved(RunPhase.STOPPING, "x"), RunMoved(RunPhase.STOPPED, "x"))
    )
    ready.reason = "down"
    code, out, err = ready.finish("controller_run.sh")
    assert code == 0, (out, err)
    last = journal.read(store)[-1].decoded()[0]
    assert isinstance(last, ControllerTookOver)
    assert last.reason == "down"
    build = "from pathlib import Path; from grpo_orch.orchestrator.clouds.wheel import build_wheel; "
    build += "print(build_wheel(Path()))"
    argv = [sys.executable, "-c", build]
    environment = {**os.environ, "PYTHONPATH": str(ready.code)}
    built = subprocess.run(
        argv, env=environment, cwd=ready.home, capture_output=True, text=True, check=True
    ).stdout
    assert Path(built.strip()).parent.name == ready.code.name


def test_dead_daemon_is_restarted_until_the_run_has_ended(ready: ControllerRig) -> None:
    ready.reason = "resume"
    (ready.home / "exits").write_text("KILL\n1\n" + "1\n" * 6 + "0\n")
    code, out, _ = ready.finish("controller_run.sh")
    assert code == 0
    reasons = [call.split()[-1] for call in ready.noted("daemon.calls")]
    assert reasons == ["resume", *["restart"] * 8], "a run that was told to stop would go on"
    assert ready.noted("sleeps") == ["1", "2", "4", "8", "16", "32", "60", "60"]
    assert "grpo-orch controller: the daemon exited with code 137; restarting it in 1 s" in out


def test_controller_yields_to_another_one(ready: ControllerRig) -> None:
    (ready.home / "exits").write_text(f"{exit_codes.HELD}\n")
    code, out, _ = ready.finish("controller_run.sh")
    assert code == exit_codes.HELD
    assert out[-1] == "grpo-orch controller: another controller is in charge of the run"
    assert len(ready.noted("daemon.calls")) == 1


def test_launching_twice_watches_over_one_daemon(ready: ControllerRig) -> None:
    os.mkfifo(ready.home / "hold")
    first = ready.start("controller_run.sh")
    try:
        with (ready.home / "hold").open("w") as hold:  # the daemon is there once it reads
            assert ready.finish("controller_run.sh") == (
                0, ["grpo-orch controller: already running"], [],
            )  # fmt: skip
            hold.write("\n")
        first.communicate(timeout=HANG_S)
    finally:
        end(first)
    assert first.returncode == 0
    assert len(ready.noted("daemon.calls")) == 1


MISSING = [
    ({"GRPO_ORCH_WHEEL": ""}, "not set; a controller is started by `up --remote`"),
    ({"GRPO_ORCH_PREPARED": "/nowhere"}, "no environment in"),
    ({"GRPO_ORCH_WHEEL": "w/0123/x.whl"}, "this machine was set up by another version of grpo-orch"),
]


@pytest.mark.parametrize(("more", "line"), MISSING)
def test_missing_requirement_is_one_line(ready: ControllerRig, more: dict[str, str], line: str) -> None:
    code, _, err = ready.finish("controller_run.sh", **more)
    assert code != 0
    assert len(err) == 1
    assert f"grpo-orch controller: {line}" in err[0]
    assert ready.noted("daemon.calls") == []
