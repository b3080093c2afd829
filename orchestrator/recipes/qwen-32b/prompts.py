"""Prompts that a template cannot express."""

from __future__ import annotations

from typing import Any

SYSTEM = "Answer with one block of Python, fenced by ```python and ```."


def of_mbpp(row: dict[str, Any]) -> list[dict[str, str]]:
    """Return the task with its first test, which shows how the function is called."""
    task = f"{row['text']}\nIt should pass this test: {row['test_list'][0]}"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
