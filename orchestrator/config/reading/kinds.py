"""What a value may be, in the words of a type annotation (`int | None | list[str]`), and how to say so to a user.

One small language for the fields of `policies.model.spec` and for the tables of other projects' keys.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any, Literal, Union, get_args, get_origin

from orchestrator.config.problems import LISTED_MAX, did_you_mean

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list",
    "list[str]": "a list of texts",
    "list[int]": "a list of whole numbers",
    "list[float]": "a list of numbers",
    "list[dict]": "a list of mappings",
    "dict": "a mapping",
    "dict[str]": "a mapping of texts",
    "None": "null",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """The allowed types as text, joined by ` | `; `Any` allows all. `choices` bounds what a text may be."""

    type: str
    choices: tuple[str, ...] = ()


def kind_of(hint: Any) -> Kind:
    """The Kind of a leaf field's annotation."""
    if get_origin(hint) in (Union, types.UnionType):
        parts = [kind_of(part) for part in get_args(hint)]
        return Kind(" | ".join(part.type for part in parts), sum((part.choices for part in parts), ()))
    if get_origin(hint) is Literal:
        return Kind("str", get_args(hint))
    if get_origin(hint) is tuple:
        return Kind(f"list[{get_args(hint)[0].__name__}]")
    if get_origin(hint) is dict:
        return Kind("dict[str]" if get_args(hint)[1] is str else "dict")
    return Kind("None" if hint is types.NoneType else hint.__name__)


def mismatch(value: Any, kind: Kind) -> str:
    """What is wrong with `value`, as `expected ..., got ...`; empty where nothing is."""
    allowed = kind.type.split(" | ")
    if "Any" in allowed:
        return ""
    if not any(_fits(value, one) for one in allowed):
        return f"expected {_spoken(allowed, kind.choices)}, got {_got(value, allowed)}{_hint(value, allowed)}"
    if kind.choices and isinstance(value, str) and value not in kind.choices:
        return f"expected {_listed(kind.choices)}, got {shown(value)}{did_you_mean(value, kind.choices)}"
    return ""


def shown(value: Any) -> str:
    """The value as a user would write it, shortened."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case str():
            return repr(value if len(value) <= 60 else value[:57] + "...")
        case list():
            return "a list"
        case dict():
            return "a mapping"
    return str(value)


def _fits(value: Any, one: str) -> bool:
    match one:
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "bool":
            return isinstance(value, bool)
        case "str":
            return isinstance(value, str)
        case "None":
            return value is None
        case "list":
            return isinstance(value, list)
        case "dict":
            return isinstance(value, dict)
        case "dict[str]":
            return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
    item_type = one.removeprefix("list[").removesuffix("]")
    return isinstance(value, list) and all(_fits(item, item_type) for item in value)


def _got(value: Any, allowed: Sequence[str]) -> str:
    """The value, or the item of a list that does not belong there."""
    items = [one.removeprefix("list[").removesuffix("]") for one in allowed if one.startswith("list[")]
    if not isinstance(value, list) or not items:
        return shown(value)
    return "a list with " + next(shown(item) for item in value if not any(_fits(item, one) for one in items))


def _spoken(allowed: Sequence[str], choices: tuple[str, ...]) -> str:
    words = [_listed(choices) if one == "str" and choices else _WORDS[one] for one in allowed]
    return " or ".join(dict.fromkeys(words))


def _listed(choices: Sequence[str]) -> str:
    if len(choices) > LISTED_MAX:
        return f"one of {len(choices)} names"
    return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)


def _hint(value: Any, allowed: Sequence[str]) -> str:
    """The usual slip that makes a wrong type."""
    if isinstance(value, str):
        if "bool" in allowed and value.lower() in ("yes", "no", "on", "off", "true", "false"):
            return "; write true or false, without quotes"
        if {"int", "float"} & set(allowed) and _is_number(value):
            return "; take the quotes away"
    if isinstance(value, bool | int | float) and "str" in allowed:
        return "; put it in quotes"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
