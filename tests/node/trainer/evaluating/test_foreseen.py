"""TRL's own evaluation in one batch: the same requests, the same metrics; and the prompts of each call as its
loop will ask for them, however many processes there are."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from trl.trainer.utils import RepeatSampler

from grpo_orch.tasks.trl.windows_ahead import evaluation_calls
from tests.node.trainer.rig import open_rig

OF_TIME = ("runtime", "per_second")


def evaluated(folder: Path, tiny: Path, *, foresees: bool) -> tuple[list[int], list[Any], dict[str, float]]:
    """Sizes of the batches that were asked for, all requests, and TRL's metrics."""
    grpo = {"per_device_eval_batch_size": 8, "num_generations_eval": 4}
    with open_rig(folder, tiny, grpo=grpo, evaluates=True) as rig:
        trainer = rig.assemble()
        assert trainer.fleet.foresees
        trainer.fleet.foresees = foresees
        found = trainer.evaluate()
        kept = {name: value for name, value in found.items() if not name.endswith(OF_TIME)}
        return rig.gateway.batches, sorted(rig.gateway.asked), kept


def test_an_evaluation_is_one_batch_and_computes_the_same(tiny: Path, tmp_path: Path) -> None:
    sizes, asked, found = evaluated(tmp_path / "one", tiny, foresees=True)
    sizes_before, asked_before, found_before = evaluated(tmp_path / "many", tiny, foresees=False)
    assert (sizes, sizes_before) == ([16], [8, 8])
    assert asked == asked_before
    assert found == found_before
    assert "eval_reward" in found


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("rows", [4, 5, 7])
def test_each_call_is_foreseen_as_the_loop_makes_it(processes: int, rows: int) -> None:
    dataset = [{"prompt": row} for row in range(rows)]
    config: Any = SimpleNamespace(even_batches=True)
    args = SimpleNamespace(eval_batch_size=4, dataloader_drop_last=False, accelerator_config=config)
    sampler = partial(RepeatSampler, data_source=dataset, mini_repeat_count=2, seed=3)
    loaders = [
        prepare_data_loader(
            DataLoader(dataset, batch_size=4, sampler=sampler(), collate_fn=list),
            num_processes=processes,
            process_index=process,
            put_on_device=False,
            rng_types=[],
        )
        for process in range(processes)
    ]
    made = [[[row["prompt"]] for batch in batches for row in batch][::2] for batches in zip(*loaders, strict=True)]
    assert evaluation_calls([[row] for row in range(rows)], sampler, 2, processes, args) == made
