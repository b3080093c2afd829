"""Train on the further branches of agent sessions, as rows in addition to TRL's row per session.

TRL makes one row per prompt, in groups. So the last-finished branches pass through TRL, with rewards and
advantages. A second call, whose logs are discarded, makes rows of the other branches, which get the advantages of
their sessions. The gateway's masks decide in which of its branches a shared turn is trained.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.nn.functional import pad

from grpo_orch.policies.serving.sessions import Branch

# Maximum of added rows, as a multiple of the batch's own rows, for which memory was planned. If even one
# multiple does not fit, the trainer continues with smaller batches.
ROWS_MAX = 1
NO_BRANCH = Branch([], 0, [], [], [], [])
LEFT_PADDED = ("prompt_ids", "prompt_mask")


class TrainsBranches:
    """Mixin that must come first in the bases of a TRL trainer that runs agents."""

    _further: list[Branch] | None = None  # of this process, while TRL makes their rows
    _sessions: Any
    accelerator: Any

    def _generate_and_score_completions(self: Any, inputs: list[Any]) -> dict[str, Any]:
        self._sessions = None
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]  # the trainer's
        if self._sessions is None or not self.model.training:
            return output
        advantages = output["advantages"].tolist()
        further = [
            (branch, advantage)
            for session, advantage in zip(self._sessions, advantages, strict=True)
            for branch in session.branches[:-1]
            if any(branch.mask) and not session.failed
        ]
        further.sort(key=lambda pair: sum(pair[0].mask), reverse=True)  # stable: the same in every attempt
        count = self._count_of_rows(len(further), len(inputs))
        untrained = sum(sum(branch.mask) for branch, _ in further[count:])
        self._metrics["train"]["agent/untrained_tokens"].append(float(sum(gather_object([untrained]))))
        self._metrics["train"]["agent/further_branches"].append(
            float(sum(gather_object([min(count, len(further))])))
        )
        return self._with_branch_rows(further[:count], count, inputs[0], output) if count else output

    def no_rewards(self: Any, rows: int) -> torch.Tensor | None:
        """Return dummy rewards for all processes while TRL makes rows of branches; otherwise None."""
        if self._further is None:
            return None
        shape = rows * self.accelerator.num_processes, len(self.reward_funcs)
        return torch.zeros(shape, device=self.accelerator.device)

    def _count_of_rows(self: Any, wanted: int, own: int) -> int:
        """Return the rows that each process adds: the maximum any process wants, a multiple of the batches."""
        batches = int(self.args.steps_per_generation)
        rows: int = min(max(gather_object([wanted])), ROWS_MAX * own)
        return -(-rows // batches) * batches

    def _with_branch_rows(
        self: Any, further: list[tuple[Branch, float]], count: int, row: Any, output: dict[str, Any]
    ) -> dict[str, Any]:
        padded = -(-count // self.num_generations) * self.num_generations  # TRL requires whole groups
        branches = [branch for branch, _ in further]
        self._further = [*branches, *[NO_BRANCH] * (padded - len(branches))]
        with _without_logs(self):
            try:
                # Skip the parts of the trainer that count and keep completions.
                made = self.score_without_samples([dict(row) for _ in range(padded)])
            finally:
                self._further = None
        advantages = [advantage for _, advantage in further] + [0.0] * (count - len(further))
        made["advantages"] = torch.tensor(advantages, device=output["advantages"].device)
        end = self._tokenizer.pad_token_id
        return {name: _joined(name, value, made[name], count, end) for name, value in output.items()}


def _joined(name: str, first: torch.Tensor, second: torch.Tensor, count: int, end: int) -> torch.Tensor:
    """Join the rows of `first` and the first `count` rows of `second`, padded to the longest."""
    if first.ndim == 0:  # a token count
        return first + second
    second = second[:count].to(first.dtype)
    if first.ndim == 1 or first.shape[1] == second.shape[1]:
        return torch.cat([first, second])
    longest = max(first.shape[1], second.shape[1])
    fill = end if name.endswith("_ids") else 0
    rows = []
    for part in (first, second):
        missing = longest - part.shape[1]
        rows.append(pad(part, (missing, 0) if name in LEFT_PADDED else (0, missing), value=fill))
    return torch.cat(rows)


@contextlib.contextmanager
def _without_logs(trainer: Any) -> Iterator[None]:
    """Discard what TRL counts and logs within the context."""
    saved = trainer._metrics, trainer._logs, trainer.state.num_input_tokens_seen
    trainer._metrics = {mode: defaultdict(list) for mode in saved[0]}
    trainer._logs = {
        name: defaultdict(deque) if isinstance(value, dict) else deque() for name, value in saved[1].items()
    }
    try:
        yield
    finally:
        trainer._metrics, trainer._logs, trainer.state.num_input_tokens_seen = saved
