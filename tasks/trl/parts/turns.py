"""Gives TRL's loop over tool calls the same number of turns in each process.

A turn is a generate call, for which TRL gathers the prompts of all processes as if each had as many. Here each
process adds NO_PROMPT to its prompts, and continues with NO_PROMPT alone until all processes are done.
"""

from __future__ import annotations

from typing import Any

from accelerate.utils import gather_object

from grpo_orch.tasks.trl.fleet_client import NO_PROMPT, Prompt


class TakesTurnsTogether:
    """Mixed in before TRL's trainer."""

    _in_turns = False  # after the first turn, with several processes
    accelerator: Any

    def _tool_call_loop(self, *args: Any) -> Any:
        self._in_turns = self.accelerator.num_processes > 1
        try:
            answer = super()._tool_call_loop(*args)  # type: ignore[misc]  # the trainer's
            while self._in_turns and (most := max(gather_object([0]))):
                super()._generate_single_turn([NO_PROMPT] * most, None, {}, 1)  # type: ignore[misc]  # the same
        finally:
            self._in_turns = False
        return answer

    def _generate_single_turn(self, prompt_ids: list[list[int]], *rest: Any, **named: Any) -> Any:
        own = len(prompt_ids)
        most = max(gather_object([own])) if self._in_turns else own
        filled: list[Prompt] = [*prompt_ids, *[NO_PROMPT] * (most - own)]
        completion_ids, logprobs = super()._generate_single_turn(filled, *rest, **named)  # type: ignore[misc]  # the same
        return completion_ids[:own], logprobs[:own]
