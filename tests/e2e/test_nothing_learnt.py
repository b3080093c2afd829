"""Runs that learn nothing, by `up`: none says that it has finished, and what the trainer says is the run's reason.

Daemon, trainer, gateway and vLLM are real.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_orch.checkpoint import journal
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import JobExited, NodeRequested, PitfallFound
from grpo_orch.policies.model.vocabulary import Role, RunPhase
from tests.e2e.harness import Run
from tests.e2e.tiny import RUN_TIMEOUT_S, make_tiny, tiny_run

pytestmark = [pytest.mark.whole, pytest.mark.slow]

CHAT = '{"prompt": [{"role": "user", "content": "1 apples:"}]}\n'
NO_REWARD = "def nothing(completions, **_): return [None for _ in completions]\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def small_run(folder: Path, tiny: Path, **trainer: Any) -> Run:
    run = tiny_run(folder, tiny, replicas=1, max_steps=3, save_steps=3)
    spec = yaml.safe_load(run.yaml.read_text())
    spec["trainer"].pop("eval_dataset")
    spec["grpo"] = {key: value for key, value in spec["grpo"].items() if "eval" not in key}
    spec["trainer"].update(trainer)
    run.yaml.write_text(yaml.safe_dump(spec))
    return run


def ended(run: Run) -> tuple[str, list[Any]]:
    """Start the run, and return once its daemon is done: its message, and its events."""
    done = run.cli("up", str(run.yaml), "-y", code=exit_codes.FAILED, timeout_s=RUN_TIMEOUT_S)
    assert run.state.phase is RunPhase.FAILED
    return done.stderr, [event for record in journal.read(run.store) for event in record.decoded()]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ('{"prompt": "1 apples:"}\n', "trainer.dataset: it has 1 row, and a batch takes "),
        (CHAT * 32, "trainer.dataset: its prompts are chats, and trainer.model "),
    ],
    ids=["few rows", "no chat template"],
)
def test_unusable_data_fails_at_once_and_buys_no_node(rows: str, says: str, tiny: Path, tmp_path: Path) -> None:
    """Of a folder, which only the trainer reads: `validate` refuses the same rows in a file."""
    data = tmp_path / "prompts"
    data.mkdir()
    (data / "train.jsonl").write_text(rows)
    run = small_run(tmp_path / "run", tiny, dataset=str(data))
    try:
        message, events = ended(run)
        assert f"failed: the trainer cannot work with this run.yaml: {says}" in message
        assert [event.role for event in events if isinstance(event, NodeRequested)] == [Role.TRAINER]
        (exited,) = [event for event in events if isinstance(event, JobExited)]
        assert (exited.exit_code, exited.attempt) == (exit_codes.BAD_SPEC, 1)
        assert exited.reason.startswith(says)
        assert says in run.json("status", run.url)["reason"]
        assert says in run.json("report", run.url)["reason"]
    finally:
        run.end()


def test_run_whose_rewards_are_all_none_fails(tiny: Path, tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", tiny, reward_funcs="rewards.nothing")
    (run.yaml.parent / "rewards.py").write_text(NO_REWARD)
    try:
        message, events = ended(run)
        assert "failed: training has no effect: complete at step 3, and no completion ever had a reward" in message
        assert [event.kind for event in events if isinstance(event, PitfallFound)] == ["no_reward"]
        assert run.cli("events", run.url).stdout.count("Warning at step 1: no completion had a reward") == 1
    finally:
        run.end()
