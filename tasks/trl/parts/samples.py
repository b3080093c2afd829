"""Hand a step's samples, for people to read, to the writer once TRL has scored them.

TRL already gathers prompts, completions and advantages of all processes in its logs. Rewards are taken from an
earlier gather, because the logs key them by function name and two names may be equal. Lengths and mismatches are
local to each process, so one small tensor is gathered for them. This module draws no random numbers and does not
change the training data. Failures are only logged: that tensor is gathered even then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog
import torch

from grpo_orch.checkpoint.records.rollouts import Rollout, Session
from grpo_orch.checkpoint.records.samples import SCHEMA, Group, Head, Message, Sample, SampleWriter
from grpo_orch.checkpoint.store.codec import to_json
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.wire import Completion

log = structlog.get_logger()

MEASURES = 4  # per completion: tokens, is-cut, mean and maximum mismatch


class Samples:
    """The samples of one process's calls.

    Args:
        ends: tokens after which a completion is not cut.
        functions: the names of the reward functions.
        weights: their weights.
        group: completions of a prompt.
        timeline: the trained timeline.

    Attributes:
        writer: stores them; None except in the first process.
    """

    def __init__(
        self,
        accelerator: Any,
        ends: Collection[int],
        functions: Sequence[str],
        weights: Sequence[float],
        group: int,
        timeline: int,
    ) -> None:
        self._accelerator, self._ends = accelerator, ends
        self._functions, self._weights = list(functions), list(weights)
        self._group, self._timeline = group, timeline
        self.writer: SampleWriter | None = None
        self._made: tuple[list[list[int]], Any] = ([], None)  # ids and mask of this process's last completions
        self._rewards: torch.Tensor | None = None  # of all processes' last completions, (completions, functions)
        self._scored_at = PolicyVersion(-1, -1)
        self._scored_calls = 0

    def note_completions(self, ids: list[list[int]], mask: list[list[int]] | None) -> None:
        """Remember this process's completions of the present call."""
        self._made = ids, mask

    def note_rewards(self, per_function: torch.Tensor) -> None:
        """Remember the rewards of the present call, of all processes."""
        self._rewards = per_function

    def keep(self, step: int, output: dict[str, Any], logs: Mapping[str, Any], rollouts: list[Rollout]) -> None:
        """Hand a scored training call to the writer. Call it in every process.

        Args:
            step: the steps before it.
            output: TRL's, with this process's rows.
            logs: TRL's, of all processes.
            rollouts: the call's completions, in the first process.
        """
        measured = self._accelerator.gather(self._measured_or_nan(output))
        if self.writer is None:
            return
        try:
            self._offer(self.writer, PolicyVersion(self._timeline, step), measured.tolist(), logs, rollouts)
        except Exception as error:  # noqa: BLE001  # training continues after any error
            log.warning("samples_not_kept", reason=repr(error)[:500])

    def _measured_or_nan(self, output: dict[str, Any]) -> torch.Tensor:
        """Return a tensor of fixed shape even on errors, because a missing process would block the gather."""
        unknown = torch.full((len(output["completion_ids"]), MEASURES), math.nan, device=self._accelerator.device)
        try:
            measured: torch.Tensor = self._measured(output)
            if measured.shape != unknown.shape:
                raise ValueError(f"measured {tuple(measured.shape)}, expected {tuple(unknown.shape)}")
        except Exception as error:  # noqa: BLE001  # training continues after any error
            log.warning("samples_not_measured", reason=repr(error)[:500])
            return unknown
        return measured

    def _measured(self, output: dict[str, Any]) -> torch.Tensor:
        """Return tokens, is-cut, mean and maximum mismatch of each of this process's completions.

        Shape (completions, MEASURES); NaN means unknown.
        """
        ids, mask = self._made
        tokens = [len(row) for row in ids] if mask is None else [sum(row) for row in mask]
        cut = [row[-1] not in self._ends for row in ids]
        measured = torch.tensor(
            [[*counted, math.nan, math.nan] for counted in zip(tokens, cut, strict=True)],
            device=self._accelerator.device,
        )
        if {"old_per_token_logps", "sampling_per_token_logps"} <= output.keys():
            token_mask = output["completion_mask"] * output.get("tool_mask", 1)
            mismatch = (output["old_per_token_logps"] - output["sampling_per_token_logps"]).abs().float()
            mismatch = mismatch.masked_fill(token_mask == 0, math.nan)
            measured[:, 2] = mismatch.nanmean(dim=1)
            measured[:, 3] = mismatch.nan_to_num(nan=-1.0).amax(dim=1)
            measured[:, 3].masked_fill_(measured[:, 2].isnan(), math.nan)
        return measured

    def _offer(
        self,
        writer: SampleWriter,
        version: PolicyVersion,
        measured: list[list[float]],
        logs: Mapping[str, Any],
        rollouts: list[Rollout],
    ) -> None:
        count, size = len(measured), self._group
        if version != self._scored_at:
            self._scored_at, self._scored_calls = version, 0
        call, self._scored_calls = self._scored_calls, self._scored_calls + 1
        prompts, completions = list(logs["prompt"])[-count:], list(logs["completion"])[-count:]
        advantages = list(logs["advantages"])[-count:]
        rewards = [] if self._rewards is None else self._rewards.tolist()
        if len(rewards) != count:
            raise ValueError(f"{len(rewards)} completions were scored, expected {count}")
        names, weights = self._functions, self._weights
        first = rollouts[0].completions if rollouts and len(rollouts[0].completions) == count else None
        is_single_turn = len(rollouts) == 1
        sessions = rollouts[0].sessions if rollouts and len(rollouts[0].sessions) == count else None
        now_s = time.time()

        def build() -> tuple[Head, list[Group]]:
            made = [
                _sample(
                    _messages(completions[row]),
                    rewards[row],
                    weights,
                    advantages[row],
                    measured[row],
                    None if first is None else first[row],
                    is_single_turn,
                )
                for row in range(count)
            ]
            if sessions is not None:
                made = [
                    _with_session(sample, session, prompt)
                    for sample, session, prompt in zip(made, sessions, prompts, strict=True)
                ]
            groups = [Group(_messages(prompts[row]), made[row : row + size]) for row in range(0, count, size)]
            head = Head(SCHEMA, str(version), version.step + 1, call, now_s, names, weights, len(groups))
            return head, groups

        writer.offer(build)


