"""Completions of several turns: TRL's tools and environments over the fleet, through deaths and in many ranks."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint.store import layout
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.tasks.trainer.turns import check_turns
from grpo_orch.tasks.trainer.user_objects import BadSpec
from tests.node.trainer import rig_tools
from tests.node.trainer.rig import Rig, open_rig
from tests.node.trainer.test_resume import kill_after_completion

STEPS = 3
GROUP = 8  # completions a step
GRPO = {"max_steps": STEPS, "save_steps": 100, "max_completion_length": 24, "max_tool_calling_iterations": 3}
LADDER = {"environment_factory": "rig_tools.Ladder"}


def of_turns(**spec: Any) -> dict[str, Any]:
    turns = {"grpo": GRPO, "dataset": "chats.jsonl", "reward": "rig_tools.share_of_calls", "trainer": LADDER}
    return {**turns, **spec}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, chatty: Path) -> Iterator[Rig]:
    with open_rig(tmp_path_factory.mktemp("calm"), chatty, **of_turns()) as rig:
        assert rig.wait(rig.start_trainer()) == 0
        yield rig


def test_environment_is_trained_turn_by_turn(calm: Rig) -> None:
    rows = calm.trained()
    assert len(rows) == STEPS
    asked = Counter(policy for policy, _ in calm.gateway.asked)
    assert all(count > GROUP for count in asked.values()), "no completion has taken a second turn"
    assert len(set(calm.gateway.asked)) == len(calm.gateway.asked), "two turns were drawn from one seed"
    for row in rows:
        assert row["tools/call_frequency"] > 0
        assert row["tools/failure_frequency"] == 0
        assert row["rewards/Ladder/mean"] > 0
        assert row["sampling/sampling_logp_difference/max"] < 1e-4  # what tools said is in no sum


def test_trainer_killed_between_turns_ends_in_the_same_weights(calm: Rig, chatty: Path, tmp_path: Path) -> None:
    first = sum(policy == "0-0" for policy, _ in calm.gateway.asked)
    last_words = first + GROUP + 1  # within the second turn of the second step
    with open_rig(tmp_path, chatty, **of_turns()) as rig:
        kill_after_completion(rig, 1, last_words)
        assert rig.wait(rig.start_trainer(attempt=2), attempt=2) == 0
        asked = Counter(rig.gateway.asked)
        assert asked.keys() == set(calm.gateway.asked)
        assert rig.digests() == calm.digests()
        twice = {one for one, times in asked.items() if times == 2}
        assert {policy for policy, _ in twice} == {"0-1"}
        assert twice.isdisjoint(rig.gateway.asked[: first + GROUP]), "more than the turn in the air is made again"
        assert "rollout_of_other_requests" not in rig.log(2).read_text()


def test_first_turns_with_tools_are_requested_ahead(chatty: Path, tmp_path: Path) -> None:
    """And the later ones from the same policy: none is drawn from the seed of another, and a killed trainer asks
    for the same."""
    parts = {
        "per_device_train_batch_size": GROUP // 2,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 1,
    }
    tools = {"tools": ("rig_tools.climb",)}
    spec = of_turns(grpo={**GRPO, **parts, "save_steps": 1}, trainer=tools, max_staleness=1)
    with open_rig(tmp_path / "calm", chatty, **spec) as calm:
        assert calm.wait(calm.start_trainer()) == 0
        asked = calm.gateway.asked
        assert len({seed for _, seed in asked}) == len(asked)
        assert calm.gateway.batches[0] == 2 * GROUP, "the windows of the two steps that have the first policy"
        of_steps = Counter(policy.partition("@")[0] for policy, _ in asked)
        assert of_steps["0-0"] > 2 * GROUP, "no completion has taken a second turn"
        assert list(of_steps) == ["0-0", "0-1"]
    with open_rig(tmp_path / "killed", chatty, **spec) as rig:
        kill_after_completion(rig, 1, len(asked) * 2 // 3)
        assert rig.wait(rig.start_trainer(attempt=2), attempt=2) == 0
        assert set(rig.gateway.asked) == set(asked)
        assert rig.digests() == calm.digests()


def test_what_an_environment_says_anew_is_answered_anew(chatty: Path, tmp_path: Path) -> None:
    slippery = of_turns(trainer={"environment_factory": "rig_tools.Slippery"}, replicas=0)
    with open_rig(tmp_path, chatty, **slippery) as rig:
        rig.train()
        rig.assemble(attempt=2).train()  # whose completions are there as long as its checkpoint is not
        again = {layout.call_of(key) for key in stored(rig) if layout.author_of(key)[2] == 2}
    start = PolicyVersion(0, 0)
    assert (start, 0) not in again, "the first turn has nothing new in its prompts"
    assert {(start, 1), (PolicyVersion(0, 1), 0)} <= again


def test_several_processes_ask_for_what_one_asks_for(calm: Rig, chatty: Path, tmp_path: Path) -> None:
    ranks = of_turns(grpo={**GRPO, "per_device_train_batch_size": GROUP // 2}, accelerators="H100:2")
    with open_rig(tmp_path, chatty, **ranks) as rig:
        assert rig.wait(rig.start_ranks()) == exit_codes.OK
        first = rig.gateway.prompts["0-0"]
    assert first == calm.gateway.prompts["0-0"]
    assert len(rig.gateway.prompts) == STEPS
    rows = rig.trained()
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 1e-4


@pytest.mark.parametrize(
    "trainer", [{"tools": ("rig_tools.climb",)}, {"rollout_func": "rig_tools.two_halves"}], ids=str
)
def test_tools_alone_and_a_function_of_ones_own(trainer: dict[str, Any], chatty: Path, tmp_path: Path) -> None:
    with open_rig(tmp_path, chatty, **of_turns(trainer=trainer, replicas=0)) as rig:
        made = rig.assemble()
        made.train()
        turns = {layout.call_of(key) for key in stored(rig)}
    rows = [row for row in made.state.log_history if "reward" in row]
    assert len(rows) == STEPS
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 1e-4
    assert {(PolicyVersion(0, step), call) for step in range(STEPS) for call in range(2)} <= turns


def unhinted() -> None:
    """Climb."""


unhinted.__annotations__["step"] = "Elsewhere"  # as of an import for type checkers alone
CHAT: dict[str, Any] = {"prompt": [{"role": "user", "content": "1"}], "height": 1}


@pytest.mark.parametrize(
    ("turns", "row", "says"),
    [
        ({"tools": [rig_tools.undescribed]}, CHAT, "trainer.tools: "),
        ({"tools": [functools.partial(rig_tools.climb)]}, CHAT, "trainer.tools: functools.partial("),
        (
            {"tools": [unhinted]},
            CHAT,
            "cannot be described to a model: NameError: name 'Elsewhere' is not defined",
        ),
        ({"tools": [rig_tools.climb]}, {"prompt": "1"}, "trainer.dataset: its first prompt is a text"),
        ({"environment_factory": rig_tools.Ladder}, {"prompt": CHAT["prompt"]}, "'height'"),
        (
            {"environment_factory": {"ladder": rig_tools.Ladder}},
            CHAT,
            "a column `environment` with one of 'ladder'",
        ),
    ],
)
def test_what_trl_could_not_work_with_is_named(turns: dict[str, Any], row: dict[str, Any], says: str) -> None:
    with pytest.raises(BadSpec) as caught:
        check_turns(turns, {"trainer.dataset": row}, 2)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_each_completion_has_its_environment_begun_with_the_row() -> None:
    factories = {"ladder": rig_tools.Ladder, "other": rig_tools.Slippery}
    row = {**CHAT, "environment": "ladder"}
    made = check_turns({"environment_factory": factories}, {"trainer.dataset": row}, 4)
    assert made is not None
    assert len({id(one) for one in made["trainer.dataset"]}) == 4
    assert [(type(one), one.height) for one in made["trainer.dataset"]] == [(rig_tools.Ladder, 1)] * 4


def stored(rig: Rig) -> list[str]:
    return [entry.key for entry in rig.store.entries("rollouts")]
