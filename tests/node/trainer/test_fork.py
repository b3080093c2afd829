"""A timeline that begins at a checkpoint of another one, by TRL's own trainer: its learning rate, its prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from grpo_orch.checkpoint.records.documents import write_fork
from grpo_orch.policies.model.timelines import Fork, Skipped
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.tasks.trl.skipped_prompts import Walk, replacements
from tests.node.trainer.rig import GRPO, Rig, open_rig

STEPS = GRPO["max_steps"]
RATE = GRPO["learning_rate"]
START = PolicyVersion(0, 4)


class Rates(TrainerCallback):
    """The learning rates that the optimizer really takes its steps with, by step."""

    def __init__(self) -> None:
        self.of_step: dict[int, float] = {}

    def on_pre_optimizer_step(self, _args: Any, state: Any, _control: Any, *, optimizer: Any, **_: Any) -> None:
        (self.of_step[state.global_step + 1],) = {group["lr"] for group in optimizer.param_groups}


@contextmanager
def begun(folder: Path, tiny: Path, **spec: Any) -> Iterator[tuple[Rig, dict[int, float]]]:
    """A run that has trained its first timeline, with completions of no model; and the rates of its steps."""
    with open_rig(folder, tiny, **spec) as rig:
        rig.gateway.samples_with_model = False
        rig.train(rates := Rates())
        yield rig, rates.of_step


def on_from(rig: Rig, start: PolicyVersion, timeline: int) -> dict[int, float]:
    rig.train(rates := Rates(), timeline=timeline, start=start)
    return rates.of_step


def test_the_learning_rate_of_every_later_step_is_scaled_once(tiny: Path, tmp_path: Path) -> None:
    with begun(tmp_path, tiny, grpo={"lr_scheduler_type": "linear", "warmup_steps": 6}) as (rig, before):
        write_fork(rig.store, Fork(1, str(START), {"learning_rate": RATE / 4}))
        after = on_from(rig, START, 1)
        assert after == pytest.approx({step: before[step] / 4 for step in range(START.step + 1, STEPS + 1)})
        again = on_from(rig, PolicyVersion(1, 6), 1)
        assert again == {step: after[step] for step in (7, 8)}
        write_fork(rig.store, Fork(2, "1-6", {"beta": 0.5, "learning_rate": RATE / 4}))
        assert on_from(rig, PolicyVersion(1, 6), 2) == again, "another setting changed"


# Two prompts a step of six, so three steps are an epoch.
@pytest.fixture(scope="module")
def plain(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with begun(tmp_path_factory.mktemp("plain"), tiny, grpo={"save_steps": 4}) as (rig, _):
        yield rig


def test_the_prompts_of_skipped_steps_are_not_seen_again(plain: Rig) -> None:
    # The two of step 5 (of policy 0-4), and on the next timeline one of theirs again, a replacement among them.
    write_fork(plain.store, Fork(1, str(START), {}, (Skipped(0, 5, 5),), from_step=STEPS))
    on_from(plain, START, 1)
    seen = plain.gateway.prompts
    gone = seen["0-4"]
    assert len(gone) == 2
    for step in range(4, STEPS):
        assert seen[f"1-{step}"] - seen[f"0-{step}"] <= set().union(*seen.values()) - gone
        assert not seen[f"1-{step}"] & gone
        assert seen[f"0-{step}"] - gone <= seen[f"1-{step}"], "all others where they were"
    assert any(seen[f"0-{step}"] & gone for step in range(5, STEPS)), "they would have come again"


def test_skipped_prompts_come_back_once_the_probation_is_over(plain: Rig) -> None:
    # Back to 4 from 5: on probation until step 6, within the second epoch, of which the third step is 6.
    write_fork(plain.store, Fork(2, str(START), {}, (Skipped(0, 5, 5),), from_step=5))
    on_from(plain, START, 2)
    seen = plain.gateway.prompts
    gone = seen["0-4"]
    assert not (seen["2-4"] | seen["2-5"]) & gone
    assert (seen["2-6"], seen["2-7"]) == (seen["0-6"], seen["0-7"]), "steps 7 and 8"
    assert (seen["2-6"] | seen["2-7"]) & gone, "two prompts of six came back in time"


def test_smaller_groups_see_the_same_prompts(plain: Rig) -> None:
    """As after running out of memory."""
    write_fork(plain.store, Fork(3, str(START), {"num_generations": 2, "per_device_train_batch_size": 4}))
    on_from(plain, START, 3)
    seen, asked = plain.gateway.prompts, [policy for policy, _ in plain.gateway.asked]
    for step in range(4, STEPS):
        assert seen[f"3-{step}"] == seen[f"0-{step}"]
        assert (asked.count(f"0-{step}"), asked.count(f"3-{step}")) == (8, 4)


def test_window_divided_by_fork_is_remade_with_other_prompts(tiny: Path, tmp_path: Path) -> None:
    """Four prompts a window of two steps, each used twice; the start lies in the middle of one."""
    window = {"steps_per_generation": 2, "num_iterations": 2, "save_steps": 3}
    with begun(tmp_path, tiny, dataset="prompts.jsonl", grpo=window) as (rig, _):
        write_fork(rig.store, Fork(1, "0-3", {}, (Skipped(0, 4, 4),), from_step=STEPS))
        on_from(rig, PolicyVersion(0, 3), 1)
    seen = rig.gateway.prompts
    assert set(seen) == {"0-0", "0-4", "1-3", "1-4"}, "the rest of the window, and the next one in time"
    assert len(seen["0-0"]) == len(seen["1-3"]) == 4
    assert not seen["0-0"] & (seen["1-3"] | seen["1-4"])
    assert seen["1-4"] == seen["0-4"]


def forwards(_epoch: int) -> list[int]:
    return list(range(10))


def shifted(epoch: int) -> list[int]:
    return [(place + 3 * epoch) % 10 for place in range(10)]


@pytest.mark.parametrize(
    ("walk", "first", "last", "prompts"),
    [
        # Ten prompts, two a step: five steps are an epoch.
        (Walk(10, 2, 1, 1, forwards), 1, 1, {0, 1}),
        (Walk(10, 2, 1, 1, forwards), 2, 3, {2, 3, 4, 5}),
        (Walk(10, 2, 1, 1, forwards), 5, 6, {8, 9, 0, 1}),
        (Walk(10, 2, 1, 1, shifted), 5, 6, {8, 9, 3, 4}),
        (Walk(10, 2, 1, 1, shifted), 1, 10, set(range(10))),
        # Three a window: the tenth of an epoch is left out.
        (Walk(10, 3, 1, 1, shifted), 3, 4, {6, 7, 8, 3, 4, 5}),
        # A window of four batches that are steps: all of it, whichever of its steps.
        (Walk(10, 5, 4, 1, forwards), 2, 3, {0, 1, 2, 3, 4}),
        (Walk(10, 5, 4, 1, forwards), 4, 5, set(range(10))),
        (Walk(10, 5, 4, 1, shifted), 9, 9, {3, 4, 5, 6, 7}),
        # Four batches a step, two windows to each.
        (Walk(10, 1, 2, 4, forwards), 2, 2, {2, 3}),
        # Three batches a step of ten in an epoch: the fourth step has one.
        (Walk(10, 1, 1, 3, forwards), 4, 4, {9}),
        (Walk(10, 1, 1, 3, shifted), 4, 5, {9, 3, 4, 5}),
        # Windows of two batches, three a step: the middle one of them belongs to both.
        (Walk(10, 1, 2, 3, forwards), 1, 1, {0, 1}),
        (Walk(10, 1, 2, 3, forwards), 2, 2, {1, 2}),
        (Walk(3, 4, 1, 1, forwards), 1, 5, set()),
    ],
)
def test_the_prompts_of_steps(walk: Walk, first: int, last: int, prompts: set[int]) -> None:
    assert {prompt for _, prompt in walk.windows_of(first, last)} == prompts


def replaced(forks: Sequence[Fork], timeline: int) -> list[int]:
    """What stands where, of ten prompts, of which a step takes one."""
    found = replacements(forks, timeline, lambda _: Walk(10, 1, 1, 1, forwards))
    return [found.others.get(prompt, prompt) for prompt in range(10)]


FIRST = Fork(1, "0-2", {}, (Skipped(0, 3, 4),), from_step=9)  # of prompts 2 and 3


def test_replacements() -> None:
    unchanged = list(range(10))
    assert replaced((), 0) == replaced((FIRST,), 0) == replaced((Fork(1, "0-2"),), 1) == unchanged
    once = replaced((FIRST,), 1)
    assert once == [0, 1, 0, 6, 4, 5, 6, 7, 8, 9]
    # Step 4 of the next timeline saw what stood in the place of prompt 3; step 9 the ninth prompt itself.
    second = Fork(2, "1-3", {}, (*FIRST.skipped, Skipped(1, 4, 4), Skipped(1, 9, 9)))
    twice = replaced((FIRST, second), 2)
    assert not {2, 3, once[3], 8} & set(twice)
    assert [place for place in unchanged if twice[place] != place] == [2, 3, 6, 8]
    assert len({twice[place] for place in (2, 3, 6, 8)}) == 4, "each by another one"


def test_later_timeline_skips_what_earlier_saw_after_probation() -> None:
    once = Fork(1, "0-2", {}, (Skipped(0, 3, 4),), from_step=4)
    walk = Walk(10, 1, 1, 1, forwards)
    assert once.probation_until_step == 6
    found = replacements((once,), 1, lambda _: walk)
    assert found.seen(walk, 3, 4) == {0, 6}
    assert found.seen(walk, 13, 14) == {2, 3}, "themselves again"
    late = Fork(2, "1-6", {}, (Skipped(1, 13, 14),))
    assert set(replacements((once, late), 2, lambda _: walk).others) == {2, 3}


@pytest.mark.parametrize(
    ("walk", "starts"),
    [
        (Walk(10, 2, 1, 1, forwards), [(0, 0, 1), (0, 4, 5), (1, 0, 6), (2, 3, 14)]),
        (Walk(10, 5, 4, 1, forwards), [(0, 0, 1), (0, 1, 5), (1, 0, 9)]),
        (Walk(10, 1, 2, 4, forwards), [(0, 0, 1), (0, 1, 1), (0, 2, 2), (1, 0, 6)]),
        (Walk(10, 1, 2, 3, forwards), [(0, 1, 1), (0, 2, 2)]),
    ],
)
def test_the_step_that_a_window_begins_with(walk: Walk, starts: list[tuple[int, int, int]]) -> None:
    assert [(epoch, window, walk.first_step_of(epoch, window)) for epoch, window, _ in starts] == starts


@pytest.mark.parametrize(("last", "most"), [(5, False), (6, True)])
def test_most_of_a_dataset_is_not_replaced(last: int, most: bool, capsys: pytest.CaptureFixture[str]) -> None:
    found = replaced((Fork(1, None, {}, (Skipped(0, 1, last),)),), 1)
    assert (found == list(range(10))) == most
    assert ("prompts_not_replaced" in capsys.readouterr().out) == most
