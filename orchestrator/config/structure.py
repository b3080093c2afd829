"""Check the keys and types of plain data against `policies.model.spec`, and describe types in messages.

A Kind is written like a type annotation (`int | None | list[str]`). RunSpec's fields and the tables of other
projects' keys both use it.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from grpo_orch.orchestrator.config.problems import LISTED_MAX, Findings, KeyPath, did_you_mean, unknown_key

_TYPE_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "list": "a list",
    "list[str]": "a list of strings",
    "list[int]": "a list of whole numbers",
    "list[float]": "a list of numbers",
    "list[dict]": "a list of mappings",
    "dict": "a mapping",
    "dict[str]": "a mapping of strings",
    "None": "null",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """The allowed types, joined by ` | `; `Any` allows all. `choices` lists the allowed strings."""

    type: str
    choices: tuple[str, ...] = ()


def kind_of(hint: Any) -> Kind:
    """Return the Kind of a leaf field's annotation."""
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
    """Return `expected ..., got ...`, or an empty string if `value` fits."""
    allowed = kind.type.split(" | ")
    if "Any" in allowed:
        return ""
    if not any(_fits(value, kind_name) for kind_name in allowed):
        expected = _describe_types(allowed, kind.choices)
        return f"expected {expected}, got {_describe_value(value, allowed)}{_hint(value, allowed)}"
    if kind.choices and isinstance(value, str) and value not in kind.choices:
        expected = _describe_choices(kind.choices)
        return f"expected {expected}, got {format_value(value)}{did_you_mean(value, kind.choices)}"
    return ""


def format_value(value: Any) -> str:
    """Return the value as a user would write it, shortened."""
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


_PYTHON_TYPES: Mapping[str, Any] = {
    "int": int,
    "float": int | float,
    "bool": bool,
    "str": str,
    "None": types.NoneType,
    "list": list,
    "dict": dict,
}


def _fits(value: Any, kind_name: str) -> bool:
    if kind_name == "dict[str]":
        return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
    if kind_name.startswith("list["):
        item_type = kind_name.removeprefix("list[").removesuffix("]")
        return isinstance(value, list) and all(_fits(item, item_type) for item in value)
    # In Python true and false are integers.
    return isinstance(value, _PYTHON_TYPES[kind_name]) and (kind_name == "bool") == isinstance(value, bool)


def _describe_value(value: Any, allowed: Sequence[str]) -> str:
    """Return the value, or the first item of a list that has the wrong type."""
    item_types = [name.removeprefix("list[").removesuffix("]") for name in allowed if name.startswith("list[")]
    if not isinstance(value, list) or not item_types:
        return format_value(value)
    wrong = next(item for item in value if not any(_fits(item, item_type) for item_type in item_types))
    return f"a list with {format_value(wrong)}"


def _describe_types(allowed: Sequence[str], choices: tuple[str, ...]) -> str:
    names = [_describe_choices(choices) if name == "str" and choices else _TYPE_NAMES[name] for name in allowed]
    return " or ".join(dict.fromkeys(names))


def _describe_choices(choices: Sequence[str]) -> str:
    if len(choices) > LISTED_MAX:
        return f"one of {len(choices)} names"
    return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)


def _hint(value: Any, allowed: Sequence[str]) -> str:
    """Return how to fix the usual YAML mistake behind a wrong type."""
    if isinstance(value, str):
        if "bool" in allowed and value.lower() in ("yes", "no", "on", "off", "true", "false"):
            return "; write true or false, without quotes"
        if {"int", "float"} & set(allowed) and _is_number(value):
            return "; remove the quotes"
    if isinstance(value, bool | int | float) and "str" in allowed:
        return "; put it in quotes"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# Plain data against dataclasses. Reports every problem; a decoder would stop at the first.

# Set by the loader, not by the file.
NOT_IN_FILE = frozenset({"workdir"})
# Shorthands allowed instead of a section; `shorthand` expands them.
_SHORTHANDS = {
    "replicas": "a whole number or ",
    "dataset": "a name or path or ",
    "eval_dataset": "a name or path or ",
    "agent": "an import path or ",
}
# Expected values of required keys.
EXPECTED = {
    "name": "a name for the run, in lower-case letters, digits and dashes",
    "storage": "the run's store: a folder or a URL, as in s3://bucket/my-run",
    "model": "a model name on the Hugging Face Hub, or a folder",
    "run": "an agent's import path, as in my_agent.solve, or a command as a list of strings",
    "grpo": "a mapping of GRPOConfig keys",
}


def check_structure(cls: type, data: dict[str, Any], path: KeyPath, findings: Findings) -> dict[str, Any]:
    """Report keys and values that do not fit `cls` and return the rest. An empty section counts as omitted."""
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.name not in NOT_IN_FILE}
    plain: dict[str, Any] = {}
    for key, value in data.items():
        below = (*path, key)
        if key not in fields:
            findings.add(below, unknown_key(key, fields))
        elif value is None and not is_required(fields[key]):
            continue
        elif section := section_of(hints[key]):
            if (checked := _check_section(section, hints[key], value, below, findings)) is not None:
                plain[key] = checked
        elif kind_of(hints[key]).type == "dict[str]" and isinstance(value, dict):
            plain[key] = value
            _check_strings(value, below, findings)
        elif message := mismatch(value, kind_of(hints[key])):
            findings.add(below, message)
        else:
            plain[key] = value
    for name in fields:
        if is_required(fields[name]) and name not in data:
            findings.missing((*path, name), f"missing; expected {_expected(name, hints[name])}")
    return plain


def _check_section(section: type, hint: Any, value: Any, path: KeyPath, findings: Findings) -> Any:
    """Return the valid part of a section or list of sections; None if the value is neither."""
    if isinstance(value, list) and is_list_of_sections(hint):
        items = [
            _check_section(section, section, item, (*path, index), findings) for index, item in enumerate(value)
        ]
        return [item or {} for item in items]  # keeps each item's index for later reports
    if isinstance(value, dict) and get_origin(hint) is not tuple:
        return check_structure(section, value, path, findings)
    findings.add(path, f"expected {_expected(str(path[-1]), hint)}, got {format_value(value)}")
    return None


def _check_strings(value: dict[str, Any], path: KeyPath, findings: Findings) -> None:
    for name, item in value.items():
        if message := mismatch(item, Kind("str")):
            findings.add((*path, name), message)


def section_of(hint: Any) -> type | None:
    """Return the dataclass in a field's annotation: plain, optional or in a tuple."""
    if get_origin(hint) in (Union, types.UnionType, tuple):
        return next((section for part in get_args(hint) if (section := section_of(part))), None)
    return hint if dataclasses.is_dataclass(hint) and isinstance(hint, type) else None


def is_list_of_sections(hint: Any) -> bool:
    """Return whether a field may hold a list of sections."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return any(get_origin(part) is tuple for part in parts)


def is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _expected(name: str, hint: Any) -> str:
    section = section_of(hint)
    if section is None:
        return EXPECTED.get(name) or mismatch(None, kind_of(hint)).split(", got")[0].removeprefix("expected ")
    keys = ", ".join(field.name for field in dataclasses.fields(section))
    form = "a list of mappings" if get_origin(hint) is tuple else f"{_SHORTHANDS.get(name, '')}a mapping"
    return f"{form} with the keys {keys}"
