"""Announces an evaluation's prompts before its loop asks for them, so that the fleet completes them together.

TRL makes one generate call after the other, each for `per_device_eval_batch_size` completions: with 8 completions
of a prompt, 500 prompts would be 500 calls of one prompt, on a fleet that completes hundreds in parallel.
"""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler


class ForeseesEvaluation:
    """Mixed in before TRL's trainer."""

    def evaluation_loop(self: Any, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        if self.accelerator.is_main_process and self._fleet.foresees and self._is_one_turn():
            self._fleet.foresee(self._calls_of(dataloader.dataset), self.num_generations_eval)
        return super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]  # the trainer's

    def _is_one_turn(self: Any) -> bool:
        """Whether the prompts depend on the dataset only."""
        return not self.tools and self.rollout_func is None and self.environment_factories is None

    def _calls_of(self: Any, dataset: Any) -> list[list[list[int]]]:
        """Return the prompts of each generate call of the loop, as token ids.

        It need not know every setting of a loop: a call that differs is completed when it comes.
        """
        ids = self._tokenize_prompts([row["prompt"] for row in dataset])[0]
        processes = self.accelerator.num_processes
        # Each draws the order again, as the loop's own sampler will, from a generator of its own.
        shards = [
            BatchSampler(
                self._get_eval_sampler(dataset), self.args.eval_batch_size, self.args.dataloader_drop_last
            )
            for _ in range(processes)
        ]
        if processes > 1:  # with one process, accelerate leaves the last batch short
            even = self.args.accelerator_config.even_batches
            shards = [
                BatchSamplerShard(sampler, processes, index, even_batches=even)
                for index, sampler in enumerate(shards)
            ]
        calls = ([row for batch in batches for row in batch] for batches in zip(*shards, strict=False))
        return [[list(ids[row]) for row in rows[:: self.num_generations_eval]] for rows in calls]
