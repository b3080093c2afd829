"""Which calls are begun, and under which numbers, by a trainer of no model."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_orch.checkpoint.records.rollouts import Rollout
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.tasks.completions.rollout_source import Call
from grpo_orch.tasks.trl.fleet_client import FleetClient
from grpo_orch.tasks.trl.parts.checkpointing import Place
from grpo_orch.tasks.trl.skipped_prompts import ReplacedPrompts, walk_of
from grpo_orch.tasks.trl.windows_ahead import WindowsAhead


class Source:
    """Notes what is begun, and what is asked for as `(step, number)`."""

    def __init__(self) -> None:
        self.begun: list[Call] = []
        self.asked: list[tuple[int, int]] = []

    def begin(self, calls: Iterable[Call], _policies: object) -> None:
        self.begun += calls

    def complete(self, at: PolicyVersion, *_: object, number: int, **__: object) -> Rollout:
        self.asked.append((at.step, number))
        return Rollout(1, str(at), str(at), number, "", [])


def trainer_at(step: int, batch: int, **args: Any) -> SimpleNamespace:
    """A trainer of 12 prompts, two to a window."""
    config = {"shuffle_dataset": False, "seed": 1, "generation_batch_size": 4, "num_generations": 2, **args}
    return SimpleNamespace(
        walk=walk_of(SimpleNamespace(num_iterations=1, **config), 12),
        train_dataset=[{"prompt": number} for number in range(12)],
        model=SimpleNamespace(training=True),
        state=SimpleNamespace(global_step=step, max_steps=100),
        eos_token_ids=[0],
        place=Place(batch, None),
        replaced=ReplacedPrompts(),
        tokenized=lambda prompts: [[prompt] for prompt in prompts],
    )


@pytest.mark.parametrize("staleness", [0, 1])
def test_timeline_begun_within_a_window_has_unique_calls(
    staleness: int,
) -> None:
    """Two batches a window and three a step: the first step ends in the middle of window 1."""
    trainer = trainer_at(1, 3, steps_per_generation=2, gradient_accumulation_steps=3)
    source = Source()
    client = FleetClient(source)  # type: ignore[arg-type]  # all that is asked of it
    client.attach(trainer, None, 1)
    client.windows = WindowsAhead(trainer, 1, 1, staleness)
    for batch in (3, 4):  # windows 1 and 2 of step 2, each with a second turn, of tools
        trainer.place = Place(batch, None)
        client.generate([], n=2)
        client.generate([], n=1)
    assert [call.prompts for call in source.begun[:2]] == [[[2], [3]], [[4], [5]]]
    begun = [(call.at.step, call.number) for call in source.begun]
    assert len({*begun}) == len(begun) == (2 if staleness == 0 else 4)
    assert len({*source.asked}) == 4
    assert {*begun[:2]} == {source.asked[0], source.asked[2]}
