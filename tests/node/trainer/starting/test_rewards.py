"""A reward function that fails in the middle of a run, by both of the run's rules."""

from __future__ import annotations

from pathlib import Path

from grpo_orch.policies.model import exit_codes
from tests.node.trainer.rig import open_rig


def test_by_the_rule_fail_the_trainer_ends_with_a_line_that_names_it(tiny: Path, tmp_path: Path) -> None:
    with open_rig(tmp_path, tiny, grpo={}, reward="rig_rewards.later_none") as rig:
        assert rig.wait(rig.start_trainer()) == exit_codes.UNAVAILABLE
        last = rig.last_line()
    assert last.startswith("grpo-orch trainer: at step 2: rig_rewards.later_none returned nan, for the prompt ")
    assert last.endswith("; see policies.on_bad_reward")


def test_by_the_rule_none_the_others_count_and_metrics_say_how_many_failed(tiny: Path, tmp_path: Path) -> None:
    named = {"reward": "rig_rewards.later_none", "witness": "rig_rewards.lower_share", "on_bad_reward": "none"}
    with open_rig(tmp_path, tiny, grpo={"max_steps": 3, "save_steps": 3}, **named) as rig:
        rig.train()
        rows = rig.rows()
    failed = {step: values.get("reward_failures/later_none") for step, values in rows.items()}
    assert failed[1] is None
    assert failed[2]
    assert rows[2]["reward"] is not None
