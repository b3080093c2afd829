"""Worker process that scores samples from stdin.

`python -m grpo_orch.tasks.rewards.reward_worker MODULE FUNCTION MEMORY_BYTES`

`grpo_orch.rewards.in_workers` starts it without the trainer's secrets in its environment.
"""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
import resource
import sys
from collections.abc import Callable
from typing import Any, TextIO

from grpo_orch.tasks.machine.children import end_with_parent

ERROR_CHARS_MAX = 300


def main(module: str, name: str, memory_bytes: int) -> None:
    """Answer samples until the input ends."""
    end_with_parent()
    samples, answers = _take_pipes()
    try:
        reward = getattr(importlib.import_module(module), name)
        for needed in getattr(reward, "needs", ()):
            importlib.import_module(needed)
    except Exception as error:  # noqa: BLE001  # a user's module may raise anything
        _send(answers, f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX])
        return
    function: Callable[..., Any] = getattr(reward, "score", reward)  # set by `in_workers`
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _send(answers, None)
    for line in samples:
        _send(answers, _answer(function, json.loads(line)))


def _answer(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[str, float | None, str]:
    try:
        value = function(**arguments)
        score = None if value is None else float(value)
    except MemoryError:  # a cache may hold the memory, and then all later samples would fail, too
        os._exit(errno.ENOMEM)
    except RecursionError:
        return "failed", None, "RecursionError"
    except Exception as error:  # noqa: BLE001  # a user's function may raise anything
        return "raised", None, f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX]
    if score is not None and not math.isfinite(score):
        return "raised", None, f"it returned {score}; expected a finite number or None"
    return "scored", score, ""


def _send(answers: TextIO, answer: Any) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _take_pipes() -> tuple[TextIO, TextIO]:
    """Return the pipes, and replace them: the function's stdin is empty, and its output goes to the log."""
    samples, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return samples, answers


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
