"""The JSON Schema of run.yaml, for editors and other programs.

It is built from what `load` checks with: RunSpec's fields, the tables of shorthands and of other projects' keys,
and the bounds of numbers. It accepts every file that `load` accepts, and any file with `extends`. The form of
texts, rules between keys, and files and functions that must exist, are left to `load`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable
from typing import Any, get_type_hints

from grpo_orch.orchestrator.config.document import EXTENDS, OPTIONS
from grpo_orch.orchestrator.config.effective import MAXIMUM, MINIMUM
from grpo_orch.orchestrator.config.foreign_keys import (
    RESOURCES,
    SKYPILOT_RESOURCES,
    TABLES,
    Table,
    resource_keys,
)
from grpo_orch.orchestrator.config.problems import KeyPath
from grpo_orch.orchestrator.config.rules import RUN_NAME
from grpo_orch.orchestrator.config.shorthand import ENVIRONMENTS, STORAGE_KEYS, TEXT_FOR_LIST, VALUE_FOR_SECTION
from grpo_orch.orchestrator.config.structure import (
    NOT_IN_FILE,
    Kind,
    is_list_of_sections,
    is_required,
    kind_of,
    section_of,
)
from grpo_orch.policies.model.spec import ALTERNATIVES, RunSpec

Schema = dict[str, Any]

TITLE = "run.yaml of grpo-orch"
_NULL: Schema = {"type": "null"}
_TYPES = {
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "str": "string",
    "None": "null",
    "list": "array",
    "dict": "object",
}
_TEXT: Schema = {"type": "string"}
_SCALARS: Schema = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_FIELD = re.compile(r"((?:^    # .*\n)*)^    (\w+): .*?(?:  # (.*))?$", re.MULTILINE)  # comment, name, comment


def descriptions(cls: type) -> dict[str, str]:
    """Return the description of each field of a dataclass, in Markdown: the comment above it or behind it."""
    fields = _FIELD.findall(inspect.getsource(cls))
    return {name: behind or " ".join(above.replace("    # ", "").split()) for above, name, behind in fields}


def json_schema() -> Schema:
    """Return the JSON Schema (draft 2020-12) of run.yaml."""
    base = {**_TEXT, "description": "The run.yaml that this file changes."}
    whole = _section(RunSpec, ())
    whole["properties"] = {EXTENDS: base, **whole["properties"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": TITLE,
        "type": "object",
        "if": {"required": [EXTENDS]},
        "then": {"properties": {EXTENDS: base}},
        "else": whole,
    }


def _section(cls: type, path: KeyPath) -> Schema:
    """Return the schema of a mapping with the fields of a dataclass."""
    hints, texts = get_type_hints(cls), descriptions(cls)
    properties: Schema = {}
    required: list[str] = []
    for field in dataclasses.fields(cls):
        if field.name in NOT_IN_FILE:
            continue
        schema = _field(hints[field.name], (*path, field.name))
        if is_required(field):
            required.append(field.name)
        else:
            schema = _or_null(schema)
        properties[field.name] = _described(schema, texts[field.name], field.default)
    return _mapping(properties, required, (inspect.getdoc(cls) or "").partition("\n")[0])


def _field(hint: Any, path: KeyPath) -> Schema:
    """Return the schema of the value at the path, without null as a default."""
    if path == ("name",):
        return {**_TEXT, "pattern": f"^{RUN_NAME.pattern}$"}
    if path == OPTIONS[:1]:
        url, options = STORAGE_KEYS
        return _any_of(_TEXT, _mapping({url: _TEXT, options: _or_null(_SCALARS)}, [url]))
    if path in TABLES:
        return _foreign(TABLES[path](), path)
    if path in RESOURCES:
        return _resources()
    if path in ENVIRONMENTS:
        return _SCALARS
    section = section_of(hint)
    if section is None:
        if path in TEXT_FOR_LIST:
            return _any_of({"type": "array", "items": _TEXT}, _TEXT)
        return {**_of_kind(kind_of(hint)), **_limits(path)}
    schema = _section(section, path)
    if path == ("trainer",):
        schema["anyOf"] = [{"required": [key]} for key in ("reward_funcs", "agent")]
    if path in VALUE_FOR_SECTION:
        kind, keys = VALUE_FOR_SECTION[path]
        schema = _any_of(schema, {**_plain_type(kind.__name__), **_limits((*path, keys[0]))})
    if not is_list_of_sections(hint):
        return schema
    items = {"type": "array", "items": schema}
    return _any_of(schema, items) if path in VALUE_FOR_SECTION else items


def _foreign(table: Table, path: KeyPath) -> Schema:
    """Return the schema of another project's keys, without those that a run sets."""
    keys = {
        key: {**_of_kind(table.kind(key)), **_limits((*path, key))}
        for key in table.keys
        if key not in table.refused
    }
    return _mapping(keys, description=f"Each key is {table.vocabulary}.")


