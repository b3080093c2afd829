"""Leave out completions whose prompt every rollout node has refused.

TRL expects at least one token in a completion. So the client returns one token without a log-probability, which no
node ever does, and each process recognizes it by that. Its mask is 0, so it is in no sum of the loss and in no
count of tokens. It has no reward, so it is in no baseline and its advantage is 0. TRL's metrics are corrected. Its
prompt, which may be longer than memory allows, becomes one token.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

Ids = list[list[int]]
Metrics = dict[str, list[float]]


class RefusedCompletions:
    """The refused completions of the present generate call.

    Args:
        end: a token that the model has an embedding for.
        ends: tokens after which a completion is not cut.
    """

    def __init__(self, accelerator: Any, end: int, ends: Collection[int]) -> None:
        self._accelerator, self._end, self._ends = accelerator, end, ends
        self._refused: torch.Tensor | None = None  # of all processes; None: no refusals

    @property
    def count(self) -> int:
        """The number of refused completions, of all processes."""
        return 0 if self._refused is None else int(self._refused.sum())

    def leave_out(
        self, prompt_ids: Ids, completion_ids: Ids, mask: Ids | None, logprobs: list[list[Any]], metrics: Metrics
    ) -> tuple[Ids, Ids | None]:
        """Return prompts and mask of a generate call without refused completions, and correct its metrics."""
        own = [None in row for row in logprobs]
        refused = self._accelerator.gather(torch.tensor(own, device=self._accelerator.device))
        self._refused = refused if bool(refused.any()) else None
        if self._refused is None:
            return prompt_ids, mask
        mask = mask or [[1] * len(ids) for ids in completion_ids]
        self._count_lengths_again(completion_ids, mask, self._refused, metrics)
        mask = [[0] * len(row) if is_out else row for row, is_out in zip(mask, own, strict=True)]
        token = [self._end]  # the model may have no embedding for the prompt's own tokens
        return [token if is_out else ids for ids, is_out in zip(prompt_ids, own, strict=True)], mask

    def without_rewards(self, per_function: torch.Tensor) -> torch.Tensor:
        """Return the rewards of all processes, (completions, functions), with NaN for refused completions."""
        if self._refused is not None:
            per_function[self._refused] = math.nan
        return per_function

    def correct_scores(self, metrics: Metrics) -> None:
        """Correct TRL's metrics of rewards, once the call is scored."""
        if self._refused is None:
            return
        kept = ~self._refused
        if kept.any():
            metrics["frac_reward_zero_std"][-1] *= len(kept) / int(kept.sum())
        else:
            _forget_last(metrics, [name for name in metrics if name.startswith(("reward", "frac_reward_"))])

    @contextlib.contextmanager
    def without_empty_loss(self, inputs: dict[str, Any], metrics: Metrics) -> Iterator[None]:
        """Remove the metrics that TRL logs within the context if the batch has no token.

        TRL logs 0 for such a batch; with several processes it weights by tokens already.
        """
        before = {name: len(values) for name, values in metrics.items()}
        yield
        masked = "tool_mask" in inputs and not (inputs["completion_mask"] * inputs["tool_mask"]).any()
        if masked and self._accelerator.num_processes == 1:
            _forget_last(metrics, [name for name in metrics if len(metrics[name]) > before.get(name, 0)])

    def _count_lengths_again(
        self, completion_ids: Ids, mask: Sequence[Sequence[int]], refused: torch.Tensor, metrics: Metrics
    ) -> None:
        """Compute TRL's metrics of lengths without refused completions, in tokens, over all processes."""
        measured = [[sum(row), ids[-1] not in self._ends] for ids, row in zip(completion_ids, mask, strict=True)]
        gathered = self._accelerator.gather(torch.tensor(measured, device=self._accelerator.device))
        lengths, cut = gathered[~refused].T
        names = [name for name in metrics if name.startswith("completions/")]
        if not len(lengths):
            _forget_last(metrics, names)
            return
        metrics["completions/clipped_ratio"][-1] = cut.float().mean().item()
        ended = lengths[cut == 0] if bool((cut == 0).any()) else torch.zeros(1, device=lengths.device)
        for kind, group in (("", lengths), ("terminated_", ended)):
            for name, value in (("mean", group.float().mean()), ("min", group.min()), ("max", group.max())):
                metrics[f"completions/{name}_{kind}length"][-1] = float(value)


def row_of(trainer: Any, prompt_ids: list[int]) -> int | None:
    """Return the row in the dataset of a prompt of the next step; None if it is unknown."""
    if not trainer.model.training or trainer.environment_factories is not None:
        return None
    step = trainer.state.global_step + 1
    found: dict[int, int] = {}  # by length: with tools, a prompt may be longer than the dataset's
    for row in trainer.replaced.seen(trainer.walk, step, step):
        [ids] = trainer.tokenized([trainer.train_dataset[row]["prompt"]])
        if ids == prompt_ids[: len(ids)]:
            found[len(ids)] = row
    return found[max(found)] if found else None


def _forget_last(metrics: Metrics, names: Sequence[str]) -> None:
    """Remove each metric's last value, and metrics without values: they would be logged as None, like a NaN."""
    for name in names:
        metrics[name].pop()
        if not metrics[name]:
            del metrics[name]
