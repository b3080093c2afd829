"""What `down` says and does while it waits, and at Ctrl-C."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from grpo_orch.checkpoint.journal import Journal
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.cli.down import Stopping, progress
from grpo_orch.policies.control.lifecycle import DOWN, DOWN_NOW
from grpo_orch.policies.model.events import NodeMoved, NodeRequested, RunCreated, RunMoved
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Role, RunPhase
from grpo_orch.policies.serving.joining import Stage
from grpo_orch.policies.tick.snapshot import Trainer
from tests.stand_ins.control_plane import Run


@pytest.fixture
def store() -> Store:
    return Run().store


def kinds(store: Store) -> list[str]:
    return [command.kind for command in documents.read_commands(store)]


@pytest.mark.parametrize(
    ("kind", "moments", "seen"),
    [
        (DOWN, ["later", "later"], [[], [], []]),
        (DOWN, ["Ctrl-C", "later"], [[], [], []]),
        (DOWN, ["Ctrl-C", "later", "Ctrl-C", "later"], [[], [], [], [DOWN_NOW], [DOWN_NOW]]),
    ],
)
def test_the_second_interrupt_stops_the_waiting_for_the_trainer(
    store: Store, kind: str, moments: list[str], seen: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    looks: list[list[str]] = []  # the commands at each look, the last of which finds that it is over
    script = iter([*moments, "over"])

    def over() -> bool:
        looks.append(kinds(store))
        moment = next(script)
        if moment == "Ctrl-C":
            raise KeyboardInterrupt
        return moment == "over"

    Stopping(store, kind).wait(over)
    assert looks == seen
    assert kinds(store) == [], "it would stop the run when that is resumed"
    said = capsys.readouterr().err
    assert ("Press Ctrl-C again to return the machines now" in said) is ("Ctrl-C" in moments)


@pytest.mark.parametrize(("kind", "interrupts"), [(DOWN, 3), (DOWN_NOW, 1)])
def test_where_nothing_is_waited_for_an_interrupt_leaves(store: Store, kind: str, interrupts: int) -> None:
    left = iter(range(interrupts - 1))

    def over() -> bool:
        next(left, None)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Stopping(store, kind).wait(over)
    assert next(left, None) is None


def test_down_shows_its_progress(store: Store) -> None:
    journal = Journal(store, "here/1")
    journal.take_over(0.0, "here", 1, "up")
    node = "trainer-0-i1"
    journal.append(
        0.0, (RunCreated("sim", "sim-0"), NodeRequested(node, Role.TRAINER, "trainer-0", 1, Market.SPOT, ""))
    )
    journal.append(1.0, (NodeMoved(node, NodePhase.BOOTING, ""), NodeMoved(node, NodePhase.SERVING, "")))
    journal.append(2.0, (RunMoved(RunPhase.TRAINING, ""), RunMoved(RunPhase.STOPPING, "")))
    beat = Trainer(node, 1, 0, 117, 500, "training", time.time(), stored_step=100)
    documents.TRAINER.write(store, beat)
    assert progress(store, 3.0) == "returning the machines"
    journal.append(3.0, (NodeMoved(node, NodePhase.DRAINING, ""),))
    limit = "3 s; times out after 900 s without progress)"
    assert progress(store, 3.0) == f"the trainer is storing step 117 (step 100 is stored; {limit}"
    sending = replace(beat, stage=Stage("storing checkpoint 0-117", 92 * 10**9, 459 * 10**9))
    documents.TRAINER.write(store, sending)
    assert progress(store, 3.0) == f"the trainer is storing step 117 (step 100 is stored, 20% uploaded; {limit}"
    documents.TRAINER.write(store, replace(beat, stored_step=None))
    assert "nothing stored yet" in progress(store, 3.0)
