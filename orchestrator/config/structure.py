"""Keys and types: what a value may be, how a message says so, and plain data checked against
`policies.model.spec`.

Kinds are one small language, that of a type annotation (`int | None | list[str]`), for the fields of RunSpec
and for the tables of other projects' keys.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from orchestrator.config.problems import LISTED_MAX, Findings, KeyPath, did_you_mean, unknown_key

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


# Plain data against dataclasses: keys, types, missing keys. All of it, where a decoder would stop at the first.

# Set by the loader; no key of the file.
NOT_IN_FILE = frozenset({"workdir"})
# What may stand in place of a section; `shorthand` writes it out.
_SHORT = {
    "replicas": "a whole number or ",
    "dataset": "a name or path or ",
    "eval_dataset": "a name or path or ",
    "agent": "an import path or ",
}
# Required keys, in words.
_WANTED = {
    "name": "a name for the run, in lower-case letters, digits and dashes",
    "storage": "where the run is kept: a folder or a URL, as in s3://bucket/my-run",
    "model": "a model's name on the hub, or a folder",
    "run": "an agent's import path, as in my_agent.solve, or a command as a list of texts",
    "grpo": "a mapping of GRPOConfig's keys",
}


def check_structure(cls: type, data: dict[str, Any], path: KeyPath, findings: Findings) -> dict[str, Any]:
    """Report what does not fit `cls`; return what does. An empty section (`policies:`) counts as left out."""
    hints = get_type_hints(cls)
    fields = {one.name: one for one in dataclasses.fields(cls) if one.name not in NOT_IN_FILE}
    plain: dict[str, Any] = {}
    for key, value in data.items():
        below = (*path, key)
        if key not in fields:
            findings.add(below, unknown_key(key, fields))
        elif value is None and not _required(fields[key]):
            continue
        elif section := _section(hints[key]):
            if (found := _check_section(section, hints[key], value, below, findings)) is not None:
                plain[key] = found
        elif kind_of(hints[key]).type == "dict[str]" and isinstance(value, dict):
            plain[key] = value
            _check_texts(value, below, findings)
        elif message := mismatch(value, kind_of(hints[key])):
            findings.add(below, message)
        else:
            plain[key] = value
    for name in fields:
        if _required(fields[name]) and name not in data:
            findings.missing((*path, name), f"missing; expected {_wanted(name, hints[name])}")
    return plain


def _check_section(section: type, hint: Any, value: Any, path: KeyPath, findings: Findings) -> Any:
    """What of a section fits, or of a list of them; None where it is neither."""
    if isinstance(value, list) and _repeats(hint):
        found = [_check_section(section, section, item, (*path, at), findings) for at, item in enumerate(value)]
        return [one or {} for one in found]  # in its place, so that what is said later names the right one
    if isinstance(value, dict):
        return check_structure(section, value, path, findings)
    findings.add(path, f"expected {_wanted(str(path[-1]), hint)}, got {shown(value)}")
    return None


def _check_texts(value: dict[str, Any], path: KeyPath, findings: Findings) -> None:
    for name, item in value.items():
        if message := mismatch(item, Kind("str")):
            findings.add((*path, name), message)


def _section(hint: Any) -> type | None:
    """The dataclass that a field holds, once, optionally or several times."""
    if get_origin(hint) in (Union, types.UnionType, tuple):
        return next((found for part in get_args(hint) if (found := _section(part))), None)
    return hint if dataclasses.is_dataclass(hint) and isinstance(hint, type) else None


def _repeats(hint: Any) -> bool:
    """Whether a field may hold a list of its section."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return any(get_origin(part) is tuple for part in parts)


def _required(one: dataclasses.Field[Any]) -> bool:
    return one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING


def _wanted(name: str, hint: Any) -> str:
    section = _section(hint)
    if section is None:
        return _WANTED.get(name) or mismatch(None, kind_of(hint)).split(", got")[0].removeprefix("expected ")
    keys = ", ".join(one.name for one in dataclasses.fields(section))
    return f"{_SHORT.get(name, '')}a mapping with the keys {keys}"
