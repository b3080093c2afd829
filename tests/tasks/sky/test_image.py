"""Images with the nodes' environment: SkyPilot's recipe and the Dockerfile, each taken by the program it is for.

A stand-in is uv: it makes an environment of the image's own Python, without the gigabytes that go into it.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sky

from grpo_orch.orchestrator.clouds.wheel import build_wheel
from tests.tasks.sky.test_sky_scripts import SCRIPTS, MachineRig, program, rig

__all__ = ["rig"]
ROOT = SCRIPTS.parents[1]
UV = """#!/bin/sh
echo "$@" >>/var/log/uv
if [ "$1" = venv ]; then for last; do :; done; exec python3 -m venv --without-pip "$last"; fi
"""


def image_folder(folder: Path) -> Path:
    """As `make image-folder` puts it together."""
    folder.mkdir()
    for one in (SCRIPTS / "setup.sh", *(SCRIPTS / "image").iterdir()):
        shutil.copy(one, folder)
    build_wheel(folder / "wheels")
    return folder


def test_skypilot_takes_recipe_and_its_setup_makes_environment(
    rig: MachineRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = image_folder(rig.home / "sky_workdir")
    monkeypatch.chdir(synced)
    task: Any = sky.Task.from_yaml("recipe.yaml")
    assert task.workdir == "."
    [resources] = task.resources
    assert resources.disk_size == 100
    environment = rig.environment | task.envs
    done = subprocess.run(["bash", "-c", task.setup], env=environment, cwd=synced, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"grpo-orch setup: made {rig.prepared} for images"
    assert f"grpo-orch[node] @ file://{synced}/wheels/" in rig.uv_calls()[-1]
    assert rig.run("setup.sh").stdout.startswith("grpo-orch setup: using the prepared environment")


class Buildah:
    """Builds containers in a folder of its own, without a daemon."""

    def __init__(self, folder: Path) -> None:
        self._argv = [
            "buildah",
            "--root",
            f"{folder}/root",
            "--runroot",
            f"{folder}/run",
            "--storage-driver",
            "vfs",
        ]

    def __call__(self, *arguments: str | Path) -> str:
        done = subprocess.run([*self._argv, *map(str, arguments)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout.strip()


@pytest.fixture
def buildah(tmp_path: Path) -> Iterator[Buildah]:
    if shutil.which("buildah") is None:
        pytest.skip("buildah is not installed")
    buildah = Buildah(tmp_path / "containers")
    yield buildah
    buildah("rm", "--all")
    buildah("rmi", "--all", "--force")


@pytest.mark.soak
def test_the_dockerfile_makes_an_image_whose_environment_is_used(
    sky_image: Path, buildah: Buildah, tmp_path: Path
) -> None:
    program(tmp_path / "uv", UV)
    base = buildah("from", "scratch")
    buildah("add", base, sky_image / "root", "/")
    buildah("copy", base, tmp_path / "uv", "/usr/local/bin/uv")
    buildah("commit", base, "base")
    folder = image_folder(tmp_path / "image")
    told = [f"--build-arg={one}" for one in ("BASE=localhost/base", "ENVIRONMENT=node-cpu")]
    said = buildah("build", "--isolation", "chroot", *told, "-t", "made", folder)
    assert "grpo-orch setup: made /opt/grpo-orch/env for images" in said

    machine = buildah("from", "localhost/made")
    buildah("copy", machine, folder / "wheels", "/root/wheels")
    buildah("copy", machine, folder / "setup.sh", "/root/setup.sh")
    shell = "HOME=/root GRPO_ORCH_WHEEL=$(cd /root && echo wheels/*/*.whl) bash /root/setup.sh; cat /var/log/uv"
    lines = buildah("run", "--isolation", "chroot", machine, "bash", "-c", shell).splitlines()
    assert lines[0] == "grpo-orch setup: using the prepared environment /opt/grpo-orch/env"
    assert lines[2] == "grpo-orch setup: ready"
    assert [line.split()[0] for line in lines[3:]] == ["venv", "pip", "pip"]
    programs = "g++ rsync ssh sshd nc patch sudo"
    found = buildah(
        "run", "--isolation", "chroot", machine, "bash", "-c", f"PATH=$PATH:/usr/sbin which {programs}"
    )
    assert len(found.splitlines()) == len(programs.split())
