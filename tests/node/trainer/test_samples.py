"""What people read of a step costs no step: whatever fails is unknown or left out, and every process gathers."""

from __future__ import annotations

import itertools
import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_orch.checkpoint.records import samples
from grpo_orch.checkpoint.records.samples import Group, Head, Message, Sample
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.tasks.storing.sample_writer import WAITING_MAX, Build, SampleWriter
from grpo_orch.tasks.trl.parts.samples import MEASURES, KeepsSamples
from tests.budget import HANG_S

END = 9
IDS = [[5, 6, END], [5, 6, 7]]
_names = itertools.count()


def new_store() -> Store:
    return Store(f"memory://samples-{next(_names)}")


class Scores:
    """What TRL's trainer is to KeepsSamples, with two completions of one process: a stand-in, held to the real
    one by test_trl_contract and the tests with real runs."""

    def __init__(self) -> None:
        self.made: list[list[int]] = IDS
        self.output: dict[str, Any] = {
            "completion_ids": torch.zeros(2, 3),
            "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
            "old_per_token_logps": torch.zeros(2, 3),
            "sampling_per_token_logps": torch.tensor([[0.0, 0.0, 0.3], [0.5, 0.0, 9.0]]),
        }
        self.gathered: list[torch.Tensor] = []
        self.model = SimpleNamespace(training=True)
        self.accelerator = SimpleNamespace(device="cpu", gather=self._gather)
        self._fleet = SimpleNamespace(trained_on=[])
        self.eos_token_ids, self._tokenizer = [END], SimpleNamespace(pad_token_id=0)
        self._timeline, self.state, self.num_generations = 0, SimpleNamespace(global_step=3), 2
        self.reward_func_names, self.reward_weights = ["f"], torch.tensor([2.0])
        self._logs: dict[str, Any] = {"prompt": ["p", "p"], "completion": ["a", "b"]}
        self._logs |= {"advantages": [0.5, math.nan]}
        self._rewarded = torch.tensor([[1.0], [math.nan]])

    def _gather(self, one: torch.Tensor) -> torch.Tensor:
        self.gathered.append(one)
        return one

    def _generate(self, _: list[Any]) -> tuple[Any, ...]:
        return [], self.made, None

    def _generate_and_score_completions(self, inputs: list[Any]) -> dict[str, Any]:
        self._generate(inputs)
        return self.output


class Trainer(KeepsSamples, Scores):
    pass


def kept(trainer: Trainer) -> list[Sample]:
    """What is stored of one step."""
    store = new_store()
    trainer.samples = SampleWriter(store, (0, 1, 1))
    assert trainer._generate_and_score_completions([]) is trainer.output
    trainer.samples.finish(HANG_S)
    (key,) = samples.stored_calls(store)[PolicyVersion(0, 3)]
    head, groups = samples.read_samples(store, key)
    (group,) = groups
    assert (head.step, head.functions, head.weights) == (
        4,
        trainer.reward_func_names,
        trainer.reward_weights.tolist(),
    )
    return group.samples


def test_what_is_measured() -> None:
    first, second = kept(Trainer())
    assert (first.tokens, first.cut, first.reward, first.advantage) == (3, False, 2.0, 0.5)
    assert (second.tokens, second.cut, second.reward, second.advantage) == (3, True, None, None)
    assert [first.mismatch_max, second.mismatch_max] == pytest.approx([0.3, 0.5])
    assert [first.mismatch_mean, second.mismatch_mean] == pytest.approx([0.1, 0.25])


def test_functions_of_one_name_keep_their_rewards() -> None:
    """As two modules' `correct`, or what one decorator made of several."""
    trainer = Trainer()
    trainer.reward_func_names, trainer.reward_weights = ["f", "f"], torch.tensor([2.0, 1.0])
    trainer._rewarded = torch.tensor([[1.0, 0.0], [0.0, math.nan]])
    assert [(one.rewards, one.reward) for one in kept(trainer)] == [([1.0, 0.0], 2.0), ([0.0, None], 0.0)]


def test_messages_of_any_form_are_told() -> None:
    trainer = Trainer()
    image = [{"type": "image", "text": None}, {"type": "text", "text": "what is it?"}, "a part"]
    trainer._logs["completion"] = [
        [{"role": "user", "content": image}, {"role": None, "content": None}],
        [{"role": "tool", "content": 5}],
    ]
    first, second = kept(trainer)
    assert [(one.role, one.text) for one in first.completion] == [
        ("user", "[image]\nwhat is it?\na part"),
        ("", ""),
    ]
    assert [(one.role, one.text) for one in second.completion] == [("tool", "5")]


@pytest.mark.parametrize("fault", ["nothing was made", "another number", "other shapes", "an attribute is gone"])
def test_a_process_that_cannot_measure_gathers_as_much_as_the_others(fault: str) -> None:
    trainer = Trainer()
    if fault == "nothing was made":
        trainer.made = [[5, END], []]
    if fault == "another number":
        trainer.made = IDS[:1]
    if fault == "other shapes":
        trainer.output["old_per_token_logps"] = torch.zeros(2, 7)
    if fault == "an attribute is gone":
        del trainer.eos_token_ids
    told = kept(trainer)
    (gathered,) = trainer.gathered
    assert gathered.shape == (2, MEASURES)
    assert gathered.dtype == torch.float32
    assert gathered.isnan().all()
    assert [(one.tokens, one.cut, one.mismatch_max) for one in told] == [(None, None, None)] * 2
    assert told[0].reward == 2.0


def test_a_step_goes_on_when_nothing_can_be_offered() -> None:
    trainer = Trainer()
    trainer.samples = SampleWriter(new_store(), (0, 1, 1))
    del trainer._logs["advantages"]
    assert trainer._generate_and_score_completions([]) is trainer.output
    assert len(trainer.gathered) == 1


def built(step: int) -> tuple[Head, list[Group]]:
    return Head(samples.SCHEMA, f"0-{step}", step + 1, 0, 1.0, [], [], 1), [Group([Message("p")], [])]


def test_the_writer_leaves_out_what_fails_and_what_comes_while_it_is_behind() -> None:
    store, held, begun = new_store(), threading.Event(), threading.Event()
    writer = SampleWriter(store, (0, 1, 1))

    def slow() -> tuple[Head, list[Group]]:
        begun.set()
        assert held.wait(HANG_S)
        return built(0)

    def fails() -> tuple[Head, list[Group]]:
        raise MemoryError

    writer.offer(slow)
    assert begun.wait(HANG_S)
    waiting: list[Build] = [fails, *(lambda step=step: built(step) for step in range(1, WAITING_MAX + 3))]
    for one in waiting:
        writer.offer(one)  # returns at once, although nobody takes them
    held.set()
    writer.finish(HANG_S)
    assert [version.step for version in samples.stored_calls(store)] == [*range(WAITING_MAX)]


def test_a_writer_that_hangs_does_not_hold_the_trainers_end_up() -> None:
    held = threading.Event()
    writer = SampleWriter(new_store(), (0, 1, 1))
    writer.offer(lambda: built(int(held.wait(HANG_S))))
    writer.finish(0.01)
    assert not held.is_set()
    held.set()
    writer.finish(HANG_S)
