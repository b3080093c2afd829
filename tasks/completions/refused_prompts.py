"""Handle prompts that every rollout node refuses, such as a prompt that is too long.

Each one is logged with its numbers. It is then left out of its step or ends the run, as `policies.on_bad_prompt`
requires.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from grpo_orch.policies.model.spec import OnBadPrompt
from grpo_orch.policies.serving.wire import Completion
from grpo_orch.tasks.storing.step_costs import StepCosts

log = structlog.get_logger()

# After this many different refused prompts in a row, the cause is not the prompts.
NONE_TAKEN = 8


class BadPrompts(Exception):
    """The run cannot continue with its run.yaml, and a retry would not help."""


@dataclass(frozen=True, slots=True)
class RefusedPrompt:
    """A refused prompt.

    Args:
        number: index among the prompts of the call.
        row: index in the dataset, if known.
        tokens: length of the prompt.
        limit_tokens: maximum length of prompt and completion together, if the prompt is too long.
        reason: vLLM's error message.
    """

    number: int
    row: int | None
    tokens: int
    limit_tokens: int | None
    reason: str

    def __str__(self) -> str:
        which = f"prompt {self.number} of the call" if self.row is None else f"row {self.row} of the dataset"
        if self.limit_tokens is None:
            return f"{which}, {self.tokens} tokens: {self.reason}"
        return f"{which} has {self.tokens} tokens, and the nodes take sequences of {self.limit_tokens}"


class RefusedPrompts:
    """Judge the refused prompts of each generate call.

    Attributes:
        row_of: returns a prompt's index in the dataset, or None if unknown.
    """

    def __init__(self, rule: OnBadPrompt, costs: StepCosts) -> None:
        self._rule = rule
        self._costs = costs
        self._refused_in_row = 0  # prompts refused in a row
        self.row_of: Callable[[list[int]], int | None] = lambda _: None

    def judge(self, prompts: list[list[int]], samples: int, completions: Sequence[Completion]) -> None:
        """Log the refused prompts of a call with `samples` completions per prompt. Raises BadPrompts."""
        by_prompt = [completions[first : first + samples] for first in range(0, len(completions), samples)]
        refused = [
            self._describe(number, prompts[number], of_prompt)
            for number, of_prompt in enumerate(by_prompt)
            if _refused(of_prompt)
        ]
        for prompt in refused:
            log.warning(
                "prompt_refused",
                row=prompt.row,
                tokens=prompt.tokens,
                limit=prompt.limit_tokens,
                reason=prompt.reason,
            )
        if refused and self._rule == "fail":
            raise BadPrompts(f"policies.on_bad_prompt is fail: {refused[0]}")
        has_accepted = any(not completion.refused for completion in completions)
        self._refused_in_row = 0 if has_accepted else self._refused_in_row + len(prompts)
        if self._refused_in_row >= NONE_TAKEN:
            raise BadPrompts(
                f"nodes refused {self._refused_in_row} prompts in a row, so the cause is not the prompts: "
                f"{refused[0]}; see `rollout.vllm` and the sampling settings of `grpo`"
            )
        if refused:
            self._costs.refuse(len(refused), refused[-1].row, refused[-1].tokens, refused[-1].limit_tokens)

    def _describe(self, number: int, prompt: list[int], completions: Sequence[Completion]) -> RefusedPrompt:
        first = _refused(completions)[0]
        return RefusedPrompt(number, self.row_of(prompt), len(prompt), first.limit_tokens, first.refused)


def _refused(completions: Sequence[Completion]) -> list[Completion]:
    return [completion for completion in completions if completion.refused]
