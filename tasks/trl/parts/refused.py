"""Leaves out completions whose prompt every rollout node has refused.

TRL expects at least one token in a completion. So the client returns one token without a log-probability, which no
node ever does, and each process recognizes it by that. Its mask is 0, so it is in no sum of the loss and in no
count of tokens. It has no reward, so it is in no baseline and its advantage is 0. TRL's metrics are corrected. Its
prompt, which may be longer than memory allows, becomes one token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from grpo_orch.tasks.trl.skipped_prompts import walk_of


class LeavesOutRefused:
    """Mixed in before TRL's trainer."""

    _refused: torch.Tensor | None = None  # the call's refused completions, of all processes; None: no refusals

    def row_of(self: Any, prompt_ids: list[int]) -> int | None:
        """Return the row in the dataset of a prompt of the next step; None if it is unknown."""
        if not self.model.training or self.environment_factories is not None:
            return None
        step = self.state.global_step + 1
        rows = self._replaced.seen(walk_of(self.args, len(self.train_dataset)), step, step)
        found: dict[int, int] = {}  # by length: with tools, a prompt may be longer than the dataset's
        for row in rows:
            ids = self._tokenize_prompts([self.train_dataset[row]["prompt"]])[0][0]
            if list(ids) == prompt_ids[: len(ids)]:
                found[len(ids)] = row
        return found[max(found)] if found else None

    def without_refused(self, per_function: torch.Tensor) -> torch.Tensor:
        """Return the rewards of all processes, (completions, functions), with NaN for refused completions."""
        if self._refused is not None:
            per_function[self._refused] = math.nan
        return per_function

    def _generate(self: Any, prompts: list[Any]) -> tuple[Any, ...]:
        # In the order in which TRL's trainer returns them; tests/node/test_trl_contract.py checks it.
        prompt_ids, completion_ids, mask, completions, logprobs, *more = super()._generate(prompts)  # type: ignore[misc]
        own = [None in row for row in logprobs]
        refused = self.accelerator.gather(torch.tensor(own, device=self.accelerator.device))
        self._refused = refused if bool(refused.any()) else None
        if self._refused is not None:
            mask = mask or [[1] * len(ids) for ids in completion_ids]
            self._count_lengths_again(completion_ids, mask)
            mask = [[0] * len(row) if is_out else row for row, is_out in zip(mask, own, strict=True)]
            token = [self.eos_token_ids[0]]  # the model may have no embedding for the prompt's own tokens
            prompt_ids = [token if is_out else ids for ids, is_out in zip(prompt_ids, own, strict=True)]
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
        # TRL logs 0 for a batch without tokens; with several processes it weights by tokens already.
        masked = "tool_mask" in inputs and not (inputs["completion_mask"] * inputs["tool_mask"]).any()
        if masked and self.accelerator.num_processes == 1:
            _forget_last(metrics, [name for name in metrics if len(metrics[name]) > before.get(name, 0)])
        return loss

    def _count_lengths_again(self: Any, completion_ids: list[list[int]], mask: Sequence[Sequence[int]]) -> None:
        """Compute TRL's metrics of lengths without refused completions, in tokens, over all processes."""
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        measured = [[sum(row), ids[-1] not in ends] for ids, row in zip(completion_ids, mask, strict=True)]
        measured = self.accelerator.gather(torch.tensor(measured, device=self.accelerator.device))
        lengths, cut = measured[~self._refused].T
        metrics = self._metrics["train" if self.model.training else "eval"]
        names = [name for name in metrics if name.startswith("completions/")]
        if not len(lengths):
            _forget_last(metrics, names)
            return
        metrics["completions/clipped_ratio"][-1] = cut.float().mean().item()
        ended = lengths[cut == 0] if bool((cut == 0).any()) else torch.zeros(1, device=lengths.device)
        for kind, group in (("", lengths), ("terminated_", ended)):
            for name, value in (("mean", group.float().mean()), ("min", group.min()), ("max", group.max())):
                metrics[f"completions/{name}_{kind}length"][-1] = float(value)


def _forget_last(metrics: dict[str, list[float]], names: Sequence[str]) -> None:
    """Remove each metric's last value, and metrics without values: they would be logged as None, like a NaN."""
    for name in names:
        metrics[name].pop()
        if not metrics[name]:
            del metrics[name]
