"""Completions that are not there, since no rollout node took their prompt: how TRL's trainer leaves them out.

TRL knows no completion without a token. So the fleet's client gives it one token without a
log-probability, which no node ever does, and each process knows it by that. Its mask is 0, so that it is in no sum
of the loss and in no count of tokens; its reward is none, so that it is in no baseline and its advantage is 0; and
what TRL has counted of it goes out of the metrics. Its prompt, which may be longer than memory allows, becomes one
token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tasks.trl.skipped_prompts import walk_of


class LeavesOutRefused:
    """For a trainer of TRL's, before it in the order of its bases."""

    _refused: torch.Tensor | None = None  # of the call, over all processes; None: nothing was refused

    def row_of(self: Any, prompt_ids: list[int]) -> int | None:
        """The place in the dataset of a prompt that is trained on next; None where it cannot be told."""
        if not self.model.training or self.environment_factories is not None:
            return None
        step = self.state.global_step + 1
        rows = self._replaced.seen(walk_of(self.args, len(self.train_dataset)), step, step)
        found: dict[int, int] = {}  # by length: with tools a prompt goes on after the dataset's
        for row in rows:
            ids = self._tokenize_prompts([self.train_dataset[row]["prompt"]])[0][0]
            if list(ids) == prompt_ids[: len(ids)]:
                found[len(ids)] = row
        return found[max(found)] if found else None

    def without_refused(self, per_function: torch.Tensor) -> torch.Tensor:
        """Rewards of all processes, completion by function: none where there is no completion."""
        if self._refused is not None:
            per_function[self._refused] = math.nan
        return per_function

    def _generate(self: Any, prompts: list[Any]) -> tuple[Any, ...]:
        # Named by what TRL's trainer returns; it is checked by the contract's tests.
        prompt_ids, completion_ids, mask, completions, logprobs, *more = super()._generate(prompts)  # type: ignore[misc]
        here = [None in of_one for of_one in logprobs]
        refused = self.accelerator.gather(torch.tensor(here, device=self.accelerator.device))
        self._refused = refused if bool(refused.any()) else None
        if self._refused is not None:
            mask = mask or [[1] * len(ids) for ids in completion_ids]
            self._count_lengths_again(completion_ids, mask)
            mask = [[0] * len(one) if out else one for one, out in zip(mask, here, strict=True)]
            token = [self.eos_token_ids[0]]  # none of its own: the model may have no embedding for them
            prompt_ids = [token if out else ids for ids, out in zip(prompt_ids, here, strict=True)]
        return prompt_ids, completion_ids, mask, completions, logprobs, *more

    def _generate_and_score_completions(self: Any, inputs: list[Any]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        if self._refused is not None:
            metrics, kept = self._metrics["train" if self.model.training else "eval"], ~self._refused
            if kept.any():
                metrics["frac_reward_zero_std"][-1] *= len(kept) / int(kept.sum())
            else:
                _forget_last(metrics, [name for name in metrics if name.startswith(("reward", "frac_reward_"))])
        return output

    def _compute_loss(self: Any, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        metrics = self._metrics["train" if self.model.training else "eval"]
        before = {name: len(values) for name, values in metrics.items()}
        loss: torch.Tensor = super()._compute_loss(model, inputs)  # type: ignore[misc]
        # TRL says 0 of a batch without a token; over several processes it weighs by tokens already.
        masked = "tool_mask" in inputs and not (inputs["completion_mask"] * inputs["tool_mask"]).any()
        if masked and self.accelerator.num_processes == 1:
            _forget_last(metrics, [name for name in metrics if len(metrics[name]) > before.get(name, 0)])
        return loss

    def _count_lengths_again(self: Any, completion_ids: list[list[int]], mask: Sequence[Sequence[int]]) -> None:
        """TRL's metrics of lengths, of what there is: lengths in tokens, over all processes."""
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        measured = [[sum(one), ids[-1] not in ends] for ids, one in zip(completion_ids, mask, strict=True)]
        measured = self.accelerator.gather(torch.tensor(measured, device=self.accelerator.device))
        lengths, cut = measured[~self._refused].T
        metrics = self._metrics["train" if self.model.training else "eval"]
        names = [name for name in metrics if name.startswith("completions/")]
        if not len(lengths):
            _forget_last(metrics, names)
            return
        metrics["completions/clipped_ratio"][-1] = cut.float().mean().item()
        ended = lengths[cut == 0] if bool((cut == 0).any()) else torch.zeros(1, device=lengths.device)
        for kind, of_them in (("", lengths), ("terminated_", ended)):
            for name, value in (("mean", of_them.float().mean()), ("min", of_them.min()), ("max", of_them.max())):
                metrics[f"completions/{name}_{kind}length"][-1] = float(value)


def _forget_last(metrics: dict[str, list[float]], names: Sequence[str]) -> None:
    """Take back what was added last. A name without a value would be logged as None, which passes for a NaN."""
    for name in names:
        metrics[name].pop()
        if not metrics[name]:
            del metrics[name]
