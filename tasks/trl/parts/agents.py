"""Pass the run's agent sessions to TRL as completions, through its `rollout_func`.

A session becomes one row, made of its last-finished branch (`tasks.trl.parts.branches` handles the others). The
prompt is everything before the first answer, the completion everything after it, and the mask marks the policy's
tokens. A session without turns is left out like a refused prompt, by a completion without a log-probability
(`tasks.trl.parts.refused`).
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import torch

from grpo_orch.checkpoint.records.rollouts import Session
from grpo_orch.policies.serving.sessions import Branch
from grpo_orch.tasks.trl.parts.branches import NO_BRANCH

AGENT = "agent"  # the reward function's name
MESSAGES, REWARD = "messages", "agent_reward"  # columns for reward functions


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
    return trainer.run_agents(len(prompts))  # type: ignore[no-any-return]


class RunsAgents:
    """Mixin that must precede a TRL trainer in its bases; it changes nothing without an agent."""

    _agent_rows: list[dict[str, Any]] | None = None  # of this process's current call
    _sessions: list[Session] | None = None  # of the same

    def run_agents(self: Any, count: int) -> dict[str, Any]:
        """Run a session for each of this process's rows and return TRL's rows."""
        if self._further is not None:
            return _rows_of(self._further, self.eos_token_ids[0])
        rows = plain_rows(self._agent_rows)
        if len(rows) != count:
            raise RuntimeError(f"TRL asks for {count} completions of {len(rows)} rows")
        samples = self.num_generations if self.model.training else self.num_generations_eval
        sessions = self.vllm_generation.run_agents(rows, samples)
        self._sessions = sessions
        self._log_sessions(sessions)
        last = [session.branches[-1] if session.branches else NO_BRANCH for session in sessions]
        columns = {
            MESSAGES: [branch.messages for branch in last],
            REWARD: [session.reward for session in sessions],
        }
        return {**_rows_of(last, self.eos_token_ids[0]), **columns}

    def without_failed(self: Any, per_function: torch.Tensor) -> torch.Tensor:
        """Set the rewards of failed sessions to NaN; shape (completions of all processes, functions)."""
        if self._sessions is not None:
            here = [bool(session.failed) for session in self._sessions]
            failed = self.accelerator.gather(torch.tensor(here, device=self.accelerator.device))
            per_function[failed] = math.nan
        return per_function

    def score_without_samples(self: Any, inputs: list[Any]) -> dict[str, Any]:
        """Run TRL's generation and scoring, skipping the classes before this one in the bases."""
        return RunsAgents._generate_and_score_completions(self, inputs)

    def _generate_and_score_completions(self: Any, inputs: list[Any]) -> dict[str, Any]:
        self._agent_rows = inputs
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]  # the trainer's
        if self.rollout_func is rollout_func:
            # A session does not end with an end token, so TRL would count every session as cut. Delete the
            # metrics only here, because leaving out failed rows computes them again.
            metrics = self._metrics["train" if self.model.training else "eval"]
            for name in [name for name in metrics if "clipped_ratio" in name or "terminated_length" in name]:
                del metrics[name]
        return output

    def _generate(self: Any, prompts: list[Any]) -> tuple[Any, ...]:
        if self.rollout_func is not rollout_func:
            return super()._generate(prompts)  # type: ignore[misc, no-any-return]  # the same
        # Pass empty texts: TRL would read each conversation as one message.
        generated = list(super()._generate([""] * len(prompts)))  # type: ignore[misc]  # the same
        if self._further is None and not isinstance(prompts[0], str):
            texts = generated[3]
            generated[3] = [_answers(session, text) for session, text in zip(self._sessions, texts, strict=True)]
        return tuple(generated)

    def _log_sessions(self: Any, sessions: list[Session]) -> None:
        for session in sessions:
            turns = sum(branch.mask[turn.start] for branch in session.branches for turn in branch.turns)
            self._log_metric("agent/turns", float(turns))
            self._log_metric("agent/failed", float(bool(session.failed)))


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
