"""Runs that learn nothing, by `up`: none says that it has finished, and what the trainer says is the run's reason.

Daemon and trainer are real; the trainer generates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint import journal
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import JobExited, NodeRequested, PitfallFound
from grpo_orch.policies.model.vocabulary import Role, RunPhase
from tests.e2e.harness import Run
from tests.e2e.tiny import RUN_TIMEOUT_S, tiny_run

pytestmark = [pytest.mark.whole, pytest.mark.slow]

ROW, PROBLEM = '{"prompt": "1 apples:"}\n', "trainer.dataset: it has 1 row, and a batch takes "
NO_REWARD = "def nothing(completions, **_): return [None for _ in completions]\n"


def small_run(folder: Path, tiny: Path, replicas: int = 1, **trainer: Any) -> Run:
    run = tiny_run(folder, tiny, replicas, max_steps=3, save_steps=3)
    with run.edited() as spec:
        spec["trainer"].pop("eval_dataset")
        spec["grpo"] = {key: value for key, value in spec["grpo"].items() if "eval" not in key}
        spec["trainer"].update(trainer)
    return run


def ended(run: Run) -> tuple[str, list[Any]]:
    """Start the run, and return once its daemon is done: its message, and its events."""
    done = run.cli("up", str(run.yaml), "-y", code=exit_codes.FAILED, timeout_s=RUN_TIMEOUT_S)
    assert run.state.phase is RunPhase.FAILED
    return done.stderr, [event for record in journal.read(run.store) for event in record.decoded()]


def test_unusable_data_fails_at_once_and_buys_no_node(tiny: Path, tmp_path: Path) -> None:
    """Of a folder, which only the trainer reads: `validate` refuses the same row in a file.

    What else the trainer refuses: tests/node/trainer/starting/test_preflight.py.
    """
    data = tmp_path / "prompts"
    data.mkdir()
    (data / "train.jsonl").write_text(ROW)
    run = small_run(tmp_path / "run", tiny, dataset=str(data))
    try:
        message, events = ended(run)
        assert f"failed: the trainer cannot work with this run.yaml: {PROBLEM}" in message
        assert [event.role for event in events if isinstance(event, NodeRequested)] == [Role.TRAINER]
        (exited,) = [event for event in events if isinstance(event, JobExited)]
        assert (exited.exit_code, exited.attempt) == (exit_codes.BAD_SPEC, 1)
        assert exited.reason.startswith(PROBLEM)
        assert PROBLEM in run.json("status", run.url)["reason"]
        assert PROBLEM in run.json("report", run.url)["reason"]
    finally:
        run.end()


def test_run_whose_rewards_are_all_none_fails(tiny: Path, tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", tiny, replicas=0, reward_funcs="rewards.nothing")
    (run.yaml.parent / "rewards.py").write_text(NO_REWARD)
    try:
        message, events = ended(run)
        assert "failed: training has no effect: complete at step 3, and no completion ever had a reward" in message
        assert [event.kind for event in events if isinstance(event, PitfallFound)] == ["no_reward"]
        assert run.cli("events", run.url).stdout.count("Warning at step 1: no completion had a reward") == 1
    finally:
        run.end()
