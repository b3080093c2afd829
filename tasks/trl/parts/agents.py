"""Pass the run's agent sessions to TRL as completions, through its `rollout_func`.

A session becomes one row, made of its last-finished branch. The prompt is everything before the first answer, the
completion everything after it, and the mask marks the policy's tokens. A session without turns is left out like a
refused prompt, by a completion without a log-probability (`tasks.trl.parts.refused`).

Further branches are rows in addition. TRL makes one row per prompt, in groups. So the last-finished branches pass
through TRL, with rewards and advantages. A second call, whose logs are discarded, makes rows of the others, which
get the advantages of their sessions. The gateway's masks decide in which of its branches a shared turn is trained.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.nn.functional import pad

from grpo_orch.checkpoint.records.rollouts import Session
from grpo_orch.policies.serving.wire import Branch

MESSAGES, REWARD = "messages", "agent_reward"  # columns for reward functions
# Maximum of added rows, as a multiple of the batch's own rows, for which memory was planned. If even one
# multiple does not fit, the trainer continues with smaller batches.
ROWS_MAX = 1
NO_BRANCH = Branch([], 0, [], [], [], [])
LEFT_PADDED = ("prompt_ids", "prompt_mask")


def agent(agent_reward: list[float | None], **_: Any) -> list[float | None]:
    """Reward function that returns the agents' own rewards."""
    return agent_reward


def example_columns(count: int) -> dict[str, list[Any]]:
    """Return example columns of `count` sessions, to try reward functions with."""
    messages = [{"role": "user", "content": "What is 6 times 7?"}, {"role": "assistant", "content": "42"}]
    return {MESSAGES: [messages] * count, REWARD: [1.0] * count}


def plain_rows(rows: list[dict[str, Any]]) -> list[Any]:
    """Convert rows for an agent: values that JSON cannot encode become text."""
    return [json.loads(json.dumps(row, default=_text)) for row in rows]


def _text(value: Any) -> str:
    """Return text that is the same in every attempt, without the memory addresses in Python's reprs."""
    return re.sub(r" at 0x[0-9A-Fa-f]+", "", str(value))


def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Implement TRL's `rollout_func`: return one row per prompt, in order."""
    samples = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    rows: dict[str, Any] = trainer.agents.rows(len(prompts), samples)
    return rows


@dataclass(frozen=True, slots=True)
class Further:
    """The further branches of a call's sessions, with advantages, as rows that this process adds.

    Attributes:
        count: the number of rows, the same in each process. The last ones may be empty.
    """

    branches: list[tuple[Branch, float]]
    count: int


