"""What becomes of a check: passed with what it found, failed with a reason, or not there with what is missing."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from benchmarks.check_gpu.lab import Lab

STACK = ("accelerate", "datasets", "peft", "tokenizers", "trl", "vllm")  # what a machine may be without


class NotThere(Exception):
    """What a check needs is not on this machine; the message names it."""


class Failed(Exception):
    """What was tried did not come out as it should; the message says how."""


Check = Callable[[Lab], str]  # returns what was found; raises NotThere, Failed or whatever ends it


@dataclass(frozen=True, slots=True)
class Outcome:
    """`found` says what was measured, why it failed, or what is missing."""

    check: str
    outcome: Literal["passed", "failed", "not there"]
    found: str
    took_s: float


def tried(name: str, check: Check, lab: Lab) -> Outcome:
    """Run one check. Whatever ends it is its outcome: this is the one broad `except` of this program."""
    begun_s = time.monotonic()
    outcome: Literal["passed", "failed", "not there"]
    try:
        outcome, found = "passed", check(lab)
    except NotThere as error:
        outcome, found = "not there", str(error)
    except Exception as error:  # noqa: BLE001
        missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if missing in STACK:
            outcome, found = "not there", f"{missing} is not installed"
        else:
            traceback.print_exc()
            outcome, found = "failed", f"{type(error).__name__}: {error}".partition("\n")[0]
            found = str(error) if isinstance(error, Failed) else found
    lab.free()
    return Outcome(name, outcome, found, round(time.monotonic() - begun_s, 1))
