"""The scripts that SkyPilot runs on a machine, run as it runs them: bash, a home folder, an environment."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.clouds.wheel import build_wheel
from grpo_orch.policies.model import exit_codes

SCRIPTS = Path(__file__).parents[3] / "tasks" / "sky"
HAS_GPU = Path("/dev/nvidiactl").exists()
PYTHON = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
# Tells how it was called instead of doing the work.
TELLING = f"""#!/bin/sh
exec {sys.executable} -c '
import json, os, sys
print(json.dumps(dict(argv=sys.argv[1:], cwd=os.getcwd(), env=dict(os.environ))))' "$@"
"""
# Notes its arguments, and makes an environment where it is asked for one.
UV = f"""#!/bin/sh
echo "$@" >> "$HOME/uv.calls"
if [ -n "$UV_FAILS" ] && [ "$1" = "$UV_FAILS" ]; then exit 2; fi
if [ "$1" = venv ]; then
    for last; do :; done
    mkdir -p "$last/bin"
    printf '%s\\n' '#!/bin/sh' 'exec {sys.executable} "$@"' > "$last/bin/python"
    chmod +x "$last/bin/python"
fi
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@dataclass
class MachineRig:
    """A machine's home below `folder`, with the wheel shipped, and what its PATH is to offer."""

    folder: Path
    wheel: str = ""
    more: dict[str, str] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def prepared(self) -> Path:
        return self.folder / "prepared"

    @property
    def code(self) -> Path:
        return self.home / ".grpo-orch" / "code" / Path(self.wheel).parent.name

    def ship(self) -> None:
        wheels = self.home / ".grpo-orch" / "wheels"
        self.wheel = str(build_wheel(wheels).relative_to(self.home))

    def offer(self, name: str, text: str = "#!/bin/sh\nexit 0\n") -> None:
        """Put a program of that name before all others."""
        program(self.folder / "bin" / name, text)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "HOME": str(self.home),
            "PATH": f"{self.folder}/bin:/usr/bin:/bin",
            "GRPO_ORCH_WHEEL": self.wheel,
            "GRPO_ORCH_PREPARED": str(self.prepared),
            "GRPO_ORCH_RUN": f"file://{self.folder}/store",
        }

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **self.environment,
            "GRPO_ORCH_NODE": "rollout-0-i1",
            "GRPO_ORCH_ATTEMPT": "1",
            "GRPO_ORCH_TOKEN": "hunter2",
            "GRPO_ORCH_ROLE": "rollout",
            "SKYPILOT_NODE_IPS": "10.1.2.3\n10.1.2.4",
            **self.more,
        }
        argv = ["bash", "-c", (SCRIPTS / script).read_text()]
        return subprocess.run(argv, env=environment, cwd=self.home, capture_output=True, text=True, check=False)

    def uv_calls(self) -> list[str]:
        path = self.home / "uv.calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def rig(tmp_path: Path) -> MachineRig:
    """A machine whose image has neither an environment nor a GPU, but libnuma and uv."""
    rig = MachineRig(tmp_path)
    rig.home.mkdir()
    rig.ship()
    rig.offer("ldconfig", "#!/bin/sh\necho '\tlibnuma.so.1 (libc6,x86-64) => /lib/libnuma.so.1'\n")
    rig.offer("nvidia-smi", "#!/bin/sh\nexit 1\n")
    rig.offer("g++", "#!/bin/sh\n")
    program(rig.home / ".local" / "bin" / "uv", UV)
    return rig


