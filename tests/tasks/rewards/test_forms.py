"""Formats, GSM8K's numbers, JSON and lengths."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.rewards import (
    gsm8k_reward,
    json_schema,
    length_penalty,
    think_format,
    xml_format,
)
from tasks.rewards.texts import answer_of, element, fenced, shown, text_of
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


def chat(text: str) -> list[dict[str, Any]]:
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
    assert gsm8k_reward([text, chat(text)], answer=[right] * 2) == [score, score]


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


def test_a_pattern_that_never_ends_costs_its_own_sample() -> None:
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


def test_parts_of_a_text() -> None:
    assert [answer_of(one) for one in ("a", "<think>a", "<think>a</think>b", "a</think>b")] == ["a", "", "b", "b"]
    assert element("<a>1</a><a>2</a>", "a") == "2"
    assert element("</a><a>", "a") is None
    assert fenced("x\n```python\na\nb\n```\ny") == "a\nb"
    assert fenced("```\na\n```") == "a"
    assert fenced("```\na") is None
    assert text_of([{"role": "assistant", "content": None}]) == text_of([]) == ""
    assert text_of([{"role": "assistant", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]) == "a"
    assert shown("\x1b[2J\n") == r"'\x1b[2J\n'"


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_long_or_strange_is_wrong_and_nothing_more(text: str) -> None:
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


@given(st.integers(), st.booleans())
@settings(max_examples=examples(200))
def test_any_number_is_its_own_right_answer(number: int, commas: bool) -> None:
    text = f"#### {number:,}" if commas else f"#### {number}"
    if len(text) < 60:
        assert gsm8k_reward([text], answer=[f"#### {number}"]) == [1.0]
        assert gsm8k_reward([text], answer=[f"#### {number + 1}"]) == [0.0]
