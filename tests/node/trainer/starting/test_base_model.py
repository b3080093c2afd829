"""A trainer whose model is a name on the hub, on a machine that reaches no hub: the run's store has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.tasks.models import shared
from grpo_orch.tasks.models.base import FOLDER
from tests.budget import HANG_S
from tests.node.trainer.rig import open_rig

MODEL = "own/tiny"
STEPS = {"max_steps": 2, "save_steps": 1}
# A cloud's machine works in a copy of the run's folder, which here is the repository.
SPEC: dict[str, Any] = {"model": MODEL, "cloud": "sky", "reward": "tests.node.trainer.rig_rewards.lower_share"}


@pytest.mark.parametrize("beta", [0.0, 0.02])
def test_a_trainer_trains_on_the_model_that_another_has_published(beta: float, tmp_path: Path, tiny: Path) -> None:
    """With a KL term the checkpoints hold the base model, too."""
    with open_rig(tmp_path, tiny, **SPEC, grpo={**STEPS, "beta": beta}) as rig:
        assert shared.publish(rig.store, MODEL, None, tiny / "model", 1.0)
        assert rig.wait(rig.start_trainer()) == exit_codes.OK
        assert "base_model_from_store" in rig.log().read_text()
        assert (rig.work / FOLDER / "model.safetensors").read_bytes() == model_of(tiny)
        assert rig.stored()[-1] == PolicyVersion(0, 2)
        restored = rig.restore(PolicyVersion(0, 2), tmp_path / "restored")
        assert any(file.name == "base_model/model.safetensors" for file in restored.files) is (beta > 0)


def test_without_store_and_hub_the_trainer_says_which_model_it_has_not(tmp_path: Path, tiny: Path) -> None:
    with open_rig(tmp_path, tiny, **SPEC, grpo=STEPS) as rig:
        code = rig.start_trainer().wait(HANG_S)
        assert code in (exit_codes.BAD_SPEC, exit_codes.FAILED)
        assert "base_model_not_from_hub" in (said := rig.log().read_text())
        assert MODEL in said.splitlines()[-1]


def model_of(tiny: Path) -> bytes:
    return (tiny / "model" / "model.safetensors").read_bytes()