def test_prepared_environment_is_used_with_the_project_added(rig: MachineRig) -> None:
    program(rig.prepared / "bin" / "python", PYTHON)
    done = rig.run("setup.sh")
    assert (done.returncode, done.stderr) == (0, "")
    digest = rig.code.name
    assert done.stdout.splitlines() == [
        f"grpo-orch setup: using the prepared environment {rig.prepared}",
        f"grpo-orch setup: unpacking {Path(rig.wheel).name}, {digest}",
        "grpo-orch setup: ready",
    ]
    assert (rig.code / "grpo_orch" / "tasks" / "machine" / "cloud_machine.py").is_file()
    assert [path.name for path in rig.code.parent.iterdir()] == [digest]
    assert rig.uv_calls() == []
    again = rig.run("setup.sh")
    assert again.stdout.splitlines() == [done.stdout.splitlines()[0], "grpo-orch setup: ready"]


@pytest.mark.parametrize("extra", ["node", "node-cpu"])
def test_an_image_is_made_by_the_set_up_and_used_by_its_machines(rig: MachineRig, extra: str) -> None:
    rig.more["GRPO_ORCH_IMAGE"] = extra
    done = rig.run("setup.sh")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"grpo-orch setup: made {rig.prepared} for images"
    assert (rig.prepared / "lock.txt").read_text() == (SCRIPTS / "locks" / f"{extra}.txt").read_text()
    assert not rig.code.exists()
    made = rig.uv_calls()
    assert f"grpo-orch[{extra}] @" in made[1]
    del rig.more["GRPO_ORCH_IMAGE"]
    machine = rig.run("setup.sh")
    assert machine.stdout.splitlines()[0] == f"grpo-orch setup: using the prepared environment {rig.prepared}"
    assert rig.uv_calls() == made
    program(rig.prepared / "bin" / "python", TELLING)
    told = json.loads(rig.run("run.sh").stdout.splitlines()[1])["env"]
    assert told["VIRTUAL_ENV"] == str(rig.prepared)
    assert told["PIP_CONSTRAINT"] == str(rig.prepared / "lock.txt")


def test_an_image_of_another_release_is_not_used(rig: MachineRig) -> None:
    rig.more["GRPO_ORCH_IMAGE"] = "node"
    rig.run("setup.sh")
    del rig.more["GRPO_ORCH_IMAGE"]
    lock = rig.prepared / "lock.txt"
    lock.write_text(lock.read_text().replace("trl==", "trl==0."))
    done = rig.run("setup.sh")
    assert (done.returncode, done.stderr) == (0, "")
    why = f"not using {rig.prepared}, made by another release of grpo-orch; rebuild the image"
    assert done.stdout.splitlines()[0] == f"grpo-orch setup: {why}"
    env = rig.home / ".grpo-orch" / "env"
    program(env / "bin" / "python", TELLING)
    assert json.loads(rig.run("run.sh").stdout.splitlines()[1])["env"]["VIRTUAL_ENV"] == str(env)


@pytest.mark.parametrize("extra", ["node", "node-cpu"])
def test_a_bare_machine_gets_an_environment_once(rig: MachineRig, extra: str) -> None:
    if HAS_GPU and extra == "node-cpu":
        pytest.skip("this machine has a GPU")
    if extra == "node":
        rig.offer("nvidia-smi")
    env = rig.home / ".grpo-orch" / "env"
    done = rig.run("setup.sh")
    assert (done.returncode, done.stderr) == (0, "")
    python = f"--python {env}/bin/python"
    builds = " --torch-backend cpu" if extra == "node-cpu" else ""
    made = [
        f"venv --quiet --allow-existing --seed --python 3.11 {env}",
        f"pip install --quiet {python} --constraint {env}/lock.txt{builds} grpo-orch[{extra}] @ file://{rig.home}/{rig.wheel}",
    ]
    if extra == "node-cpu":
        made.append(f"pip uninstall --quiet {python} torchvision torchaudio torchcodec")
    assert rig.uv_calls() == made
    assert (env / "lock.txt").read_text() == (SCRIPTS / "locks" / f"{extra}.txt").read_text()
    assert (rig.code / "grpo_orch" / "tasks" / "machine" / "cloud_machine.py").is_file()
    again = rig.run("setup.sh")
    assert "grpo-orch setup: the environment is up to date" in again.stdout
    assert rig.uv_calls() == made


