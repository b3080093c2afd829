"""How many checkpoints of a run stay in its store."""

from __future__ import annotations

import pytest

from grpo_orch.policies.detect.divergence import Verdict
from grpo_orch.policies.ledger import retention
from grpo_orch.policies.ledger.retention import (
    RetentionRules,
    StoredCheckpoint,
    keep_before,
    keep_since,
    max_checkpoints,
    versions_to_retire,
)
from grpo_orch.policies.model.spec import CheckpointsSpec
from grpo_orch.policies.model.vocabulary import PolicyVersion


@pytest.mark.parametrize(("save_steps", "kept"), [(10, 20), (25, 17), (50, 15), (100, 12)])
def test_long_runs_store_has_the_documented_size(save_steps: int, kept: int) -> None:
    """docs/run-yaml.md, checkpoints."""
    assert max_checkpoints(CheckpointsSpec(), save_steps, 1, 10_000) == kept


@pytest.mark.parametrize("save_steps", [3, 20])
@pytest.mark.parametrize("logging_steps", [1, 10])
@pytest.mark.parametrize("keep_last", [1, 5])
def test_a_long_run_is_followed_at_its_end_alone(
    save_steps: int, logging_steps: int, keep_last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "SIMULATED_SAVES", 64)
    rules, saves, most = CheckpointsSpec(keep_last=keep_last), 260, 0
    line: list[StoredCheckpoint] = []
    for step in range(save_steps, save_steps * saves + 1, save_steps):
        line.append(StoredCheckpoint(PolicyVersion(0, step)))
        before, since = keep_before(step, Verdict(), logging_steps), keep_since(step, logging_steps)
        gone = versions_to_retire(line, (), RetentionRules(keep_last, None, before, since))
        line = [one for one in line if one.version not in gone]
        most = max(most, len(line))
    assert max_checkpoints(rules, save_steps, logging_steps, save_steps * saves) == most


def test_permanent_checkpoints_are_counted_if_saved() -> None:
    every = CheckpointsSpec(keep_every_steps=75)
    assert max_checkpoints(every, 50, 1, 10_000) == 15 + 10_000 // 150
    assert max_checkpoints(CheckpointsSpec(keep_every_steps=50), 50, 1, 500) == 10
    assert max_checkpoints(CheckpointsSpec(), 50, 1, 49) == 0