class Sessions:
    """The agent's sessions in the present call of TRL. Without an agent it changes nothing.

    Args:
        run: runs `samples` sessions of each row, which occurs as often in succession: of all processes together.
        log_metric: logs a value in TRL's row.
        end: a token that the model has an embedding for.
        padding: the token that pads rows.
        batches: the parts that a call's rows are trained on in.
        group: rows of a prompt.
    """

    def __init__(
        self,
        accelerator: Any,
        run: Callable[[list[dict[str, Any]], int], list[Session]],
        log_metric: Callable[[str, float], None],
        *,
        has_agent: bool,
        end: int,
        padding: int,
        batches: int,
        group: int,
    ) -> None:
        self._accelerator, self._run, self._log_metric = accelerator, run, log_metric
        self._has_agent, self._end, self._padding = has_agent, end, padding
        self._batches, self._group = batches, group
        self._inputs: list[dict[str, Any]] = []  # this process's rows of the dataset
        self._sessions: list[Session] | None = None  # of these rows; None until they have run
        self._branches: list[Branch] | None = None  # while TRL makes rows of further branches

    def begin(self, inputs: list[dict[str, Any]]) -> None:
        """Begin a call: these rows of the dataset are about to be completed and scored."""
        self._inputs, self._sessions = inputs, None

    @property
    def have_run(self) -> bool:
        """Whether the present call has sessions."""
        return self._sessions is not None

    @property
    def are_extended(self) -> bool:
        """Whether TRL makes rows of further branches at present."""
        return self._branches is not None

    def rows(self, count: int, samples: int) -> dict[str, Any]:
        """Run a session for each of this process's rows and return TRL's rows."""
        if self._branches is not None:
            return _rows_of(self._branches, self._end)
        rows = plain_rows(self._inputs)
        if len(rows) != count:
            raise RuntimeError(f"TRL asks for {count} completions of {len(rows)} rows")
        sessions = self._run(rows, samples)
        self._sessions = sessions
        for session in sessions:
            turns = sum(branch.mask[turn.start] for branch in session.branches for turn in branch.turns)
            self._log_metric("agent/turns", float(turns))
            self._log_metric("agent/failed", float(bool(session.failed)))
        last = [session.branches[-1] if session.branches else NO_BRANCH for session in sessions]
        columns = {
            MESSAGES: [branch.messages for branch in last],
            REWARD: [session.reward for session in sessions],
        }
        return {**_rows_of(last, self._end), **columns}

    def prompts(self, prompts: list[Any]) -> list[Any]:
        """Return the prompts to hand to TRL: empty texts, since it would read each conversation as one message."""
        return [""] * len(prompts) if self._has_agent else prompts

    def completions(self, prompts: list[Any], completions: list[Any]) -> list[Any]:
        """Return TRL's completions as conversations, if the prompts are."""
        if self._sessions is None or self.are_extended or isinstance(prompts[0], str):
            return completions
        return [_answers(session, text) for session, text in zip(self._sessions, completions, strict=True)]

    def without_failed(self, per_function: torch.Tensor) -> torch.Tensor:
        """Set the rewards of failed sessions to NaN; shape (completions of all processes, functions)."""
        if self._sessions is not None:
            here = [bool(session.failed) for session in self._sessions]
            failed = self._accelerator.gather(torch.tensor(here, device=self._accelerator.device))
            per_function[failed] = math.nan
        return per_function

    def drop_ends(self, metrics: dict[str, list[float]]) -> None:
        """Delete TRL's metrics of ends, once the call is scored.

        A session does not end with an end token, so TRL would count every session as cut. Delete the metrics only
        then, because leaving out failed rows computes them again.
        """
        if self._has_agent:
            for name in [name for name in metrics if "clipped_ratio" in name or "terminated_length" in name]:
                del metrics[name]

    def further(self, advantages: torch.Tensor, metrics: dict[str, list[float]]) -> Further | None:
        """Return the rows to add to a scored training call, or None. Logs how many rows and tokens there are.

        Args:
            advantages: of this process's sessions.
        """
        if self._sessions is None:
            return None
        further = [
            (branch, advantage)
            for session, advantage in zip(self._sessions, advantages.tolist(), strict=True)
            for branch in session.branches[:-1]
            if any(branch.mask) and not session.failed
        ]
        further.sort(key=lambda pair: sum(pair[0].mask), reverse=True)  # stable: the same in every attempt
        count = self._count_of_rows(len(further), len(self._inputs))
        untrained = sum(sum(branch.mask) for branch, _ in further[count:])
        metrics["agent/untrained_tokens"].append(float(sum(gather_object([untrained]))))
        metrics["agent/further_branches"].append(float(sum(gather_object([min(count, len(further))]))))
        return Further(further[:count], count) if count else None

    def extended(
        self,
        output: dict[str, Any],
        further: Further,
        score: Callable[[list[dict[str, Any]]], dict[str, Any]],
    ) -> dict[str, Any]:
        """Return TRL's output of the call with the rows of further branches.

        Args:
            score: makes TRL's output of rows of the dataset, without logs. It gets these branches from `rows`.
        """
        padded = -(-further.count // self._group) * self._group  # TRL requires whole groups
        branches = [branch for branch, _ in further.branches]
        self._branches = [*branches, *[NO_BRANCH] * (padded - len(branches))]
        try:
            made = score([dict(self._inputs[0]) for _ in range(padded)])
        finally:
            self._branches = None
        advantages = [advantage for _, advantage in further.branches]
        advantages += [0.0] * (further.count - len(advantages))
        made["advantages"] = torch.tensor(advantages, device=output["advantages"].device)
        return {
            name: _joined(name, value, made[name], further.count, self._padding) for name, value in output.items()
        }

    def _count_of_rows(self, wanted: int, own: int) -> int:
        """Return the rows that each process adds: the maximum any process wants, a multiple of the batches."""
        rows: int = min(max(gather_object([wanted])), ROWS_MAX * own)
        return -(-rows // self._batches) * self._batches


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


def _rows_of(branches: list[Branch], end: int) -> dict[str, Any]:
    """Return the branches in TRL's format; a branch without turns is an end token without a log-probability."""
    empty = Branch([end, end], 1, [0, 0], [0.0, 0.0], [], [])
    rows = [branch if branch.turns else empty for branch in branches]
    return {
        "prompt_ids": [branch.token_ids[: branch.prompt_tokens] for branch in rows],
        "completion_ids": [branch.token_ids[branch.prompt_tokens :] for branch in rows],
        "logprobs": [branch.logprobs[branch.prompt_tokens :] if branch.turns else [None] for branch in rows],
        "env_mask": [branch.mask[branch.prompt_tokens :] for branch in rows],
    }


def _answers(session: Session, text: str) -> list[dict[str, Any]]:
    """Return a conversation from its first answer on."""
    if not session.branches:
        return [{"role": "assistant", "content": text}]
    branch = session.branches[-1]
    answers = [index for index, message in enumerate(branch.messages) if message.get("role") == "assistant"]
    return branch.messages[answers[-len(branch.turns)] :] if len(answers) >= len(branch.turns) else branch.messages
