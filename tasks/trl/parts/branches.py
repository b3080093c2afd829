"""Further branches of agents' sessions, as rows of their own beside those that TRL has made of the sessions.

TRL's rows are as many as its prompts, in groups. So the branches that ended last go through it, with rewards and
advantages; then it is called once more for the others, with nothing of what it logs kept, and their rows get the
advantages of their sessions. What a turn of several branches is trained in is the gateway's to say, by masks.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.nn.functional import pad

from policies.serving.sessions import Branch

# Rows of a batch beside its own, in multiples of them: memory was planned for its own. Where even one more is too
# many, the trainer goes on with smaller batches.
ROWS_MAX = 1
NO_BRANCH = Branch([], 0, [], [], [], [])
FROM_THE_LEFT = ("prompt_ids", "prompt_mask")


class TrainsBranches:
    """For a trainer of TRL's that runs agents, before all others in the order of its bases."""

    _further: list[Branch] | None = None  # of this process, while TRL makes rows of them
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
        further.sort(key=lambda one: sum(one[0].mask), reverse=True)  # stable: the same in every attempt
        count = self._count_of_rows(len(further), len(inputs))
        untrained = sum(sum(branch.mask) for branch, _ in further[count:])
        self._metrics["train"]["agent/untrained_tokens"].append(float(sum(gather_object([untrained]))))
        self._metrics["train"]["agent/further_branches"].append(
            float(sum(gather_object([min(count, len(further))])))
        )
        return self._with_rows_of(further[:count], count, inputs[0], output) if count else output

    def no_rewards(self: Any, rows: int) -> torch.Tensor | None:
        """Rewards of all processes that mean nothing, while rows are made of branches; None at other times."""
        if self._further is None:
            return None
        shape = rows * self.accelerator.num_processes, len(self.reward_funcs)
        return torch.zeros(shape, device=self.accelerator.device)

    def _count_of_rows(self: Any, wanted: int, own: int) -> int:
        """How many rows each process adds: as many as any of them wants, in equal parts for each batch."""
        batches = int(self.args.steps_per_generation)
        most: int = min(max(gather_object([wanted])), ROWS_MAX * own)
        return -(-most // batches) * batches

    def _with_rows_of(
        self: Any, further: list[tuple[Branch, float]], count: int, row: Any, output: dict[str, Any]
    ) -> dict[str, Any]:
        called = -(-count // self.num_generations) * self.num_generations  # TRL divides what it gets into groups
        branches = [branch for branch, _ in further]
        self._further = [*branches, *[NO_BRANCH] * (called - len(branches))]
        with _logging_nothing(self):
            try:
                # Of the trainer below those parts that count and keep what is generated.
                made = self.score_without_samples([dict(row) for _ in range(called)])
            finally:
                self._further = None
        advantages = [advantage for _, advantage in further] + [0.0] * (count - len(further))
        made["advantages"] = torch.tensor(advantages, device=output["advantages"].device)
        end = self._tokenizer.pad_token_id
        return {name: _joined(name, value, made[name], count, end) for name, value in output.items()}


def _joined(name: str, first: torch.Tensor, second: torch.Tensor, count: int, end: int) -> torch.Tensor:
    """The rows of both, of `count` of the second, as long as the longest."""
    if first.ndim == 0:  # how many tokens there are
        return first + second
    second = second[:count].to(first.dtype)
    if first.ndim == 1 or first.shape[1] == second.shape[1]:
        return torch.cat([first, second])
    longest = max(first.shape[1], second.shape[1])
    fill = end if name.endswith("_ids") else 0
    rows = []
    for one in (first, second):
        more = longest - one.shape[1]
        rows.append(pad(one, (more, 0) if name in FROM_THE_LEFT else (0, more), value=fill))
    return torch.cat(rows)


@contextlib.contextmanager
def _logging_nothing(trainer: Any) -> Iterator[None]:
    """Within, nothing that TRL counts or logs is kept."""
    kept = trainer._metrics, trainer._logs, trainer.state.num_input_tokens_seen
    trainer._metrics = {mode: defaultdict(list) for mode in kept[0]}
    trainer._logs = {
        name: defaultdict(deque) if isinstance(one, dict) else deque() for name, one in kept[1].items()
    }
    try:
        yield
    finally:
        trainer._metrics, trainer._logs, trainer.state.num_input_tokens_seen = kept
