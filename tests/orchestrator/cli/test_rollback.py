"""`grpo-orch rollback`, by the real command line over a store in a folder; its daemon is the controller's own code
with a simulated world under it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_orch.checkpoint.journal import Journal
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.orchestrator.cli import start
from grpo_orch.policies.control.decide import decide
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import Diverged, RunCreated, RunMoved
from grpo_orch.policies.model.vocabulary import Cause, RunPhase
from grpo_orch.policies.tick.snapshot import Snapshot, Stored
from tests.rigs.command_line import Cli
from tests.stand_ins.control_plane import Run


class Steered(Run):
    """A run in a folder, and a daemon that takes commands when it is started."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "store")
        self.started: list[str] = []
        self.create().happens(RunCreated("sim", "id"))

    def daemon(self, _store: Store, _record: RunRecord, reason: str) -> int:
        """One tick, with a cloud that does not answer."""
        self.started.append(reason)
        writer = Journal(self.store, "daemon")
        state = writer.take_over(2.0, "here", 1, reason)
        found = Catalog(self.store, "daemon").newest().checkpoints
        commands = documents.read_commands(self.store)
        snapshot = Snapshot(3.0, commands=commands, store=Stored(tuple(one.at for one in found)))
        writer.append(3.0, decide(state, snapshot, self.record.spec).events)
        return 1


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steered:
    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    made = Steered(tmp_path)
    monkeypatch.setattr(start, "start_daemon", made.daemon)
    return made


@pytest.fixture
def cli(run: Steered, grpo_orch: Cli) -> Cli:
    """`grpo-orch COMMAND RUN ...`."""
    return lambda command, *words: grpo_orch(command, run.store.url, *words)


def begun(run: Steered) -> tuple[str | None, dict[str, int | float]]:
    (one,) = run.state.rollbacks
    assert one.cause is Cause.USER
    return one.fork.start, dict(one.fork.changes)


def test_a_target_and_changes_are_taken_as_given(run: Steered, cli: Cli) -> None:
    run.saves("0-2", "0-4", "0-6")
    code, out, _ = cli("rollback", "--to", "4", "--set", "beta=0.08", "--set", "learning_rate=1e-5")
    assert code == 0
    assert "rolls back to 0-4, as timeline 1; changed from run.yaml: beta 0.08, learning_rate 1e-05." in out
    assert "beta: adds a KL term, which loads a reference model in addition to the trained one\n" in out
    assert "learning_rate: updates of 10 times the size\n" in out
    assert begun(run) == ("0-4", {"beta": 0.08, "learning_rate": 1e-5})
    assert run.started == ["rollback"]


def test_rollback_defaults_to_before_onset_with_rule_changes(run: Steered, cli: Cli) -> None:
    run.saves("0-2", "0-4", "0-6")
    run.happens(Diverged(0, 7, 5, ("KL 9",), "trainer"), RunMoved(RunPhase.PAUSED, "diverged"))
    code, out, _ = cli("rollback", "-o", "json")
    assert code == 0
    told = json.loads(out)
    assert (told["timeline"], told["start"], told["cause"]) == (1, "0-4", "user")
    # By rule, from TRL's own defaults: no KL term, and no ratio to clip.
    assert told["changes"] == {"learning_rate": 5e-7}
    assert told["effects"] == {"learning_rate": "updates of half the size"}
    assert run.state.phase is RunPhase.STARTING


def test_rollback_without_target_asks_and_begins_nothing(run: Steered, cli: Cli) -> None:
    run.saves("0-50")
    run.happens(Diverged(0, 90, 30, ("KL 9",), "trainer"), RunMoved(RunPhase.PAUSED, "diverged"))
    code, _, err = cli("rollback")
    assert code == 2
    assert "no checkpoint is from before step 30; the store has 0-50" in err
    assert "--to start" in err
    assert not run.state.rollbacks
    assert not run.started


@pytest.mark.parametrize(("word", "start"), [("start", None), ("0", None), ("latest", "0-4")])
def test_start_and_newest_checkpoint_have_names(run: Steered, cli: Cli, word: str, start: str | None) -> None:
    run.saves("0-2", "0-4")
    assert cli("rollback", "--to", word)[0] == 0
    assert begun(run)[0] == start


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "5"], "no checkpoint 5; available: 0-2, 0-4"),
        (["--to", "../x"], "'../x' is not a checkpoint: expected TIMELINE-STEP"),
        (["--set", "beta"], "--set beta: expected a number of 0 or more, as in beta=0.1"),
        (["--set", "beta=much"], "--set beta=much: expected a number of 0 or more"),
        (["--set", "beta=nan"], "--set beta=nan: expected a number of 0 or more"),
        (["--set", "learning_rate=0"], "--set learning_rate=0: expected a number above 0"),
        (["--set", "max_completion_length=2.5"], "--set max_completion_length=2.5: expected a whole number"),
        (
            ["--set", "weight_decay=3"],
            "--set weight_decay=3: expected KEY=NUMBER, where KEY is one of beta, epsilon, epsilon_high",
        ),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(run: Steered, cli: Cli, words: list[str], message: str) -> None:
    run.saves("0-2", "0-4")
    code, out, err = cli("rollback", *words)
    assert (code, out) == (exit_codes.USAGE, "")
    assert message in err
    assert err.count("\n") == 1
    assert not documents.read_commands(run.store)
    assert not run.started


def test_resume_refuses_an_infinite_budget(run: Steered, cli: Cli) -> None:
    """JSON has no infinity, so that the daemon could not read the command."""
    code, _, err = cli("resume", "--budget-usd", "inf")
    assert (code, err) == (exit_codes.USAGE, "--budget-usd inf: expected a number of USD, as in 500\n")
    assert not documents.read_commands(run.store)


def test_finished_run_names_the_command_for_more_steps(run: Steered, cli: Cli) -> None:
    run.saves("0-4")
    run.happens(RunMoved(RunPhase.FINISHED, "done"))
    code, _, err = cli("rollback")
    assert code == exit_codes.USAGE
    assert "--set max_steps=" in err
    code, _, err = cli("rollback", "--to", "latest", "--set", "max_steps=4")
    assert code == exit_codes.USAGE
    assert "the checkpoint is already at step 4; expected more" in err
    assert not documents.read_commands(run.store)


@pytest.mark.parametrize("phase", [RunPhase.PAUSED, RunPhase.GAVE_UP])
def test_resume_of_a_diverged_run_shows_what_to_do(run: Steered, cli: Cli, phase: RunPhase) -> None:
    run.happens(Diverged(0, 7, 5, ("KL 9",), "trainer"), RunMoved(phase, "diverged since step 5"))
    code, _, err = cli("resume")
    assert code == exit_codes.USAGE
    assert f"grpo-orch rollback {run.store.url}" in err
    assert not run.started
