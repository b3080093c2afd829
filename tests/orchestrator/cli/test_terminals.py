"""What commands print in which terminal, and what they do where there is none to ask in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model import exit_codes
from tests.generators.config_world import furnish
from tests.generators.views_world import diverging
from tests.rigs.command_line import Cli
from tests.rigs.terminal import in_terminal, piped

COLOUR = re.compile(r"\x1b\[[0-9;]*\b(3[0-8]|4[0-8]|9[0-7]|10[0-7])[0-9;]*m")
ESCAPE = "\x1b"
OF_RUN = ("status", "events", "report", "samples", "logs daemon", "explain", "checkpoints ls", "members ls")
OTHERS = ("validate", "plan", "init --recipe", "--help", "up --help", "nosuch")
IN_TERMINAL = ("status", "validate", "up --help", "nosuch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a valid run.yaml, and a run that has diverged in run/."""
    folder = tmp_path_factory.mktemp("terminal")
    furnish(folder)
    memory, stored = diverging().store, Store(f"file://{folder}/run")
    for entry in memory.entries(""):
        stored.put(entry.key, memory.get(entry.key))
    return folder


def words_of(line: str) -> list[str]:
    return [*line.split(), *(["run"] if line in OF_RUN else [])]


@pytest.mark.parametrize("line", [*OF_RUN, *OTHERS])
def test_piped_output_has_no_escape_codes(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, grpo_orch: Cli
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GRPO_ORCH_HOME", str(folder / "home"))
    result = grpo_orch(*words_of(line))
    assert result.out + result.err
    assert ESCAPE not in result.out + result.err


@pytest.mark.parametrize("line", IN_TERMINAL)
def test_no_color_and_dumb_terminals_are_respected(line: str, folder: Path) -> None:
    for env, unwanted in (({"NO_COLOR": "1"}, COLOUR), ({"TERM": "dumb"}, re.compile(ESCAPE))):
        output = in_terminal(words_of(line), folder, env)[1]
        assert output
        assert not unwanted.search(output)


def test_terminal_gets_colours(folder: Path) -> None:
    assert COLOUR.search(in_terminal(["status", "run"], folder, {})[1])


def test_up_without_terminal_refuses_to_ask(folder: Path) -> None:
    result = piped(["up"], folder, {})
    expected = "cannot ask without a terminal; pass --yes to start without asking\n"
    assert (result.returncode, result.stdout, result.stderr) == (exit_codes.USAGE, "", expected)


@pytest.mark.parametrize("answer", ["n\n", "\x04"])
def test_up_shows_the_cost_and_starts_nothing_without_a_yes(answer: str, tmp_path: Path) -> None:
    run_yaml = furnish(tmp_path)
    run_yaml.write_text(run_yaml.read_text().replace("storage: ./run", "storage: ./new"))
    code, output = in_terminal(["up"], tmp_path, {"GRPO_ORCH_NODE_PYTHON": "/bin/true"}, keys=answer)
    assert "USD/h" in output
    assert output.endswith("nothing was started\r\n")
    assert code == exit_codes.FAILED
    assert not (tmp_path / "new" / "run.json").exists()
