"""Prompts that no rollout node takes, such as one that is too long. Each is told with its numbers, then left out
of its step, or it ends the run, as `policies.on_bad_prompt` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from policies.model.spec import OnBadPrompt
from policies.serving.wire import Completion
from tasks.storing.step_costs import StepCosts

log = structlog.get_logger()

# So many different prompts in a row of which none was taken: it is not the prompts.
NONE_TAKEN = 8


class BadPrompts(Exception):
    """The run cannot go on as its run.yaml says, and another try would not change that."""


@dataclass(frozen=True, slots=True)
class RefusedPrompt:
    """One prompt that was not taken.

    Args:
        number: its place among the prompts of the call.
        row: its place in the dataset, where that is known.
        tokens: how long it is.
        limit_tokens: how long prompt and completion may be together, where it is too long.
        why: in vLLM's words.
    """

    number: int
    row: int | None
    tokens: int
    limit_tokens: int | None
    why: str

    def __str__(self) -> str:
        which = f"prompt {self.number} of the call" if self.row is None else f"row {self.row} of the dataset"
        if self.limit_tokens is None:
            return f"{which}, {self.tokens} tokens: {self.why}"
        return f"{which} has {self.tokens} tokens, and the nodes take sequences of {self.limit_tokens}"


class RefusedPrompts:
    """Judges each generate call.

    Attributes:
        row_of: returns a prompt's place in the dataset, if it knows it.
    """

    def __init__(self, rule: OnBadPrompt, costs: StepCosts) -> None:
        self._rule = rule
        self._costs = costs
        self._none_taken = 0  # prompts in a row
        self.row_of: Callable[[list[int]], int | None] = lambda _: None

    def judge(self, prompts: list[list[int]], samples: int, completions: Sequence[Completion]) -> None:
        """Tell what was refused of a call, `samples` completions a prompt, prompt by prompt. Raises BadPrompts."""
        by_prompt = [completions[first : first + samples] for first in range(0, len(completions), samples)]
        refused = [self._describe(n, prompts[n], some) for n, some in enumerate(by_prompt) if _refused(some)]
        for one in refused:
            log.warning("prompt_refused", row=one.row, tokens=one.tokens, limit=one.limit_tokens, why=one.why)
        if refused and self._rule == "fail":
            raise BadPrompts(f"policies.on_bad_prompt is fail: {refused[0]}")
        taken = any(not one.refused for one in completions)
        self._none_taken = 0 if taken else self._none_taken + len(prompts)
        if self._none_taken >= NONE_TAKEN:
            raise BadPrompts(
                f"no node takes any prompt, {self._none_taken} in a row, so it is not the prompts: {refused[0]}; "
                "see `rollout.vllm` and the sampling settings of `grpo`"
            )
        if refused:
            self._costs.refuse(len(refused), refused[-1].row, refused[-1].tokens, refused[-1].limit_tokens)

    def _describe(self, number: int, prompt: list[int], completions: Sequence[Completion]) -> RefusedPrompt:
        one = _refused(completions)[0]
        return RefusedPrompt(number, self.row_of(prompt), len(prompt), one.limit_tokens, one.refused)


def _refused(completions: Sequence[Completion]) -> list[Completion]:
    return [one for one in completions if one.refused]
