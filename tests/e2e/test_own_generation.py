"""The trainer generates in a run that has lost its rollout nodes for a while. It is killed, and goes on.

`test_main_job.py` has a run without rollout nodes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import pytest

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.metrics import OWN_GENERATE_S, MetricsRow, read_metrics
from grpo_orch.orchestrator.clouds import open_local
from grpo_orch.policies.model.events import Event, NodesGenerate, RunMoved
from grpo_orch.policies.model.vocabulary import NodePhase, Role, RunPhase
from tests.e2e.harness import Run
from tests.e2e.tiny import RUN_TIMEOUT_S, kill_trainer, reach, step, tiny_run

pytestmark = [pytest.mark.whole, pytest.mark.slow]

SAVE_STEPS = 5
FOR_EVER_S = 10.0**6
E = TypeVar("E", bound=Event)


def told(run: Run, kind: type[E]) -> list[E]:
    events = (event for record in journal.read(run.store) for event in record.decoded())
    return [event for event in events if isinstance(event, kind)]


def serving(run: Run) -> list[str]:
    return [one.id for one in run.state.live(Role.ROLLOUT) if one.phase is NodePhase.SERVING]


def generates_itself(run: Run) -> bool:
    return run.state.own_generation_since_s is not None


def steps(run: Run) -> list[MetricsRow]:
    return [row for row in read_metrics(run.store) if "reward" in row.values]


def is_own(row: MetricsRow) -> bool:
    """Whether the trainer has made completions of the step."""
    return row.values.get(OWN_GENERATE_S, 0.0) > 0


def test_a_drought_is_trained_through_and_nodes_take_over_again(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(
        tmp_path / "run",
        tiny,
        replicas=1,
        max_steps=10**5,
        learning_rate=5e-4,
        save_steps=SAVE_STEPS,
        eval_strategy="no",
    )
    with run.edited() as spec:
        spec["rollout"]["own_generation_after_s"] = 1.0
        spec["policies"]["kl"]["action"] = "alert"  # it may take any number of steps, and come to diverge
    with run.up():
        # Until a node has joined and has the weights the trainer generates, too.
        run.until("a node generates", lambda: bool(serving(run)) and not generates_itself(run), RUN_TIMEOUT_S)
        reach(run, step(run) + 2)
        ended = len(told(run, NodesGenerate))

        monkeypatch.setenv("GRPO_ORCH_HOME", run.env["GRPO_ORCH_HOME"])
        cloud = open_local(documents.read_run(run.store))
        cloud.refuse(["rollout-0"], FOR_EVER_S)
        (node,) = run.state.live(Role.ROLLOUT)
        cloud.preempt(node.id, "preempted")
        run.until("the trainer generates", lambda: generates_itself(run), RUN_TIMEOUT_S)
        reach(run, step(run) + 2)
        kill_trainer(run)
        reach(run, step(run) + 3)

        cloud.refuse(["rollout-0"], 0.0)
        run.until("nodes generate", lambda: len(told(run, NodesGenerate)) > ended, RUN_TIMEOUT_S)
        run.until("a step of theirs", lambda: not is_own(steps(run)[-1]), RUN_TIMEOUT_S)
        said = run.json("down", run.url)
        again = said["step"] - said["stored_step"]
        log = (run.machine("trainer-0-i1") / "log").read_text()
        assert again == 0 or (again < SAVE_STEPS and "not_saved" in log), (
            "what takes longer to store is made again"
        )
        rows = steps(run)
        assert [row.step for row in rows] == list(range(1, said["step"] + 1))
        assert sum(map(is_own, rows)) >= 5
        differences = [row.values["sampling/sampling_logp_difference/max"] for row in rows]
        assert max(differences) < 1e-4, "a token was sampled from other weights than the trainer's"
        assert RunPhase.PARKED not in [event.phase for event in told(run, RunMoved)]
