"""A reward function that fails is named with its prompt, and by the run's rule costs those scores or the run."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.spec import OnBadReward
from grpo_orch.tasks.rewards.user_calls import BadReward, guarded
from tests.budget import HANG_S

PROMPTS = ["one", "one", "two", "two"]
COMPLETIONS = ["a", "b", "c", "d"]


def never(error: BaseException) -> bool:
    return isinstance(error, MemoryError)


def called(function: Any, rule: OnBadReward = "none", timeout_s: float = HANG_S, **told: Any) -> Any:
    guard = guarded(function, "rewards.mine", rule, timeout_s, never)
    return guard(prompts=PROMPTS, completions=COMPLETIONS, number=[1, 2, 3, 4], **told)


def by_number(completions: list[str], number: list[int], **_: Any) -> list[float]:
    assert len(completions) == len(number)
    return [1.0 / (one - 3) for one in number]


def spins_on_c(completions: list[str], **_: Any) -> list[float]:
    while "c" in completions:
        try:
            time.sleep(0.001)
        except Exception:  # noqa: BLE001  # as users write it
            continue
    return [1.0 for _ in completions]


def spins_as_it_is_read(completions: list[str], **_: Any) -> Iterator[float]:
    yield from spins_on_c(completions)


async def by_number_awaited(**told: Any) -> list[float]:
    return by_number(**told)


async def never_done(**_: Any) -> list[float]:
    await asyncio.sleep(1e6)
    return []


def returns(*values: Any) -> Any:
    def mine(**_: Any) -> Any:
        return list(values)

    return mine


def test_working_function_is_passed_through() -> None:
    assert called(returns(1, True, None, 0.5)) == [1.0, 1.0, None, 0.5]
    assert guarded(returns(), "r.mine", "fail", 1.0, never).__name__ == "mine"


@pytest.mark.parametrize(
    ("function", "expected", "says", "fails"),
    [
        (
            by_number,
            [-0.5, -1.0, None, None],
            "raised ZeroDivisionError: float division by zero",
            ", for the prompt 'two' and the completion 'c'",
        ),
        (
            returns(1.0, math.nan, math.inf, 2),
            [1.0, None, None, 2.0],
            "returned nan",
            ", for the prompt 'one' and the completion 'b'",
        ),
        (spins_on_c, [1.0, 1.0, None, None], "timed out", ", for the prompt 'two'"),
        (spins_as_it_is_read, [1.0, 1.0, None, None], "timed out", ", for the prompt 'two'"),
        (
            returns(1.0, 2.0),
            [1.0, 2.0, 1.0, 2.0],
            "",
            "2 values for 4 completions when called for 2 prompts, but for no prompt separately",
        ),
        (returns(1.0), [None] * 4, "it returned 1 values for 2 completions", "for the prompt 'one'"),
        (returns("right", 1), [None] * 4, "could not convert string to float: 'right'", "for the prompt 'one'"),
    ],
)
def test_failing_prompts_have_no_score_or_end_the_run(function: Any, expected: Any, says: str, fails: str) -> None:
    said: list[tuple[str, float]] = []
    limit_s = 1.0 if says == "timed out" else HANG_S
    with capture_logs() as entries:
        found = called(function, timeout_s=limit_s, log_metric=lambda *one: said.append(one), log_extra=print)
    assert found == expected
    log = [one for one in entries if one["event"] == "bad_reward"]
    assert (says == "") == (not log) == (not said)
    if says:
        assert log[0]["function"] == "rewards.mine"
        assert says in log[0]["problem"]
        assert said[0] == ("reward_failures/mine", 1.0)
    with pytest.raises(BadReward) as caught:
        called(function, "fail", timeout_s=limit_s)
    assert fails in str(caught.value)
    assert "\n" not in str(caught.value)


ENDLESS = """
import re
from grpo_orch.tasks.rewards import user_calls

def endless(**_):
    re.match(r"(a+)+$", "a" * 64 + "b")

user_calls.GRACE_S = 0.1
user_calls.guarded(endless, "rewards.endless", "none", 0.1, lambda _: False)(prompts=["p"], completions=["c"])
"""


def test_reward_holding_the_gil_ends_the_process_with_its_place() -> None:
    done = subprocess.run([sys.executable, "-c", ENDLESS], stderr=subprocess.PIPE, timeout=HANG_S, check=False)
    assert done.returncode == exit_codes.FAILED
    assert b"in endless" in done.stderr


def test_async_functions_too() -> None:
    assert asyncio.run(called(by_number_awaited)) == [None] * 4
    assert asyncio.run(called(never_done, timeout_s=0.01)) == [None] * 4
    with pytest.raises(BadReward, match="timed out"):
        asyncio.run(called(never_done, "fail", timeout_s=0.01))


def test_machines_fault_is_passed_on() -> None:
    def full(**_: Any) -> Any:
        raise MemoryError

    for rule in ("none", "fail"):
        with pytest.raises(MemoryError):
            called(full, rule)


def test_other_handlers_of_the_signal_are_left_as_they_were() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    called(spins_on_c, timeout_s=0.2)
    assert signal.getsignal(signal.SIGUSR2) == before


def leaves(**_: Any) -> list[float]:
    sys.exit(3)


async def leaves_awaited(**_: Any) -> list[float]:
    sys.exit(3)


def numbered(completions: list[str], **_: Any) -> dict[int, str]:
    return dict(enumerate(completions))


def empties(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    completions.clear()
    return [1.0 for _ in prompts]


def forks(completions: list[str], **_: Any) -> list[float]:
    """Both processes go on, as who does not know `fork` writes it."""
    os.fork()
    return [1.0 for _ in completions]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (leaves, "raised SystemExit: 3"),
        (leaves_awaited, "raised RuntimeError: SystemExit: 3"),
        (numbered, "raised TypeError: it returned a dict, expected a list"),
    ],
)
def test_forbidden_behaviour_is_named_with_its_prompt(function: Any, says: str) -> None:
    def scores(rule: OnBadReward) -> Any:
        found = called(function, rule)
        return asyncio.run(found) if asyncio.iscoroutine(found) else found

    assert scores("none") == [None] * 4
    with pytest.raises(BadReward, match=f"rewards.mine {says}, for the prompt 'one'"):
        scores("fail")


def test_function_may_change_its_own_lists() -> None:
    assert called(empties) == [1.0] * 4


def test_process_forked_by_a_function_goes_no_further() -> None:
    before, read = os.getpid(), os.pipe()
    assert called(forks) == [1.0] * 4
    if os.getpid() != before:  # here is what would train a second time
        os.write(read[1], b"!")
        os._exit(0)
    os.wait()
    os.close(read[1])
    assert os.read(read[0], 1) == b""