def test_new_wheel_brings_requirements_and_leaves_older_code(rig: MachineRig) -> None:
    rig.run("setup.sh")
    before, calls = rig.code, len(rig.uv_calls())
    other = rig.home / rig.wheel
    rig.wheel = str(Path(".grpo-orch", "wheels", "fedcba98", other.name))
    (rig.home / rig.wheel).parent.mkdir()
    (rig.home / rig.wheel).write_bytes(other.read_bytes())
    assert rig.run("setup.sh").returncode == 0
    assert len(rig.uv_calls()) > calls
    assert before.is_dir()
    assert rig.code.is_dir()
    assert before != rig.code


@pytest.mark.parametrize("step", ["venv", "pip"])
def test_failed_setup_is_reported_and_repeated(rig: MachineRig, step: str) -> None:
    rig.more["UV_FAILS"] = step
    done = rig.run("setup.sh")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("grpo-orch setup: uv failed to ")
    assert not rig.code.exists()
    rig.more.clear()
    assert rig.run("setup.sh").returncode == 0


@pytest.mark.skipif(HAS_GPU, reason="vLLM's CPU build alone needs libnuma")
def test_libnuma_is_installed_where_it_is_missing(rig: MachineRig) -> None:
    rig.offer("ldconfig")
    rig.offer("apt-get", '#!/bin/sh\necho "$@" >> "$HOME/apt.calls"\n')
    rig.offer("sudo", '#!/bin/sh\nexec "$@"\n')
    assert rig.run("setup.sh").returncode == 0
    assert (rig.home / "apt.calls").read_text().splitlines() == ["update -q", "install -yq libnuma1"]
    rig.offer("apt-get", "#!/bin/sh\nexit 100\n")
    (rig.home / ".grpo-orch" / "env" / ".made-of").unlink()
    done = rig.run("setup.sh")
    assert done.returncode == 1
    assert done.stderr == "grpo-orch setup: apt-get failed to install libnuma1; add it to the image\n"


def test_uv_is_installed_where_there_is_none(rig: MachineRig) -> None:
    (rig.home / ".local" / "bin" / "uv").unlink()
    install = f"#!/bin/sh\nmkdir -p $HOME/.grpo-orch/uv/bin\ncp {rig.folder}/uv $HOME/.grpo-orch/uv/bin/uv\n"
    program(rig.folder / "uv", UV)
    rig.offer("python3", install)
    done = rig.run("setup.sh")
    assert done.returncode == 0, done.stderr
    assert len(rig.uv_calls()) >= 2
    (rig.home / ".grpo-orch" / "uv" / "bin" / "uv").unlink()
    (rig.home / ".grpo-orch" / "env" / "bin" / "python").unlink()
    (rig.home / ".grpo-orch" / "env" / ".made-of").unlink()
    rig.offer("python3", "#!/bin/sh\nexit 1\n")
    failed = rig.run("setup.sh")
    assert failed.returncode == 1
    assert "uv not found, and pip failed to install it" in failed.stderr.splitlines()[-1]


def test_environment_of_the_work(rig: MachineRig) -> None:
    program(rig.prepared / "bin" / "python", PYTHON)
    rig.run("setup.sh")
    program(rig.prepared / "bin" / "python", TELLING)
    (rig.home / "sky_workdir").mkdir()
    rig.more["PYTHONPATH"] = "/mine"
    done = rig.run("run.sh")
    assert (done.returncode, done.stderr) == (0, "")
    said, told = done.stdout.splitlines()
    assert said == "grpo-orch run: rollout-0-i1, attempt 1, at 10.1.2.3"
    heard = json.loads(told)
    assert heard["argv"] == ["-m", "grpo_orch.tasks.machine.cloud_machine", "rollout"]
    assert heard["cwd"] == str(rig.home / "sky_workdir")
    env = heard["env"]
    assert env["GRPO_ORCH_NODE_HOST"] == env["GRPO_ORCH_GATEWAY_HOST"] == "10.1.2.3"
    assert env["PYTHONPATH"] == f"{rig.code}:/mine"
    assert env["PATH"].split(":")[0] == f"{rig.prepared}/bin"
    assert env["GRPO_ORCH_WORKDIR"].startswith(f"{rig.home}/.grpo-orch/work/")
    assert env["GRPO_ORCH_WORKDIR"].endswith("/rollout-0-i1")
    rig.more["GRPO_ORCH_RUN"] = "s3://another/run"
    other = json.loads(rig.run("run.sh").stdout.splitlines()[1])["env"]
    assert other["GRPO_ORCH_WORKDIR"] != env["GRPO_ORCH_WORKDIR"]