def _resources(*, nested: bool = False) -> Schema:
    keys = {key: _of_kind(Kind(kind)) for key, kind in resource_keys(nested=nested).items()}
    if not nested:
        keys |= {key: {"type": "array", "items": _resources(nested=True)} for key in ALTERNATIVES}
    return _mapping(keys, description=f"Each key is {SKYPILOT_RESOURCES}.")


def _of_kind(kind: Kind) -> Schema:
    """Return the schema of values that `mismatch` accepts."""
    names = kind.type.split(" | ")
    if "Any" in names:
        return {}
    return _any_of(*(_of_name(name, kind.choices) for name in names))


def _of_name(name: str, choices: tuple[str, ...]) -> Schema:
    if name == "str" and choices:
        return {"enum": list(choices)}
    if name == "dict[str]":
        return {"type": "object", "additionalProperties": _TEXT}
    return _plain_type(name)


def _mapping(properties: Schema, required: Iterable[str] = (), description: str = "") -> Schema:
    """Return the schema of a mapping with these keys only."""
    mapping: Schema = {"description": description} if description else {}
    mapping |= {"type": "object", "properties": properties, "additionalProperties": False}
    return {**mapping, "required": list(required)} if required else mapping


def _plain_type(name: str) -> Schema:
    if name.startswith("list["):
        return {"type": "array", "items": _plain_type(name.removeprefix("list[").removesuffix("]"))}
    return {"type": _TYPES[name]}


def _any_of(*schemas: Schema) -> Schema:
    """Return the union of schemas: a list of types if they are nothing else."""
    distinct = [schema for index, schema in enumerate(schemas) if schema not in schemas[:index]]
    if len(distinct) == 1:
        return distinct[0]
    if all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in distinct):
        return {"type": [schema["type"] for schema in distinct]}
    return {"anyOf": distinct}


def _or_null(schema: Schema) -> Schema:
    """Return the schema with null allowed."""
    match schema:
        case {"anyOf": options}:
            return schema if _NULL in options else {**schema, "anyOf": [*options, _NULL]}
        case {"enum": values}:
            return schema if None in values else {**schema, "enum": [*values, None]}
        case {"type": str() as name}:
            return schema if name == "null" else {**schema, "type": [name, "null"]}
        case {"type": names}:
            return schema if "null" in names else {**schema, "type": [*names, "null"]}
    return schema  # accepts everything


def _described(schema: Schema, description: str, default: Any) -> Schema:
    """Add a description without its links, unless the schema has its own, and a default that JSON has."""
    if description:
        schema = {"description": _LINK.sub(r"\1", description), **schema}
    is_plain = isinstance(default, bool | int | float | str) and default != ""
    return {**schema, "default": default} if is_plain else schema


def _limits(path: KeyPath) -> Schema:
    """Return the bounds of the number at a path of RunSpec. Each keyword applies to numbers only."""
    bounds: Schema = {}
    if path in MINIMUM:
        minimum, is_exclusive = MINIMUM[path]
        bounds["exclusiveMinimum" if is_exclusive else "minimum"] = minimum
    if path in MAXIMUM:
        bounds["maximum"] = MAXIMUM[path]
    return bounds
