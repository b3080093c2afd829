"""Answers are compared as mathematics, whatever else a completion does to sympy."""

from __future__ import annotations

import pytest

from grpo_orch.rewards import math_reward

CASES = [
    (r"so \boxed{\frac{2}{4}}", r"We get $\frac12$.", 1.0),
    (r"<think>\boxed{3}</think>The answer is \boxed{4}", "4", 1.0),
    (r"<think>\boxed{4}", "4", 0.0),
    ("The answer is 0.5", "1/2", 1.0),
    (r"$x^2+2x+1$", r"(x+1)^2", 1.0),
    (r"\boxed{5}", "4", 0.0),
    ("", "4", 0.0),
    ("no idea", "4", 0.0),
    ("\ud800\0", "4", 0.0),
    ("{" * 10_000_000, "4", 0.0),
    (r"\boxed{" * 20_000, "4", 0.0),
    (r"$" + r"\frac{1}" * 2_000 + "$", "4", 0.0),
    ("$__import__('os')._exit(3)$ __import__('os').abort()", "4", 0.0),
]


def test_answers_as_mathematics() -> None:
    completions = [[{"role": "assistant", "content": text}] for text, *_ in CASES]
    found = math_reward(["p"] * len(CASES), completions, solution=[right for _, right, _ in CASES])
    assert dict(zip([text[:40] for text, *_ in CASES], found, strict=True)) == {
        text[:40]: score for text, _, score in CASES
    }


def test_thoughts_that_the_prompt_opened() -> None:
    """As the chat templates of R1's kind do: a completion has `</think>` alone, or was cut before it."""
    texts = [r"\boxed{3}, no</think>\boxed{4}", r"so far \boxed{4}", r"\boxed{4}</think>\boxed{3}"]
    assert math_reward(["p"] * 3, texts, solution=["4"] * 3, opened=True) == [1.0, 0.0, 0.0]


def test_a_power_that_is_never_done_costs_its_own_sample() -> None:
    texts = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{4}"]
    assert math_reward(["p"] * 2, texts, solution=["4"] * 2) == [0.0, 1.0]


def test_a_right_answer_that_is_none_scores_nobody() -> None:
    assert math_reward(["p"] * 2, ["4"] * 2, solution=["", None]) == [None, None]
    with pytest.raises(TypeError, match="needs a column `solution`"):
        math_reward(["p"], ["4"], answer=["4"])
