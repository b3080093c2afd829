"""Give TRL's loop over tool calls the same number of turns in each process.

A turn is a generate call, for which TRL gathers the prompts of all processes as if each had as many. Here each
process adds NO_PROMPT to its prompts, and continues with NO_PROMPT alone until all processes are done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.utils import gather_object

from grpo_orch.tasks.trl.fleet_client import NO_PROMPT, Prompt

Made = tuple[list[list[int]], list[Any]]  # of a turn: completions and their log-probabilities
Generate = Callable[[list[Prompt]], Made]


class CommonTurns:
    """The turns of one trainer's processes."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._in_loop = False  # after the first turn, with several processes

    def loop(self, run: Callable[[], Any], generate: Generate) -> Any:
        """Run this process's loop, then take turns until all processes are done. Returns the loop's result."""
        self._in_loop = self._accelerator.num_processes > 1
        try:
            result = run()
            while self._in_loop and (longest := max(gather_object([0]))):
                generate([NO_PROMPT] * longest)
        finally:
            self._in_loop = False
        return result

    def generate(self, prompt_ids: list[list[int]], generate: Generate) -> Made:
        """Take one turn, with as many prompts as the process that has most."""
        own = len(prompt_ids)
        longest = max(gather_object([own])) if self._in_loop else own
        completion_ids, logprobs = generate([*prompt_ids, *[NO_PROMPT] * (longest - own)])
        return completion_ids[:own], logprobs[:own]
