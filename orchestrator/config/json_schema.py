"""The JSON Schema of run.yaml, for editors and other programs.

It is built from what `load` checks with: RunSpec's fields, the tables of shorthands and of other projects' keys,
and the bounds of numbers. It accepts every file that `load` accepts. Rules between keys are left to `load`.

There are two forms of the file. In one with `extends` every key may be missing, and null removes a key.
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
from grpo_orch.orchestrator.config.shorthand import (
    ENVIRONMENTS,
    NODE,
    STORAGE_KEYS,
    TARGETS,
    TEXT_FOR_LIST,
    VALUE_FOR_SECTION,
)
from grpo_orch.orchestrator.config.structure import (
    EXPECTED,
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
FAULTS: KeyPath = ("rehearse", "faults")
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
_SCALAR: Schema = {"type": ["string", "number", "boolean"]}
_COMMENT = re.compile(r"^    (\w+): .*?  # (.*)$", re.MULTILINE)


def json_schema() -> Schema:
    """Return the JSON Schema (draft 2020-12) of run.yaml."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": TITLE,
        "type": "object",
        "if": {"required": [EXTENDS]},
        "then": {"$ref": "#/$defs/extending"},
        "else": {"$ref": "#/$defs/whole"},
        "$defs": {"whole": _Form(is_patch=False).run(), "extending": _Form(is_patch=True).run()},
    }


class _Form:
    """Builds the schema of one form of the file: whole, or a patch of another file."""

    def __init__(self, *, is_patch: bool) -> None:
        self._is_patch = is_patch

    def run(self) -> Schema:
        base = {"type": "string", "minLength": 1, "description": "The run.yaml that this file changes."}
        section = self._section(RunSpec, ())
        section["properties"] = {EXTENDS: base, **section["properties"]}
        return section

    def _section(self, cls: type, path: KeyPath) -> Schema:
        """Return the schema of a mapping with the fields of a dataclass."""
        hints, comments = get_type_hints(cls), dict(_COMMENT.findall(inspect.getsource(cls)))
        properties: Schema = {}
        required: list[str] = []
        for field in dataclasses.fields(cls):
            if field.name in NOT_IN_FILE:
                continue
            schema = self._field(hints[field.name], (*path, field.name))
            description = comments.get(field.name, "").replace("None:", "null:")
            if is_required(field):
                required.append(field.name)
                schema = self._removable(schema)
                description = description or EXPECTED.get(field.name, "")
            else:
                schema = _or_null(schema)
            properties[field.name] = _described(schema, description, field.default)
        return self._mapping(properties, required, (inspect.getdoc(cls) or "").partition("\n")[0])

    def _field(self, hint: Any, path: KeyPath) -> Schema:
        """Return the schema of the value at the path, without null as a default."""
        if path == ("name",):
            return {"type": "string", "pattern": f"^{RUN_NAME.pattern}$"}
        if path == OPTIONS[:1]:
            return self._storage()
        if path in TABLES:
            return self._foreign(TABLES[path](), path)
        if path in RESOURCES:
            return self._resources()
        if path in ENVIRONMENTS:
            return self._scalars()
        section = section_of(hint)
        if section is None:
            schema = {**self._of_kind(kind_of(hint)), **_bounds(path)}
            return _any_of(schema, {"type": "string"}) if path in TEXT_FOR_LIST else schema
        if path == FAULTS:
            return {"type": "array", "items": self._fault(section)}
        schema = self._section(section, path)
        if path not in VALUE_FOR_SECTION:
            return schema
        kind, keys = VALUE_FOR_SECTION[path]
        short = {**_plain_type(kind.__name__), **_bounds((*path, keys[0]))}
        if not is_list_of_sections(hint):
            return _any_of(schema, short)
        item = _any_of(_Form(is_patch=False)._section(section, path), short)  # a patch replaces whole lists
        return _any_of(schema, short, {"type": "array", "items": item})

    def _storage(self) -> Schema:
        url, options = STORAGE_KEYS
        section = self._mapping({url: {"type": "string"}, options: _or_null(self._scalars())}, [url])
        return _any_of({"type": "string"}, section)

    def _scalars(self) -> Schema:
        return {"type": "object", "additionalProperties": self._removable(_SCALAR)}

    def _fault(self, cls: type) -> Schema:
        """Return the schema of a fault; a patch replaces whole lists."""
        fault = _Form(is_patch=False)._section(cls, FAULTS)
        for kind, targets in TARGETS.items():
            fixed = {"enum": [target for target in targets if target != "rollout-N"]}
            target = _any_of(fixed, {"type": "string", "pattern": NODE.pattern}, _NULL)
            fault["properties"][kind] = {**target, "description": fault["properties"][kind].get("description", "")}
        fault["oneOf"] = [{"required": [kind], "properties": {kind: {"type": "string"}}} for kind in TARGETS]
        return fault

    def _foreign(self, table: Table, path: KeyPath) -> Schema:
        """Return the schema of another project's keys, without those that a run sets."""
        keys = {
            key: self._removable({**self._of_kind(table.kind(key)), **_bounds((*path, key))})
            for key in table.keys
            if key not in table.refused
        }
        return self._mapping(keys, description=f"Each key is {table.vocabulary}.")

    def _resources(self, *, nested: bool = False) -> Schema:
        kinds = resource_keys(nested=nested)
        keys = {key: self._removable(self._of_kind(Kind(kind))) for key, kind in kinds.items()}
        if not nested:
            for key in ALTERNATIVES:  # a patch replaces whole lists
                machines = {"type": "array", "items": _Form(is_patch=False)._resources(nested=True)}
                keys[key] = self._removable(machines)
        return self._mapping(keys, description=f"Each key is {SKYPILOT_RESOURCES}.")

    def _of_kind(self, kind: Kind) -> Schema:
        """Return the schema of values that `mismatch` accepts."""
        names = kind.type.split(" | ")
        if "Any" in names:
            return {}
        return _any_of(*(self._of_name(name, kind.choices) for name in names))

    def _of_name(self, name: str, choices: tuple[str, ...]) -> Schema:
        if name == "str" and choices:
            return {"enum": list(choices)}
        if name == "dict[str]":
            return {"type": "object", "additionalProperties": self._removable({"type": "string"})}
        return _plain_type(name)

    def _mapping(self, properties: Schema, required: Iterable[str] = (), description: str = "") -> Schema:
        """Return the schema of a mapping with these keys only."""
        mapping: Schema = {"description": description} if description else {}
        mapping |= {"type": "object", "properties": properties, "additionalProperties": False}
        if self._is_patch:
            mapping["properties"] = {key: _or_null(schema) for key, schema in properties.items()}
            mapping["additionalProperties"] = _NULL
        elif required:
            mapping["required"] = list(required)
        return mapping

    def _removable(self, schema: Schema) -> Schema:
        return _or_null(schema) if self._is_patch else schema


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
    """Add a description, unless the schema has its own, and a default that JSON has."""
    if description:
        schema = {"description": description, **schema}
    is_plain = isinstance(default, bool | int | float | str) and default != ""
    return {**schema, "default": default} if is_plain else schema


def _bounds(path: KeyPath) -> Schema:
    """Return the bounds of the number at a path of RunSpec; they apply to numbers only."""
    bounds: Schema = {}
    if path in MINIMUM:
        minimum, is_exclusive = MINIMUM[path]
        bounds["exclusiveMinimum" if is_exclusive else "minimum"] = minimum
    if path in MAXIMUM:
        bounds["maximum"] = MAXIMUM[path]
    return bounds
