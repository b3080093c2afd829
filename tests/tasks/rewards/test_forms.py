"""Formats, GSM8K's numbers, JSON and lengths."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_orch.rewards import (
    gsm8k_reward,
    json_schema,
    length_penalty,
    math_reward,
    readable_by,
    think_format,
    xml_format,
)
from grpo_orch.tasks.rewards.in_workers import with_arguments
from grpo_orch.tasks.rewards.texts import answer_of, shown
from grpo_orch.tasks.rewards.user_calls import guarded
from tests.budget import examples

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
HOSTILE = (
    "\ud800",
    "\0",
    "{" * 10_000_000,
    "[" * 10_000_000,
    "<think>" * 1_000_000,
    "```\n" * 1_000_000,
    "#" * 10_000_000,
)
PROMPTS = ["p"] * 6
PIECES = (
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "####",
    "1,000",
    "-3.50",
    "$",
    " ",
    "\n",
    "```",
    "x",
    "\ud800",
    "{",
    "}",
)
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=20).map("".join)


def chat(text: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("text", "opened", "score"),
    [
        ("<think>a</think>b", False, 1.0),
        ("\n<think>a\n</think>\n b", False, 1.0),
        ("a</think>b", True, 1.0),
        ("a</think>b", False, 0.0),
        ("<think>a</think> ", False, 0.0),
        ("<think>a</think>b</think>c", False, 0.0),
        ("<think><think>a</think>b", False, 0.0),
        ("x<think>a</think>b", False, 0.0),
        ("<think>a", False, 0.0),
        ("", False, 0.0),
    ],
)
def test_thoughts_and_then_an_answer(text: str, opened: bool, score: float) -> None:
    assert think_format([text, chat(text)], opened=opened, answer=["7"] * 2) == [score, score]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<a>x</a>\n<b>y</b>\n", 1.0),
        ("so <a>x</a><b>y</b>", 0.5),
        ("<b>y</b><a>x</a>", 0.5),
        ("<a>x</a>", 0.25),
        ("<a>x</a><b></b>", 0.5),
        ("<a>x<b>y</b></a>", 0.5),
        ("<a></a><a></a><b>y</b>", 0.25),
        ("</a><a>", 0.0),
        ("", 0.0),
    ],
)
def test_elements_in_their_order(text: str, score: float) -> None:
    assert xml_format([text], tags=["a", "b"]) == [score]
    assert xml_format([text.removeprefix("<a>")], tags=["a", "b"], opened=True)[0] == (
        score if text.startswith("<a>") else pytest.approx(score, abs=0.5)
    )


@pytest.mark.parametrize(
    ("text", "right", "score"),
    [
        ("so #### 72", "2+70\n#### 72", 1.0),
        ("#### 1,072.50 dollars", "#### 1072.5", 1.0),
        ("#### $72.", "72", 1.0),
        ("#### -3", "#### 3", 0.0),
        ("#### 71 #### 72", "#### 72", 1.0),
        ("#### 72 or 73", "#### 72", 1.0),
        ("#### 7.2.1", "#### 7.2", 0.0),
        ("72", "#### 72", 0.0),
        ("<think>#### 72</think>no", "#### 72", 0.0),
        ("<think>no</think>#### 72", "#### 72", 1.0),
        ("#### __import__('os')", "#### 72", 0.0),
        ("####" + "9" * 1_000_000, "#### 72", 0.0),
        ("#### 72", "#### unknown", None),
    ],
)
def test_gsm8k(text: str, right: str, score: float | None) -> None:
    parts = chat([{"type": "image"}, {"type": "text", "text": text}])
    assert gsm8k_reward([text, chat(text), parts], answer=[right] * 3) == [score] * 3


def test_thoughts_that_the_prompt_opened() -> None:
    """As the chat templates of R1's kind do: a completion has `</think>` alone."""
    texts = ["#### 71, no</think>#### 72", "so #### 72"]
    assert gsm8k_reward(texts, answer=["72"] * 2, opened=True) == [1.0, 0.0]
    assert gsm8k_reward(texts, answer=["72"] * 2) == [1.0, 1.0]


