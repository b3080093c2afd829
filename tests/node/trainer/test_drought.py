"""A trainer that loses its rollout nodes in mid run, and has them back: real TRL, in one process and in two.

The gateway and its nodes are a stand-in, which proves each published policy by loading it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_orch.checkpoint.records import metrics
from grpo_orch.policies.model.vocabulary import PolicyVersion
from tests.node.trainer.rig import GRPO, Rig, open_rig

STEPS = GRPO["max_steps"]
AFTER_S = 1.5


def dry(rig: Rig, steps: range) -> None:
    """No node is there for the policies of these steps."""

    def look(version: str) -> None:
        rig.gateway.members = 0 if PolicyVersion.parse(version).step in steps else 1

    rig.gateway.on_asked = look


@pytest.mark.parametrize(("processes", "windows"), [(1, 1), (2, 2)])
def test_trainer_makes_shortage_steps_and_nodes_the_others(
    processes: int, windows: int, tiny: Path, tmp_path: Path
) -> None:
    accelerators = "" if processes == 1 else f"CPU:{processes}"
    size = 8 // processes // windows
    grpo = {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": windows,
        "steps_per_generation": 1,
    }
    with open_rig(tmp_path, tiny, grpo=grpo, accelerators=accelerators, own_generation_after_s=AFTER_S) as rig:
        dry(rig, range(2, 5))
        trainer = rig.start_trainer() if processes == 1 else rig.start_ranks()
        assert rig.wait(trainer) == 0
        rows = rig.trained()
        assert list(rig.rows()) == list(range(1, STEPS + 1))
        own = [values.get(metrics.OWN_GENERATE_S, 0.0) > 0 for values in rows]
        assert own == [False] * 2 + [True] * 3 + [False] * 3
        assert [values["orch/tokens"] > 0 for values in rows] == [True] * STEPS
        asked = {version: set[float | None]() for version, _ in rig.gateway.patience}
        for version, patience_s in rig.gateway.patience:
            asked[version].add(patience_s)
        assert asked["0-2"] == ({AFTER_S} if windows == 1 else {AFTER_S, 0.0}), "the wait was for all windows"
        assert asked["0-3"] == asked["0-4"] == asked["0-5"] == {0.0}
        assert asked["0-6"] == {AFTER_S}
        # What it has drawn is what its own model computes: TRL's own measure of the two.
        assert max(values["sampling/sampling_logp_difference/max"] for values in rows) < 1e-4
        assert rig.gateway.unproved == []
