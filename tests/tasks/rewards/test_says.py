"""Which answers can be read, as the functions that score them say it."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.rewards import gsm8k_reward, math_reward, think_format, xml_format
from tasks.rewards.guard import guarded
from tasks.rewards.in_workers import with_arguments

PROMPTS = ["p"] * 6


@pytest.mark.parametrize(
    ("reward", "column", "right", "completions", "readable"),
    [
        (
            gsm8k_reward,
            "answer",
            "#### 4",
            ["#### 4", "#### $1,005.", "#### four", "4", "<think>#### 4", "<think>x</think>#### 5"],
            [True, True, False, False, False, True],
        ),
        (
            math_reward,
            "solution",
            "4",
            ["\\boxed{4}", "$\\frac{1}{2}$", "the answer is 7", "none at all", "", "<think>\\boxed{4}"],
            [True, True, True, False, False, False],
        ),
    ],
)
def test_what_is_right_can_be_read_and_what_cannot_is_never_right(
    reward: Any, column: str, right: str, completions: list[str], readable: list[bool]
) -> None:
    told = {"prompts": PROMPTS, "completions": completions, column: [right] * len(completions)}
    assert reward.readable(**told) == readable
    scores = reward(**told)
    assert scores[0] == reward.full == 1.0
    assert not any(score and not read for score, read in zip(scores, readable, strict=True))


def test_arguments_and_the_guard_leave_what_a_function_says() -> None:
    reward = with_arguments(gsm8k_reward, {"tag": "answer", "column": "right"})
    kept: Any = guarded(reward, "tasks.rewards.gsm8k_reward", "fail", 10.0, lambda _: False)
    completions = ["<answer>4</answer>", "#### 4"]
    assert kept.readable(prompts=PROMPTS[:2], completions=completions, right=["4", "4"]) == [True, False]
    assert kept.full == 1.0


def test_formats_say_that_they_look_at_nothing_else() -> None:
    assert (think_format.is_form, xml_format.is_form) == (True, True)  # type: ignore[attr-defined]  # set by `form`
    assert not hasattr(gsm8k_reward, "is_form")
