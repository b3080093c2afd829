"""TRL's trainer as far as an evaluation goes: prompts in, completions and scores out, and no step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.trl.trl_grpo import FleetGRPOTrainer


@dataclass(frozen=True, slots=True)
class Made:
    """What TRL has made of some rows: `completions` as reward functions get them, `ids` as tokens."""

    prompts: list[Any]
    completions: list[Any]
    ids: list[list[int]]


class _Stopped(Exception):
    """The completions are there; TRL would go on to compute what a loss needs."""

    def __init__(self, made: Made) -> None:
        super().__init__()
        self.made = made


class EvaluatingTrainer(FleetGRPOTrainer):
    """FleetGRPOTrainer that never trains. Each policy is a step of its own."""

    def load(self, number: int, folder: Path | None) -> None:
        """From now on the policy is version `number`: the weights in a checkpoint's folder; None: as they are."""
        if folder is not None:
            self._load_from_checkpoint(str(folder))
        self.model.eval()
        self.state.global_step = number

    def completions_of(self, rows: list[dict[str, Any]]) -> Made:
        """Complete the rows' prompts, all at once; with tools or environments all of a turn at once."""
        try:
            self._generate_and_score_completions(rows)  # it prepares environments and tools
        except _Stopped as stopped:
            return stopped.made
        raise RuntimeError("TRL has completed no prompt")

    def scores_of(self, rows: list[dict[str, Any]], made: Made) -> list[dict[str, float | None]]:
        """What each function gives each completion, by the function's name; None where it gives nothing."""
        found = self._calculate_rewards(rows, made.prompts, made.completions, made.ids).tolist()
        return [
            {name: None if math.isnan(one) else one for name, one in zip(self.reward_func_names, row, strict=True)}
            for row in found
        ]

    def is_cut(self, ids: list[int]) -> bool:
        """Whether a completion had not ended at its greatest length. One may end without a token that says so, at
        a text that `grpo.generation_kwargs` calls an end."""
        longest = (self.args.generation_kwargs or {}).get("max_tokens") or self.args.max_completion_length
        return len(ids) >= longest and ids[-1] not in self.eos_token_ids

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        _, ids, _, completions, *_ = super()._generate(prompts)
        raise _Stopped(Made(prompts, completions, ids))
