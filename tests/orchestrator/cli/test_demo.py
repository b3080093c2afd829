"""`grpo-orch demo` and `node-env`: what they ask, what they refuse, and which folders they touch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from grpo_orch.orchestrator.cli import demo
from grpo_orch.orchestrator.cli.demo import ensure_node_env
from grpo_orch.orchestrator.cli.options import Stop
from grpo_orch.orchestrator.cli.prepare import write_recipe
from grpo_orch.orchestrator.clouds.local import NoNodeEnvironment, node_env_folder, node_python
from grpo_orch.orchestrator.clouds.wheel import wheel_digest
from grpo_orch.orchestrator.node_installer import MADE_OF
from grpo_orch.policies.model import exit_codes
from tests.rigs.command_line import Cli
from tests.stand_ins.installer import InstallerStandIn


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which only the wheel is installed."""
    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("GRPO_ORCH_NODE_PYTHON", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.chdir(tmp_path)


def test_without_a_terminal_nothing_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    machine = InstallerStandIn()
    with pytest.raises(Stop, match=r"^cannot ask without a terminal; pass --yes to start without asking$") as stop:
        ensure_node_env(machine, yes=False)
    assert stop.value.exit_code == exit_codes.USAGE
    assert machine.ran == []
    assert capsys.readouterr().out == (
        "The nodes on this machine need torch, TRL and vLLM, for CPUs: 1.0 GB to download, 3.6 GB of disk, "
        f"in {node_env_folder()}.\n"
    )


def test_installed_once_and_updated_with_the_wheel(capsys: pytest.CaptureFixture[str]) -> None:
    machine = InstallerStandIn(gpus="GPU 0: an L4\n")
    ensure_node_env(machine, yes=True)
    assert node_python() == str(node_env_folder() / "bin" / "python")
    assert "for NVIDIA GPUs: 4.1 GB to download, an estimated 8.5 GB of disk" in capsys.readouterr().out
    package = machine.ran[1].rpartition(" grpo-orch")[2]
    assert package.startswith("[node] @ file:///")
    assert package.endswith(f"/{wheel_digest()}/grpo_orch-0.1.0-py3-none-any.whl")
    ran = len(machine.ran)
    ensure_node_env(machine, yes=False)
    assert len(machine.ran) == ran
    (node_env_folder() / MADE_OF).write_text("another wheel")
    with pytest.raises(
        NoNodeEnvironment, match=r"of another version of grpo-orch; make it with `grpo-orch node-env`"
    ):
        node_python()
    ensure_node_env(machine, yes=True)
    assert "it will be updated" in capsys.readouterr().out
    node_python()


def test_unfinished_environment_is_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Stop, match=r"^interrupted; the same command continues"):
        ensure_node_env(InstallerStandIn(interrupted="install"), yes=True)
    with pytest.raises(NoNodeEnvironment, match="is unfinished; make it with `grpo-orch node-env`"):
        node_python()
    capsys.readouterr()
    ensure_node_env(InstallerStandIn(), yes=True)
    assert "is unfinished; downloads that are complete are used" in capsys.readouterr().out
    node_python()


def test_unfit_machine_is_refused_before_asking(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Stop, match=r"sudo apt-get install libnuma1$") as stop:
        ensure_node_env(InstallerStandIn(library=False), yes=False)
    assert stop.value.exit_code == exit_codes.FAILED
    assert capsys.readouterr().out == ""


def test_up_names_the_command_that_is_missing(tmp_path: Path, grpo_orch: Cli) -> None:
    write_recipe("tiny", tmp_path / "tiny", None)
    answer = grpo_orch("up", "tiny/run.yaml", "--yes")
    assert (answer.code, answer.line) == (1, "no node environment; make it with `grpo-orch node-env`")


@pytest.mark.parametrize("kind", ["other files", "an edited demo", "a file"])
def test_demo_leaves_other_folders_alone(tmp_path: Path, grpo_orch: Cli, kind: str) -> None:
    folder = tmp_path / "mine"
    if kind == "an edited demo":
        write_recipe("tiny", folder, None)
        with (folder / "run.yaml").open("a") as out:
            out.write("# mine\n")
    elif kind == "a file":
        folder.touch()
    else:
        folder.mkdir()
    answer = grpo_orch("demo", "mine", "--yes")
    assert answer.code == exit_codes.USAGE
    assert answer.line == "mine exists and is not an unchanged demo; name another folder"


def test_second_demo_replaces_only_what_was_built(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "demo"
    assert demo.prepare_folder(folder) == folder / "run.yaml"
    (folder / "build").mkdir()
    (folder / "notes").touch()
    demo.refuse_other_folder(folder)
    demo.prepare_folder(folder)
    assert (folder / "notes").exists()
    assert not (folder / "build").exists()
