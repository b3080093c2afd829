"""TRL's trainer for evaluation: prompts in, completions and scores out, no training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_orch.tasks.trl.trl_grpo import FleetGRPOTrainer


@dataclass(frozen=True, slots=True)
class Made:
    """Completions of some rows: `completions` in the form for reward functions, `ids` as tokens."""

    prompts: list[Any]
    completions: list[Any]
    ids: list[list[int]]


class _Stopped(Exception):
    """Carries the completions out of TRL, which would go on and compute the inputs of a loss."""

    def __init__(self, made: Made) -> None:
        super().__init__()
        self.made = made


class EvaluatingTrainer(FleetGRPOTrainer):
    """FleetGRPOTrainer that never trains. Each policy is a step of its own."""

    def load(self, number: int, folder: Path | None) -> None:
        """Set policy `number`: load the weights in a checkpoint's folder; None: keep the present weights."""
        if folder is not None:
            self._load_from_checkpoint(str(folder))
        self.model.eval()
        self.state.global_step = number

    def completions_of(self, rows: list[dict[str, Any]]) -> Made:
        """Complete the rows' prompts together; with tools or environments, turn by turn."""
        try:
            self._generate_and_score_completions(rows)  # it prepares environments and tools
        except _Stopped as stopped:
            return stopped.made
        raise RuntimeError("TRL has completed no prompt")

    def scores_of(self, rows: list[dict[str, Any]], made: Made) -> list[dict[str, float | None]]:
        """Return each completion's scores by function name; None where a function gives none."""
        scores = self._calculate_rewards(rows, made.prompts, made.completions, made.ids).tolist()
        names = self.reward_func_names
        return [
            {name: None if math.isnan(score) else score for name, score in zip(names, row, strict=True)}
            for row in scores
        ]

    def is_cut(self, ids: list[int]) -> bool:
        """Whether a completion reached its maximum length without ending. A completion may also end without an end
        token, at a stop text of `grpo.generation_kwargs`."""
        longest = (self.args.generation_kwargs or {}).get("max_tokens") or self.args.max_completion_length
        return len(ids) >= longest and ids[-1] not in self.eos_token_ids

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        _, ids, _, completions, *_ = super()._generate(prompts)
        raise _Stopped(Made(prompts, completions, ids))
