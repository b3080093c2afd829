"""Prompts of rows that no template can tell."""

from __future__ import annotations

from typing import Any

SYSTEM = "Answer with one block of Python, fenced by ```python and ```."


def of_mbpp(row: dict[str, Any]) -> list[dict[str, str]]:
    """What is asked, and by the first of its tests how the function is called."""
    asked = f"{row['text']}\nIt should pass this test: {row['test_list'][0]}"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
