"""What people read of a step costs no step: whatever fails is unknown or left out, and every process gathers."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_orch.checkpoint.records import samples
from grpo_orch.checkpoint.records.samples import WAITING_MAX, Build, Group, Head, Message, Sample, SampleWriter
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.tasks.trl.parts.samples import MEASURES, Samples
from tests.budget import HANG_S

END = 9
IDS = [[5, 6, END], [5, 6, 7]]
_names = itertools.count()


def new_store() -> Store:
    return Store(f"memory://samples-{next(_names)}")


class Call:
    """A training call of one process with two completions, and the part of the trainer that keeps its samples."""

    def __init__(self, functions: Sequence[str] = ("f",), weights: Sequence[float] = (2.0,)) -> None:
        self.made: list[list[int]] = IDS
        self.output: dict[str, Any] = {
            "completion_ids": torch.zeros(2, 3),
            "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
            "old_per_token_logps": torch.zeros(2, 3),
            "sampling_per_token_logps": torch.tensor([[0.0, 0.0, 0.3], [0.5, 0.0, 9.0]]),
        }
        self.logs: dict[str, Any] = {"prompt": ["p", "p"], "completion": ["a", "b"]}
        self.logs |= {"advantages": [0.5, math.nan]}
        self.rewards = torch.tensor([[1.0], [math.nan]])
        self.gathered: list[torch.Tensor] = []
        accelerator = SimpleNamespace(device="cpu", gather=self._gather)
        self.functions, self.weights = list(functions), list(weights)
        self.part = Samples(accelerator, {END, 0}, functions, weights, group=2, timeline=0)

    def _gather(self, one: torch.Tensor) -> torch.Tensor:
        self.gathered.append(one)
        return one

    def keep(self) -> None:
        self.part.note_completions(self.made, None)
        self.part.note_rewards(self.rewards)
        self.part.keep(3, self.output, self.logs, [])


def kept(call: Call) -> list[Sample]:
    """What is stored of a call."""
    store = new_store()
    call.part.writer = SampleWriter(store, (0, 1, 1))
    call.keep()
    call.part.writer.finish(HANG_S)
    (key,) = samples.stored_calls(store)[PolicyVersion(0, 3)]
    head, groups = samples.read_samples(store, key)
    (group,) = groups
    assert (head.step, head.functions, head.weights) == (4, call.functions, call.weights)
    return group.samples


def test_what_is_measured() -> None:
    first, second = kept(Call())
    assert (first.tokens, first.cut, first.reward, first.advantage) == (3, False, 2.0, 0.5)
    assert (second.tokens, second.cut, second.reward, second.advantage) == (3, True, None, None)
    assert [first.mismatch_max, second.mismatch_max] == pytest.approx([0.3, 0.5])
    assert [first.mismatch_mean, second.mismatch_mean] == pytest.approx([0.1, 0.25])


def test_functions_of_one_name_keep_their_rewards() -> None:
    """As two modules' `correct`, or what one decorator made of several."""
    call = Call(["f", "f"], [2.0, 1.0])
    call.rewards = torch.tensor([[1.0, 0.0], [0.0, math.nan]])
    assert [(one.rewards, one.reward) for one in kept(call)] == [([1.0, 0.0], 2.0), ([0.0, None], 0.0)]


def test_messages_of_any_form_are_told() -> None:
    call = Call()
    image = [{"type": "image", "text": None}, {"type": "text", "text": "what is it?"}, "a part"]
    call.logs["completion"] = [
        [{"role": "user", "content": image}, {"role": None, "content": None}],
        [{"role": "tool", "content": 5}],
    ]
    first, second = kept(call)
    assert [(one.role, one.text) for one in first.completion] == [
        ("user", "[image]\nwhat is it?\na part"),
        ("", ""),
    ]
    assert [(one.role, one.text) for one in second.completion] == [("tool", "5")]


@pytest.mark.parametrize("fault", ["nothing was made", "another number", "other shapes", "a field is gone"])
def test_process_without_a_measurement_still_gathers(fault: str) -> None:
    call = Call()
    if fault == "nothing was made":
        call.made = [[5, END], []]
    if fault == "another number":
        call.made = IDS[:1]
    if fault == "other shapes":
        call.output["old_per_token_logps"] = torch.zeros(2, 7)
    if fault == "a field is gone":
        del call.output["completion_mask"]
    told = kept(call)
    (gathered,) = call.gathered
    assert gathered.shape == (2, MEASURES)
    assert gathered.dtype == torch.float32
    assert gathered.isnan().all()
    assert [(one.tokens, one.cut, one.mismatch_max) for one in told] == [(None, None, None)] * 2
    assert told[0].reward == 2.0


def test_a_step_goes_on_when_nothing_can_be_offered() -> None:
    call = Call()
    call.part.writer = SampleWriter(new_store(), (0, 1, 1))
    del call.logs["advantages"]
    call.keep()
    assert len(call.gathered) == 1


def built(step: int) -> tuple[Head, list[Group]]:
    return Head(samples.SCHEMA, f"0-{step}", step + 1, 0, 1.0, [], [], 1), [Group([Message("p")], [])]


def test_sample_writer_drops_failed_and_late_samples() -> None:
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
