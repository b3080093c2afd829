"""Rewards of three kinds of rows. Each scores its own; of the others, which lack its column, it says None."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
CALLED = re.compile(r"([A-Za-z_]\w*)\s*\(")
TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "number": (int, float),
    "integer": int,
}

Chat = list[dict[str, str]]


def mathematics(completions: list[Chat], answer: Sequence[str | None], **_: Any) -> list[float | None]:
    """1 for the number after `####`, as GSM8K writes its own."""
    return _each(completions, answer, lambda text, right: float(_number(text) == _number(right) is not None))


def code(completions: list[Chat], test_list: Sequence[list[str] | None], **_: Any) -> list[float | None]:
    """Half for a block that is Python, all if it defines what the tests call. Nothing of it is run."""
    return _each(completions, test_list, _defines)


def schema(completions: list[Chat], schema: Sequence[str | None], **_: Any) -> list[float | None]:
    """Half for one JSON object, the rest for the share of the schema's required keys that are of its types."""
    return _each(completions, schema, _fits)


def _each(
    completions: list[Chat], wanted: Sequence[Any], score: Callable[[str, Any], float]
) -> list[float | None]:
    told = zip(completions, wanted, strict=True)
    return [None if right is None else score(chat[-1]["content"], right) for chat, right in told]


def _number(text: str) -> float | None:
    _, marked, end = text.rpartition("####")
    found = NUMBER.search(end) if marked else None
    return float(found[0].replace(",", "")) if found else None


def _defines(text: str, tests: list[str]) -> float:
    block = BLOCK.search(text)
    try:
        tree = ast.parse(block[1] if block else "")
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # a model may write anything
        return 0.0
    called = set(CALLED.findall(tests[0]))
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return 0.0 if not tree.body else 1.0 if called & defined else 0.5


def _fits(text: str, schema: str) -> float:
    try:
        found, wanted = json.loads(text), json.loads(schema)
    except (ValueError, RecursionError):
        return 0.0
    if not isinstance(found, dict):
        return 0.0
    properties = wanted.get("properties", {})
    required = wanted.get("required") or list(properties)
    fit = sum(_is_of(found.get(key), properties.get(key, {}).get("type")) for key in required)
    return 0.5 + 0.5 * fit / max(1, len(required))


def _is_of(value: Any, kind: Any) -> bool:
    return value is not None and (not isinstance(kind, str) or isinstance(value, TYPES.get(kind, object)))
