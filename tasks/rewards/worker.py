"""A worker: `python -m tasks.rewards.worker MODULE FUNCTION MEMORY_BYTES`. It calls the function with
what it reads.

It has none of the trainer's secrets in its environment, and memory of its own: see `tasks.rewards.in_workers`,
which starts it.
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

from tasks.machine.children import end_with_parent

SAID_MAX = 300  # characters of an error


def main(module: str, name: str, memory_bytes: int) -> None:
    """Answer until the input ends."""
    end_with_parent()
    samples, answers = _take_pipes()
    try:
        found = getattr(importlib.import_module(module), name)
        for needed in getattr(found, "needs", ()):
            importlib.import_module(needed)
    except Exception as error:  # noqa: BLE001  # a user's module may raise anything
        _say(answers, f"{type(error).__name__}: {error}"[:SAID_MAX])
        return
    function: Callable[..., Any] = getattr(
        found, "score", found
    )  # what `in_workers` has made of it holds it there
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _say(answers, None)
    for line in samples:
        for arguments in json.loads(line):
            _say(answers, _answer(function, arguments))


def _answer(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[str, float | None, str]:
    try:
        value = function(**arguments)
        score = None if value is None else float(value)
    except MemoryError:  # what holds it may be a cache, and then all later samples would fail, too
        os._exit(errno.ENOMEM)
    except RecursionError:
        return "failed", None, "RecursionError"
    except Exception as error:  # noqa: BLE001  # a user's function may raise anything
        return "raised", None, f"{type(error).__name__}: {error}"[:SAID_MAX]
    if score is not None and not math.isfinite(score):
        return "raised", None, f"it returned {score}; expected a finite number or None"
    return "scored", score, ""


def _say(answers: TextIO, what: Any) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def _take_pipes() -> tuple[TextIO, TextIO]:
    """Keep the pipes from the function: it reads nothing, and what it prints goes into the log."""
    samples, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return samples, answers


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
