"""Functions that score one completion, as a user's module has them: workers import it."""

from __future__ import annotations

import os
import time

from grpo_orch.rewards import in_workers

_kept: list[bytes] = []


@in_workers(limit_s=1.0)
def by_deed(text: str, right: str, bonus: float = 0.0) -> float | None:
    """What a completion asks for is done."""
    match text:
        case "hang":
            while True:
                pass
        case "end":
            os._exit(0)
        case "kill":
            os.abort()
        case "memory":
            return float(len(bytearray(1 << 40)))
        case "keep":
            while True:
                _kept.append(bytes(64 << 20))
        case "much":
            return float(len(bytes(64 << 20)) > 0)
        case "nest":
            return by_deed.score(text, right)  # type: ignore[attr-defined, no-any-return]
        case "raise":
            raise ValueError("no such answer")
        case "nan":
            return float("nan")
        case "none":
            return None
        case "print":
            print("[1.0]")
        case "secret":
            return float("SECRET_TOKEN" in os.environ)
        case "pid":
            return float(os.getpid())
    return float(text == right) + bonus


@in_workers(limit_s=0.2)
def waits(text: str) -> float:
    """It takes no CPU time, but for ever."""
    time.sleep(1e6 if text else 0)
    return 1.0


@in_workers(needs=("no_such_module",))
def needy(text: str) -> float:
    """It needs what is not installed."""
    return float(bool(text))
