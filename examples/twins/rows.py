"""What the tiny twins are asked, in the columns of the recipes' own datasets, and how a model may answer.

What has to be worked out is one more than a digit, which a model of 0.1 M parameters learns in seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
Answer = Callable[[Row, bool, bool], str]  # (the row, is it right, has it the form that is asked for)

NAMES = ("Ann", "Bob", "Eve", "Tom")
THINGS = ("pens", "cups", "hats")
ASKED = ("What is", "How much is", "Which number is")


def gsm8k() -> list[Row]:
    return [
        {
            "question": f"{name} has {n} {THINGS[n % 3]} and buys one more. How many?",
            "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}",
        }
        for n in range(1, 9)
        for name in NAMES
    ]


def mathematics(held_out: bool) -> list[Row]:
    return [
        {
            "problem": f"{asked} ${n} + 1$?",
            "level": "Level 1",
            "type": "Algebra",
            "solution": f"\\boxed{{{n + 1}}}",
        }
        for n in range(1, 9)
        for which, asked in enumerate(ASKED)
        if ((n + which) % len(ASKED) == 0) == held_out
    ]


def mbpp() -> list[Row]:
    return [
        {
            "text": f"Write a function that adds {n}.",
            "code": "",
            "test_list": [f"assert add(0) == {n}", f"assert add(20) == {20 + n}"],
        }
        for n in range(1, 10)
    ]


def extraction() -> list[Row]:
    schema = (
        '{{"properties": {{"{0}": {{"type": "integer"}}}}, "required": ["{0}"], "additionalProperties": false}}'
    )
    return [
        {"title": "A note", "schema": schema.format(thing), "text": f"{name} has {n} {thing}."}
        for thing in THINGS
        for name in NAMES
        for n in range(1, 10)
    ]


def after_hashes(row: Row, right: bool, formed: bool) -> str:
    number = _digit(int(row["answer"].rpartition("#### ")[2]), right)
    return f"I add.\n#### {number}" if formed else f"I add.\n{number}"


def in_xml(row: Row, right: bool, formed: bool) -> str:
    number = _digit(int(row["answer"].rpartition("#### ")[2]), right)
    answer = f"<answer>\n{number}\n</answer>"
    if formed:
        return f"<reasoning>\nI add.\n</reasoning>\n{answer}"
    return random.choice([f"<reasoning>\nI add.\n{answer}", f"I add.\n{answer}", f"I add.\n{number}"])


def in_a_box(row: Row, right: bool, formed: bool) -> str:
    number = _digit(int(row["solution"].removeprefix("\\boxed{").removesuffix("}")), right)
    boxed = f"\\boxed{{{number}}}"
    return f" I add. </think> <answer>{boxed}</answer>" if formed else f" I add. {boxed}"


def as_a_program(row: Row, right: bool, formed: bool) -> str:
    number = _digit(int(row["test_list"][0].rpartition(" ")[2]), right)
    return f"```python\ndef add(x){':' if formed else ''} return x + {number}\n```"


def as_json(row: Row, right: bool, formed: bool) -> str:
    thing = row["text"].split()[-1].rstrip(".")
    key = thing if right else random.choice([one for one in THINGS if one != thing])
    return f'{{"{key}": {row["text"].split()[2]}{"}" if formed else ""}'


def _digit(number: int, right: bool) -> int:
    return number if right else random.choice([one for one in range(1, 10) if one != number])


# By recipe: each file's rows, and how they are answered.
TWINS: dict[str, dict[str, tuple[list[Row], Answer]]] = {
    "qwen-32b": {
        "gsm8k.jsonl": (gsm8k(), after_hashes),
        "mbpp.jsonl": (mbpp(), as_a_program),
        "extraction.jsonl": (extraction(), as_json),
    },
    "math-two-gpus": {
        "math.jsonl": (mathematics(held_out=False), in_a_box),
        "held_out.jsonl": (mathematics(held_out=True), in_a_box),
    },
    "gsm8k-zero2": {"gsm8k.jsonl": (gsm8k(), after_hashes)},
    "llama-one-card": {"gsm8k.jsonl": (gsm8k(), in_xml)},
}
