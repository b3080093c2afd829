"""Sessions of the run's agent as TRL's completions, through its `rollout_func`.

A session is a row, of the branch that ended last (`tasks.trl.parts.branches` has the others): the prompt is what
was there before its first answer, the completion all that came after, and the mask marks the tokens that the
policy made. A session without any turn is left out as a refused prompt is, by a
completion without a log-probability (`tasks.trl.parts.refused`).
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import torch

from checkpoint.records.rollouts import Session
from policies.serving.sessions import Branch
from tasks.trl.parts.branches import NO_BRANCH

AGENT = "agent"  # the reward function's name
MESSAGES, REWARD = "messages", "agent_reward"  # columns for reward functions


def agent(agent_reward: list[float | None], **_: Any) -> list[float | None]:
    """What the agents returned, as a reward function."""
    return agent_reward


def example_columns(count: int) -> dict[str, list[Any]]:
    """What reward functions get of so many sessions, to try them with."""
    said = [{"role": "user", "content": "What is 6 times 7?"}, {"role": "assistant", "content": "42"}]
    return {MESSAGES: [said] * count, REWARD: [1.0] * count}


def plain_rows(rows: list[dict[str, Any]]) -> list[Any]:
    """Rows as an agent gets them: what JSON does not know is text."""
    return [json.loads(json.dumps(row, default=_text)) for row in rows]


def _text(value: Any) -> str:
    """The same in every attempt: Python names many objects by where they are in memory."""
    return re.sub(r" at 0x[0-9A-Fa-f]+", "", str(value))


def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """TRL's seam: one row for each of the prompts, in their order."""
    return trainer.run_agents(len(prompts))  # type: ignore[no-any-return]


class RunsAgents:
    """For a trainer of TRL's, before it in the order of its bases; one without an agent is left as it is."""

    _agent_rows: list[dict[str, Any]] | None = None  # of this process's present call
    _sessions: list[Session] | None = None  # of the same

    def run_agents(self: Any, count: int) -> dict[str, Any]:
        """Run a session for each of this process's rows; what TRL wants of them."""
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
        """Rewards of all processes, completion by function: none where the agent failed."""
        if self._sessions is not None:
            here = [bool(session.failed) for session in self._sessions]
            failed = self.accelerator.gather(torch.tensor(here, device=self.accelerator.device))
            per_function[failed] = math.nan
        return per_function

    def score_without_samples(self: Any, inputs: list[Any]) -> dict[str, Any]:
        """TRL's own generation and scoring, without what is before this class in the order of bases."""
        return RunsAgents._generate_and_score_completions(self, inputs)

    def _generate_and_score_completions(self: Any, inputs: list[Any]) -> dict[str, Any]:
        self._agent_rows = inputs
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]  # the trainer's
        if self.rollout_func is rollout_func:
            # A session does not end with a token of the model's, so TRL would count each one as cut. Here and not
            # earlier: what is left out is counted again in between.
            metrics = self._metrics["train" if self.model.training else "eval"]
            for name in [name for name in metrics if "clipped_ratio" in name or "terminated_length" in name]:
                del metrics[name]
        return output

    def _generate(self: Any, prompts: list[Any]) -> tuple[Any, ...]:
        if self.rollout_func is not rollout_func:
            return super()._generate(prompts)  # type: ignore[misc, no-any-return]  # the same
        # As texts: TRL would read each conversation as one message.
        found = list(super()._generate([""] * len(prompts)))  # type: ignore[misc]  # the same
        if self._further is None and not isinstance(prompts[0], str):
            found[3] = [_answers(session, text) for session, text in zip(self._sessions, found[3], strict=True)]
        return tuple(found)

    def _log_sessions(self: Any, sessions: list[Session]) -> None:
        for session in sessions:
            made = sum(branch.mask[turn.start] for branch in session.branches for turn in branch.turns)
            self._log_metric("agent/turns", float(made))
            self._log_metric("agent/failed", float(bool(session.failed)))


def _rows_of(branches: list[Branch], end: int) -> dict[str, Any]:
    """What TRL takes for completions; without a branch it is its end alone, without a log-probability."""
    nothing = Branch([end, end], 1, [0, 0], [0.0, 0.0], [], [])
    made = [branch if branch.turns else nothing for branch in branches]
    return {
        "prompt_ids": [branch.token_ids[: branch.prompt_tokens] for branch in made],
        "completion_ids": [branch.token_ids[branch.prompt_tokens :] for branch in made],
        "logprobs": [branch.logprobs[branch.prompt_tokens :] if branch.turns else [None] for branch in made],
        "env_mask": [branch.mask[branch.prompt_tokens :] for branch in made],
    }


def _answers(session: Session, text: str) -> list[dict[str, Any]]:
    """A conversation from its first answer on."""
    if not session.branches:
        return [{"role": "assistant", "content": text}]
    branch = session.branches[-1]
    answers = [at for at, message in enumerate(branch.messages) if message.get("role") == "assistant"]
    return branch.messages[answers[-len(branch.turns)] :] if len(answers) >= len(branch.turns) else branch.messages
