"""Turns of several processes: TRL's loop over tool calls, brought to the same number of turns in each.

A turn is a generate call, for which TRL gathers the prompts of all processes as if each had as many. Here each
process fills up with prompts that are none, and goes on with none of its own until all are done.
"""

from __future__ import annotations

from typing import Any

from accelerate.utils import gather_object

from tasks.trl.fleet_client import NO_PROMPT, Prompt


class TakesTurnsTogether:
    """For a trainer of TRL's, before it in the order of its bases."""

    _in_turns = False  # of several processes, behind the first turn
    accelerator: Any

    def _tool_call_loop(self, *args: Any) -> Any:
        self._in_turns = self.accelerator.num_processes > 1
        try:
            found = super()._tool_call_loop(*args)  # type: ignore[misc]  # the trainer's
            while self._in_turns and (most := max(gather_object([0]))):
                super()._generate_single_turn([NO_PROMPT] * most, None, {}, 1)  # type: ignore[misc]  # the same
        finally:
            self._in_turns = False
        return found

    def _generate_single_turn(self, prompt_ids: list[list[int]], *rest: Any, **named: Any) -> Any:
        here = len(prompt_ids)
        most = max(gather_object([here])) if self._in_turns else here
        filled: list[Prompt] = [*prompt_ids, *[NO_PROMPT] * (most - here)]
        completion_ids, logprobs = super()._generate_single_turn(filled, *rest, **named)  # type: ignore[misc]  # the same
        return completion_ids[:here], logprobs[:here]
