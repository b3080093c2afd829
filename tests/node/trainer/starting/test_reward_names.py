"""What is logged and kept by a reward function's name is its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from trl.trainer.utils import get_callable_name

from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.tasks.trainer.user_objects import guarded_rewards, load_rewards
from tests.stand_ins.world import spec

CLOSURES = """
def made(share):
    def reward(completions, **_):
        return [share for _ in completions]
    return reward

short, polite = made(0.1), made(0.2)

def correct(completions, **_):
    return [0.3 for _ in completions]
"""


def spec_of(*paths: str) -> RunSpec:
    run = spec()
    return replace(run, trainer=replace(run.trainer, reward_funcs=paths))


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (("named_one.correct", "named_one.short"), ["correct", "reward"]),
        (("named_one.short", "named_one.correct", "named_one.polite"), ["short", "correct", "polite"]),
        (("named_one.correct", "named_two.correct"), ["named_one.correct", "named_two.correct"]),
    ],
    ids=["alone", "closures", "modules"],
)
def test_functions_of_one_name_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: tuple[str, ...], names: list[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("named_one", "named_two"):
        (tmp_path / f"{module}.py").write_text(CLOSURES)
    run = spec_of(*paths)
    rewards = guarded_rewards(load_rewards(run.trainer, tmp_path), run)
    assert [get_callable_name(one) for one in rewards] == names
    given = {"correct": 0.3, "short": 0.1, "polite": 0.2}
    told = {"prompts": ["p"], "completions": ["c"]}
    assert [one(**told) for one in rewards] == [[given[path.rpartition(".")[2]]] for path in paths]  # type: ignore[operator]