def test_work_runs_from_unpacked_wheel_and_its_end_is_stored(rig: MachineRig) -> None:
    program(rig.prepared / "bin" / "python", PYTHON)
    rig.run("setup.sh")
    done = rig.run("run.sh")
    assert done.returncode == exit_codes.FAILED
    assert f"no run in file://{rig.folder}/store" in done.stderr
    assert f'File "{rig.code}/grpo_orch/tasks/rollout/agent.py"' in done.stderr
    report = documents.machine("rollout-0-i1").read(Store(f"file://{rig.folder}/store"))
    assert report is not None
    assert (report.attempt, report.exit_code) == (1, exit_codes.FAILED)
    assert "hunter2" not in done.stdout + done.stderr


def test_users_setup_installs_next_to_locked_packages(rig: MachineRig) -> None:
    rig.run("setup.sh")
    env = rig.home / ".grpo-orch" / "env"
    program(env / "bin" / "python", TELLING)
    told = json.loads(rig.run("run.sh").stdout.splitlines()[1])["env"]
    assert told["PIP_CONSTRAINT"] == told["UV_CONSTRAINT"] == str(env / "lock.txt")
    program(rig.prepared / "bin" / "python", TELLING)
    assert "PIP_CONSTRAINT" not in json.loads(rig.run("run.sh").stdout.splitlines()[1])["env"], "an own image's"


FAILURES = [
    (
        "setup.sh",
        {"GRPO_ORCH_WHEEL": "gone/x.whl"},
        "setup: {home}/gone/x.whl is missing; the controller ships it",
    ),
    ("setup.sh", {"GRPO_ORCH_WHEEL": ""}, "setup: not set; only the controller sets up machines"),
    ("run.sh", {"GRPO_ORCH_WHEEL": ""}, "run: not set; only the controller starts work"),
    ("run.sh", {"SKYPILOT_NODE_IPS": ""}, "run: SKYPILOT_NODE_IPS is empty, so this machine's address is unknown"),
    (
        "run.sh",
        {"GRPO_ORCH_WHEEL": "w/0123/x.whl"},
        "run: this machine was set up by another version of grpo-orch",
    ),
    ("run.sh", {"GRPO_ORCH_PREPARED": "/nowhere"}, "run: no environment in {home}/.grpo-orch/env"),
]


@pytest.mark.parametrize(("script", "more", "line"), FAILURES)
def test_missing_requirement_is_one_line(rig: MachineRig, script: str, more: dict[str, str], line: str) -> None:
    program(rig.prepared / "bin" / "python", PYTHON)
    assert rig.run("setup.sh").returncode == 0
    rig.more.update(more)
    done = rig.run(script)
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1
    assert f"grpo-orch {line.format(home=rig.home)}" in done.stderr


def test_outdated_prepared_environment_is_reported(rig: MachineRig) -> None:
    program(rig.prepared / "bin" / "python", "#!/bin/sh\nexit 1\n")
    done = rig.run("setup.sh")
    assert done.returncode == 1
    assert done.stderr == f"grpo-orch setup: {rig.prepared}/bin/python is broken or older than Python 3.11\n"
