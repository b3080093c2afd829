"""An evaluation's prompts, said before its loop asks for them batch by batch: the fleet completes them together.

TRL makes one generate call for each batch of `per_device_eval_batch_size` completions, each after the other: with
8 of one prompt, 500 prompts are 500 calls of one prompt, on a fleet for hundreds.
"""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler


class ForeseesEvaluation:
    """For a trainer of TRL's, before it in the order of its bases."""

    def evaluation_loop(self: Any, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        if self.accelerator.is_main_process and self._fleet.foresees and self._is_one_turn():
            self._fleet.foresee(self._calls_of(dataloader.dataset), self.num_generations_eval)
        return super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]  # the trainer's

    def _is_one_turn(self: Any) -> bool:
        """Whether what is asked for depends on nothing but the dataset."""
        return not self.tools and self.rollout_func is None and self.environment_factories is None

    def _calls_of(self: Any, dataset: Any) -> list[list[list[int]]]:
        """The prompts of each generate call of the loop, as token ids. What is not as foreseen is asked for as it
        comes, so this need not know all that a loop may be set to."""
        ids = self._tokenize_prompts([row["prompt"] for row in dataset])[0]
        processes = self.accelerator.num_processes
        # Each draws the order anew, as the loop's own will, and none takes from the generator of another.
        shards = [
            BatchSampler(
                self._get_eval_sampler(dataset), self.args.eval_batch_size, self.args.dataloader_drop_last
            )
            for _ in range(processes)
        ]
        if processes > 1:  # of one process accelerate leaves the last batch as short as it is
            even = self.args.accelerator_config.even_batches
            shards = [
                BatchSamplerShard(one, processes, index, even_batches=even) for index, one in enumerate(shards)
            ]
        calls = ([row for batch in batches for row in batch] for batches in zip(*shards, strict=False))
        return [[list(ids[row]) for row in rows[:: self.num_generations_eval]] for rows in calls]
