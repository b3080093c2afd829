"""Handle prompts that every rollout node refuses, such as a prompt that is too long.

Each one is logged with its numbers. It is then left out of its step or ends the run, as `policies.on_bad_prompt`
requires.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from grpo_orch.policies.model.spec import OnBadPrompt
from grpo_orch.policies.serving.wire import Completion
from grpo_orch.tasks.storing.step_costs import StepCosts

log = structlog.get_logger()

# After this many different refused prompts in a row, the cause is not the prompts.
NONE_TAKEN = 8


class BadPrompts(Exception):
    """The run cannot continue with its run.yaml, and a retry would not help."""


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
        refused: dict[int, Completion] = {}  # the first refused completion by number of the prompt
        for place, completion in enumerate(completions):
            if completion.refused:
                refused.setdefault(place // samples, completion)
        rows = {number: self.row_of(prompts[number]) for number in refused}
        for number, completion in refused.items():
            tokens, limit = len(prompts[number]), completion.limit_tokens
            log.warning("prompt_refused", row=rows[number], tokens=tokens, limit=limit, reason=completion.refused)
        if not refused:
            self._refused_in_row = 0
            return
        number, completion = next(iter(refused.items()))
        first = _describe(number, rows[number], len(prompts[number]), completion)
        if self._rule == "fail":
            raise BadPrompts(f"policies.on_bad_prompt is fail: {first}")
        has_accepted = any(not completion.refused for completion in completions)
        self._refused_in_row = 0 if has_accepted else self._refused_in_row + len(prompts)
        if self._refused_in_row >= NONE_TAKEN:
            raise BadPrompts(
                f"nodes refused {self._refused_in_row} prompts in a row, so the cause is not the prompts: "
                f"{first}; see `rollout.vllm` and the sampling settings of `grpo`"
            )
        number, completion = refused.popitem()
        self._costs.refuse(len(rows), rows[number], len(prompts[number]), completion.limit_tokens)


def _describe(number: int, row: int | None, tokens: int, completion: Completion) -> str:
    which = f"prompt {number} of the call" if row is None else f"row {row} of the dataset"
    if completion.limit_tokens is None:  # it is not too long
        return f"{which}, {tokens} tokens: {completion.refused}"
    return f"{which} has {tokens} tokens, and the nodes take sequences of {completion.limit_tokens}"
