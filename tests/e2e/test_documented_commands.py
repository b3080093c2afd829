"""Every command in README.md and docs/start.md is run, or a whole run of another test is shown to run it.

The commands of this file run in their order against one run: with the real command line in a real terminal, a real
daemon and real machines, whose work is a stand-in that only sleeps.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from grpo_orch.orchestrator.clouds.wheel import build_wheel
from grpo_orch.policies.model import exit_codes
from tests.e2e.harness import ROOT
from tests.e2e.small_run import SmallRun
from tests.generators.samples import group, sample, store_step
from tests.rigs.terminal import in_terminal
from tests.stand_ins.earlier_trainer import leave_heartbeat

pytestmark = pytest.mark.whole
PAGES = (ROOT / "README.md", ROOT / "docs" / "start.md")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
STARTS = ("grpo-orch ", "pip ", "python3.11 ", "make ", "cd ", ". ")


class Step(NamedTuple):
    """A documented command, and how it is run here."""

    written: str
    run: str = ""  # what runs, where that differs
    why: str = ""  # it differs
    shows: str = ""  # then Ctrl-C is pressed
    code: int = exit_codes.OK


# In order, in the folder of one run. A question is answered with Enter. The run is on this machine, also where the
# page means a cloud: an account of one is not at hand.
BEFORE = (
    Step("grpo-orch init", "grpo-orch init new/run.yaml", "the folder has the run's own run.yaml"),
    Step("grpo-orch init --recipe"),
    Step("grpo-orch init --recipe tiny"),
    Step("cd tiny", "grpo-orch validate tiny/run.yaml", "all other commands run in one folder"),
    Step("grpo-orch validate"),
    Step("grpo-orch validate run.yaml"),
    Step("grpo-orch plan"),
    Step("grpo-orch plan run.yaml"),
    Step("grpo-orch schema"),
    Step("grpo-orch doctor", "grpo-orch doctor run.yaml", "alone it asks every cloud that SkyPilot knows"),
    Step("grpo-orch doctor run.yaml"),
    Step("grpo-orch node-env"),
    Step("grpo-orch detect FILE...", "grpo-orch detect log.jsonl", "FILE is a name", code=exit_codes.TRIPPED),
    Step("grpo-orch up", "grpo-orch up --help", "it would start the run that `up run.yaml` is to start"),
    Step("grpo-orch up run.yaml", shows="trainer-0"),
)
DURING = (
    Step("grpo-orch status"),
    Step("grpo-orch explain"),
    Step("grpo-orch events"),
    Step("grpo-orch logs NODE", "grpo-orch logs trainer-0", "NODE is a name"),
    Step("grpo-orch logs rollout-0"),
    Step("grpo-orch web", shows="http://127.0.0.1:8642/"),
    Step("grpo-orch samples"),
    Step("grpo-orch samples --worst"),
    Step("grpo-orch members", "grpo-orch members ls", "it has commands below it"),
    Step("grpo-orch checkpoints", "grpo-orch checkpoints ls", "it has commands below it"),
    Step("grpo-orch report"),
    Step("grpo-orch plot"),
    Step("grpo-orch down"),
    Step("grpo-orch resume", shows="trainer-0"),
    Step("grpo-orch rollback"),
)
# What takes minutes, or installs packages: a test that runs it, and where it stands there.
ELSEWHERE = {
    "grpo-orch demo": ("e2e/test_demo.py", 'grpo_orch("demo")'),
    "grpo-orch eval": ("e2e/test_evaluation.py", 'command = ("eval", '),
    "grpo-orch simulate": (
        "orchestrator/cli/test_simulate.py",
        'grpo_orch("simulate", str(run_yaml), *words)',
    ),
}
# Run without dependencies, which only an index has.
INSTALL = {
    "python3.11 -m venv grpo": "python3.11 -m venv grpo",
    ". grpo/bin/activate": ". grpo/bin/activate",
    "pip install dist/*.whl": "pip install --quiet --no-deps --no-index dist/*.whl",
    "pip install grpo_orch-0.1.0-py3-none-any.whl": "pip install --quiet --no-deps --no-index --force-reinstall "
    "dist/grpo_orch-0.1.0-py3-none-any.whl",
}
WITH_SKYPILOT = " ".join(
    [
        "pip install 'dist/grpo_orch-0.1.0-py3-none-any.whl[sky]' 'skypilot[aws]==0.14.1'",
        "-c tasks/sky/locks/controller.txt",
    ]
)
# What `make -n` prints of each, without doing it. `make test` runs this test.
MAKE = {
    "make wheel": "pip wheel --quiet --no-deps --wheel-dir dist .",
    "make demo": "grpo-orch demo build/demo",
    "make test": "python -m pytest",
    "make docs": "mkdocs build --strict",
}


def commands(page: Path) -> Iterator[str]:
    """Yield each command of a page: lines of code blocks, `grpo-orch ...` and `make ...` in sentences, tables."""
    text = page.read_text().replace("\\\n", "")
    for block in (block for language, block in BLOCK.findall(text) if not language):
        lines = [line.partition("  #")[0].strip() for line in block.splitlines()]
        marked = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        for line in marked or lines:
            if f"{line} ".startswith(STARTS):
                yield from (re.sub(r" +", " ", part.strip()) for part in line.split("&&"))
    prose = BLOCK.sub("", text)
    yield from re.findall(r"`((?:grpo-orch|make) [^`]+)`", prose)
    table = prose.partition("| command | what it does |")[2].partition("\n\n")[0]
    for row in table.splitlines():
        yield from (f"grpo-orch {name}" for name in re.findall(r"`([^`]+)`", row.split(" | ")[0]))


def test_every_documented_command_is_run() -> None:
    run = {step.written for step in (*BEFORE, *DURING)} | {*ELSEWHERE, *INSTALL, *MAKE, WITH_SKYPILOT}
    assert set().union(*map(commands, PAGES)) == run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    made = SmallRun(tmp_path)
    shutil.copy(ROOT / "tests/orchestrator/cli/foreign_logs/collapsed-in-blocks.log", tmp_path / "log.jsonl")
    yield made
    made.end()


def test_commands_of_grpo_orch(run: SmallRun) -> None:
    take(BEFORE, run)
    leave_heartbeat(run.store)
    run.until("three machines", run.booted)
    store_step(run.store, "0-4", group("what is 1 + 1?", sample("2")))
    take(DURING, run)


def take(steps: Iterable[Step], run: SmallRun) -> None:
    for step in steps:
        program, *words = shlex.split(step.run or step.written)
        assert program == "grpo-orch"
        code, output = in_terminal(words, run.yaml.parent, run.env, keys="\n", until=step.shows)
        assert code == step.code, (step.written, output)
        assert step.shows in output, (step.written, output)


@pytest.mark.parametrize("command", ELSEWHERE)
def test_another_test_runs(command: str) -> None:
    file, words = ELSEWHERE[command]
    assert words in (ROOT / "tests" / file).read_text()


def test_commands_that_install(tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    shutil.copy(build_wheel(tmp_path / "built"), tmp_path / "dist")
    script = "\n".join(["set -e", *INSTALL.values(), "command -v grpo-orch"])
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(tmp_path / "grpo" / "bin" / "grpo-orch"), done.stderr


def test_skypilot_is_installed_as_locked() -> None:
    """Not run: it is a gigabyte. The file is the one that pip installs above."""
    *_, package, _, lock = shlex.split(WITH_SKYPILOT)
    name, _, version = package.partition("[aws]==")
    assert f"\n{name}=={version}\n" in (ROOT / lock).read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "sky" in project["optional-dependencies"]
    assert f"-{project['version']}-py3" in WITH_SKYPILOT


@pytest.mark.parametrize("command", MAKE)
def test_make_knows(command: str) -> None:
    argv = ["make", "--dry-run", "--directory", str(ROOT), *command.split()[1:]]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert MAKE[command] in done.stdout
