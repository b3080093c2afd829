"""Checks plain data against the dataclasses of `policies.model.spec`: keys, types, what is missing. All of it at
once, where a decoder would stop at the first.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

from orchestrator.config.problems import Findings, KeyPath, unknown_key
from orchestrator.config.reading.kinds import Kind, kind_of, mismatch, shown

# Set by the loader; no key of the file.
NOT_IN_FILE = frozenset({"workdir"})
# What may stand in place of a section; `shorthand` writes it out.
_SHORT = {"replicas": "a whole number or ", "dataset": "a name or path or ", "eval_dataset": "a name or path or "}
# Required keys, in words.
_WANTED = {
    "name": "a name for the run, in lower-case letters, digits and dashes",
    "storage": "where the run is kept: a folder or a URL, as in s3://bucket/my-run",
    "model": "a model's name on the hub, or a folder",
    "reward_funcs": "import paths of reward functions, as in rewards.my_reward",
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