def test_gsm8k_in_an_element_and_another_column() -> None:
    assert gsm8k_reward(["<answer> 72 </answer>", "72"], column="gold", tag="answer", gold=["72"] * 2) == [
        1.0,
        0.0,
    ]
    with pytest.raises(TypeError, match="needs a column `answer`"):
        gsm8k_reward(["#### 1"], solution=["1"])


def test_json_by_a_schema() -> None:
    cases = {'{"n": 1}': 1.0, '{"n": "1"}': 0.0, "{": 0.0, "": 0.0, 'Here:\n```json\n{"n": 2}\n```\n': 1.0}
    cases |= {'<think>{}</think>{"n": 3}': 1.0, '{"n": NaN}': 0.0, '{"n": ' + "9" * 5_000 + "}": 0.0}
    prompts, completions = ["p"] * len(cases), [chat(text) for text in cases]
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        assert json_schema(prompts, completions, {"schema": schema}) == list(cases.values())
    assert json_schema(["p"] * 2, ['{"n": 1}'] * 2, schema=[json.dumps(SCHEMA), "false"]) == [1.0, 0.0]
    assert json_schema(["p"], ["{}"], schema=[None]) == [None]  # a row of another dataset


def test_endless_pattern_costs_only_its_sample() -> None:
    schema = {"type": "string", "pattern": "^(a+)+$"}
    assert json_schema(["p"] * 2, [f'"{"a" * 60}!"', '"aa"'], {"schema": schema}) == [0.0, 1.0]


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1e999", "NaN", "Infinity", "-Infinity", "9" * 5000])
def test_a_number_that_no_schema_can_reckon_with_ends_no_run(number: str) -> None:
    assert json_schema(["p"], [number], {"schema": {"type": "number", "multipleOf": 0.5}}) == [0.0]


def test_length() -> None:
    ids = [[0] * count for count in (0, 5, 6, 8, 10, 99)]
    assert length_penalty(ids, most_tokens=10, free_tokens=6) == [0.0, 0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="expected 0 <= free_tokens < most_tokens"):
        length_penalty(ids, most_tokens=6, free_tokens=6)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_long_or_strange_text_is_only_wrong(text: str) -> None:
    assert think_format([text]) == [0.0]
    assert xml_format([text]) == [0.0]
    assert gsm8k_reward([text], answer=["1"]) == [0.0]
    assert json_schema(["p"], [text], {"schema": {"type": "object"}}) == [0.0]


@given(texts)
@settings(max_examples=examples(500))
def test_any_text_has_a_score(text: str) -> None:
    for found in (think_format([text]), xml_format([text]), gsm8k_reward([text], answer=["#### 1000"])):
        assert found[0] is not None
        assert 0.0 <= found[0] <= 1.0
    assert answer_of(text) in text
    assert shown(text).isascii()


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
def test_right_answer_is_readable_and_unreadable_never_right(
    reward: Any, column: str, right: str, completions: list[str], readable: list[bool]
) -> None:
    told = {"prompts": PROMPTS, "completions": completions, column: [right] * len(completions)}
    assert reward.readable(**told) == readable
    scores = reward(**told)
    assert scores[0] == reward.full == 1.0
    assert not any(score and not read for score, read in zip(scores, readable, strict=True))


def test_arguments_and_guard_keep_a_functions_attributes() -> None:
    reward = with_arguments(gsm8k_reward, {"tag": "answer", "column": "right"})
    kept: Any = guarded(reward, "grpo_orch.rewards.gsm8k_reward", "fail", 10.0, lambda _: False)
    completions = ["<answer>4</answer>", "#### 4"]
    assert kept.readable(prompts=PROMPTS[:2], completions=completions, right=["4", "4"]) == [True, False]
    assert kept.full == 1.0


def test_readability_of_an_async_function_gets_its_arguments() -> None:
    @readable_by(lambda completions, tag, **_: [tag in one for one in completions])
    async def judged(completions: list[str], tag: str, **_: Any) -> list[float]:
        return [float(one == tag) for one in completions]

    bound: Any = with_arguments(judged, {"tag": "x"})
    assert bound.readable(completions=["x", "y"]) == [True, False]


def test_formats_declare_that_they_check_form_only() -> None:
    assert (think_format.is_form, xml_format.is_form) == (True, True)  # type: ignore[attr-defined]  # set by `form`
    assert not hasattr(gsm8k_reward, "is_form")
