"""Announce an evaluation's prompts before its loop requests them, so that the fleet completes them together.

TRL makes one generate call after the other, each for `per_device_eval_batch_size` completions: with 8 completions
of a prompt, 500 prompts would be 500 calls of one prompt, on a fleet that completes hundreds in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler


def evaluation_calls(
    prompts: Sequence[list[int]], new_sampler: Callable[[], Any], samples: int, processes: int, args: Any
) -> list[list[list[int]]]:
    """Return the prompts of each generate call of the loop, as token ids.

    It need not know every setting of a loop: a call that differs is completed when it comes.

    Args:
        prompts: of the whole dataset.
        new_sampler: returns the loop's sampler, which repeats each prompt `samples` times.
        args: the trainer's GRPOConfig.
    """
    # Each draws the order again, as the loop's own sampler will, from a generator of its own.
    shards = [
        BatchSampler(new_sampler(), args.eval_batch_size, args.dataloader_drop_last) for _ in range(processes)
    ]
    if processes > 1:  # with one process, accelerate leaves the last batch short
        even = args.accelerator_config.even_batches
        shards = [
            BatchSamplerShard(sampler, processes, index, even_batches=even) for index, sampler in enumerate(shards)
        ]
    calls = ([row for batch in batches for row in batch] for batches in zip(*shards, strict=False))
    return [[prompts[row] for row in rows[::samples]] for rows in calls]