def _sample(
    completion: list[Message],
    rewards: list[float],
    weights: Sequence[float],
    advantage: float,
    measured: Sequence[float],
    made: Completion | None,
    is_single_turn: bool,
) -> Sample:
    finite_rewards = [_finite(reward) for reward in rewards]
    weighted = [
        reward * weight for reward, weight in zip(finite_rewards, weights, strict=True) if reward is not None
    ]
    refused = None if made is None else made.refused
    tokens, cut, mismatch_mean, mismatch_max = measured
    is_cut = _finite(cut)
    if made is not None and is_single_turn:  # TRL sees only end tokens, not stop strings
        is_cut = float(made.finish_reason == "length")
    count = _finite(tokens)
    return Sample(
        completion=[] if refused else completion,
        rewards=finite_rewards,
        reward=_finite(sum(weighted)) if weighted else None,
        advantage=_finite(advantage),
        tokens=0 if refused else None if count is None else int(count),
        cut=None if refused or is_cut is None else bool(is_cut),
        node="" if made is None else made.node,
        policy="" if made is None else made.policy,
        handed_over=[] if made is None else made.handed_over,
        mismatch_mean=_finite(mismatch_mean),
        mismatch_max=_finite(mismatch_max),
        refused=refused or "",
    )


def _with_session(sample: Sample, session: Session, prompt: Any) -> Sample:
    """Return the sample with its agent's conversation after the prompt."""
    if not session.branches:
        return replace(
            sample,
            completion=[],
            cut=session.is_cut,
            failed=session.failed or "it asked for no turn",
            policy=session.policy,
        )
    branch = session.branches[-1]
    conversation, turns = list(branch.messages), list(branch.turns)
    has_prompt = not isinstance(prompt, str) and conversation[: len(prompt)] == list(prompt)
    start = len(prompt) if has_prompt else 0
    answers = [index for index, message in enumerate(conversation) if message.get("role") == "assistant"]
    tokens = {index: turn.end - turn.start for index, turn in zip(answers[-len(turns) :], turns, strict=False)}
    messages = [
        replace(message, tokens=tokens.get(index)) for index, message in enumerate(_messages(conversation))
    ]
    return replace(
        sample,
        completion=messages[start:],
        cut=session.is_cut,
        node=session.node,
        policy=session.policy,
        handed_over=[part for turn in turns for part in turn.handed_over],
        failed=session.failed,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _messages(content: Any) -> list[Message]:
    """Convert a prompt or completion of TRL, which is text or messages."""
    if isinstance(content, str):
        return [Message(content)]
    return [Message(_text(message), str(message.get("role") or "")) for message in content]


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(map(_part, content)) if isinstance(content, list) else str(content)
    calls = message.get("tool_calls")
    return f"{content}\n{to_json(calls).decode()}".strip() if calls else content


def _part(part: Any) -> str:
    """Return the text of a message part; datasets set it to None for parts without text."""
    if not isinstance(part, dict):
        return str(part)
    return str(part["text"]) if part.get("text") is not None else f"[{part.get('type')}]"
