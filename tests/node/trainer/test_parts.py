"""The trainer's parts by themselves, in one process and without TRL."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_orch.tasks.machine.leaving import LeaveNow
from grpo_orch.tasks.storing.step_costs import StepCosts
from grpo_orch.tasks.trl.fleet_client import NO_PROMPT, Prompt
from grpo_orch.tasks.trl.parts import tool_turns
from grpo_orch.tasks.trl.parts.checkpointing import MemoryState, Place, Saving, why_not_resumable
from grpo_orch.tasks.trl.parts.leave_in_time import Departure
from grpo_orch.tasks.trl.parts.refused import RefusedCompletions
from grpo_orch.tasks.trl.parts.tool_turns import CommonTurns

END = 9
ACCELERATOR = SimpleNamespace(device="cpu", gather=lambda value: value, num_processes=1, is_main_process=True)


def test_refused_completion_leaves_loss_rewards_and_metrics() -> None:
    part, metrics = RefusedCompletions(ACCELERATOR, END, {END}), defaultdict[str, list[float]](list)
    for name in ("mean", "min", "max"):
        metrics[f"completions/{name}_length"], metrics[f"completions/{name}_terminated_length"] = [0.0], [0.0]
    metrics["completions/clipped_ratio"], metrics["frac_reward_zero_std"] = [0.0], [0.25]
    completions = [[5, 6, END], [END], [5, 6, 7, 8]]
    prompts, mask = part.leave_out([[1], [2, 2], [3]], completions, None, [[0.1] * 3, [None], [0.1] * 4], metrics)
    assert (prompts, mask) == ([[1], [END], [3]], [[1, 1, 1], [0], [1, 1, 1, 1]])
    assert part.count == 1
    assert metrics["completions/mean_length"] == [3.5]
    assert metrics["completions/clipped_ratio"] == [0.5]
    rewards = part.without_rewards(torch.ones(3, 1)).flatten().tolist()
    assert math.isnan(rewards.pop(1))
    assert rewards == [1.0, 1.0]
    part.correct_scores(metrics)
    assert metrics["frac_reward_zero_std"] == [0.25 * 3 / 2]
    part.leave_out([[1]], [[5, END]], None, [[0.1, 0.1]], metrics)
    assert part.count == 0


@pytest.mark.parametrize("masked", [True, False])
def test_metrics_of_a_batch_without_tokens_are_removed(masked: bool) -> None:
    part, metrics = RefusedCompletions(ACCELERATOR, END, {END}), {"kl": [1.0]}
    inputs = {"completion_mask": torch.ones(1, 2), "tool_mask": torch.full((1, 2), 1 - int(masked))}
    with part.without_empty_loss(inputs, metrics):
        metrics["kl"].append(0.0)
        metrics["entropy"] = [0.0]
    assert metrics == ({"kl": [1.0]} if masked else {"kl": [1.0, 0.0], "entropy": [0.0]})


def test_process_takes_turns_until_all_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has two prompts in the second turn and one in the third."""
    others, taken = iter([2, 1, 0]), list[list[Prompt]]()
    monkeypatch.setattr(tool_turns, "gather_object", lambda own: [*own, next(others)])
    part = CommonTurns(SimpleNamespace(num_processes=2))

    def generate(prompts: list[Prompt]) -> Any:
        taken.append(prompts)
        return [[5]] * len(prompts), [[0.1]] * len(prompts)

    def loop() -> Any:
        return part.generate([[1]], generate)

    assert part.generate([[1], [2]], generate) == ([[5], [5]], [[0.1], [0.1]])
    assert part.loop(loop, generate) == ([[5]], [[0.1]])
    assert taken == [[[1], [2]], [[1], NO_PROMPT], [NO_PROMPT]]


ARGS = SimpleNamespace(
    learning_rate=0.5, per_device_train_batch_size=4, gradient_accumulation_steps=2, world_size=1, process_index=0
)


@pytest.mark.parametrize(
    ("batch", "is_sharded", "why"),
    [
        (2, False, ""),
        (8, False, "expected 8 completions a step .* as before, not 32"),
        (2, True, "DeepSpeed and FSDP read shards only with the same number of processes; start 1"),
    ],
)
def test_checkpoint_of_another_number_of_processes(batch: int, is_sharded: bool, why: str, tmp_path: Path) -> None:
    walk: Any = SimpleNamespace()
    MemoryState(ACCELERATOR, ARGS, walk, 0).save(tmp_path, Place(0, None), None)
    changed = SimpleNamespace(**{**vars(ARGS), "world_size": 2, "per_device_train_batch_size": batch})
    trainer = SimpleNamespace(args=changed, is_fsdp_enabled=is_sharded, is_deepspeed_enabled=False)
    found = why_not_resumable(trainer, tmp_path)
    assert re.fullmatch(
        f"the checkpoint is of 1 processes, and 2 would resume from it: {why}" if why else "", found
    )


@pytest.mark.parametrize("timeline", [0, 1])
def test_place_is_loaded_or_begins_with_a_timeline(timeline: int, tmp_path: Path) -> None:
    walk: Any = SimpleNamespace(batches_before=lambda steps: 2 * steps)
    place = Place(5, [{"completion_ids": torch.tensor([1, 2])}])
    MemoryState(ACCELERATOR, ARGS, walk, 0).save(tmp_path, place, None)
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=0.5)
    changed = SimpleNamespace(**{**vars(ARGS), "learning_rate": 0.25 if timeline else 0.5})
    loaded = MemoryState(ACCELERATOR, changed, walk, timeline).load(
        tmp_path, 3, optimizer, SimpleNamespace(), None
    )
    if timeline:
        assert loaded == Place(6, None)
    else:
        assert loaded.batches == place.batches
        assert loaded.buffered is not None
        assert loaded.buffered[0]["completion_ids"].tolist() == [1, 2]
    assert optimizer.param_groups[0]["lr"] == changed.learning_rate


def test_departure_returns_to_the_end_of_the_last_step() -> None:
    saving = Saving(StepCosts())
    part = Departure(ACCELERATOR, StepCosts(), saving)
    part.check(in_step=True)
    assert part.begin(3) is None
    leaving: Any = SimpleNamespace(
        is_due=lambda *, in_step: in_step, is_worth_storing=lambda: True, step_ended=lambda _: None
    )
    checkpoints: Any = SimpleNamespace(sealed_step=2)
    saving.attach(checkpoints, leaving)
    part.note_step(Place(6, None))
    drawn = torch.rand(1)
    part.check(in_step=False)
    with pytest.raises(LeaveNow):
        part.check(in_step=True)
    assert part.begin(2) is None
    assert not part.has_begun
    assert part.begin(3) == Place(6, None)
    assert part.has_begun
    assert torch.rand(1) == drawn
