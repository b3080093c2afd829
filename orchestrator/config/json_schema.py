"""The JSON Schema of run.yaml, for editors and other programs.

It is built from what `load` checks with: RunSpec's fields, the tables of shorthands and of other projects' keys,
and the bounds of numbers. It accepts every file that `load` accepts. Rules between keys, and files and functions
that must exist, are left to `load`.

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
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_SCALAR: Schema = {"type": ["string", "number", "boolean"]}
_FIELD = re.compile(r"((?:^    # .*\n)*)^    (\w+): .*?(?:  # (.*))?$", re.MULTILINE)  # comment, name, comment


def descriptions(cls: type) -> dict[str, str]:
    """Return the description of each field of a dataclass, in Markdown: the comment above it or behind it."""
    fields = _FIELD.findall(inspect.getsource(cls))
    return {name: behind or " ".join(above.replace("    # ", "").split()) for above, name, behind in fields}


_IMPORT_PATH = r"^[^\s./]+(\.[^\s./]+)+$"
_VARIABLE = "^[A-Za-z_][A-Za-z0-9_]*$"
# The store's URL: not `//...`, memory:// or s3:..., no password, and a folder, or a scheme and a path.
_NO_URL = r"//|memory://|(file|s3|gs|az):(?!//)|(?!file:)[^:/]*://[^/?#\[\]]*:[^/?#\[\]]*@"
_URL = rf"^(?!{_NO_URL})([a-z][a-z0-9+.-]*://|(?![^]*://))[^?#%\\]*[^?#%\\/ ][^?#%\\]*$".replace("[^]", r"[\s\S]")
# What `load` checks of single values, besides types and the bounds of numbers.
_SHAPES: dict[KeyPath, Schema] = {
    ("storage",): {"pattern": _URL},
    ("trainer", "model"): {"minLength": 1},
    ("trainer", "reward_funcs"): {"pattern": f"{_IMPORT_PATH}|/"},  # of each item
    ("trainer", "tools"): {"pattern": _IMPORT_PATH},
    ("trainer", "environment_factory"): {"pattern": _IMPORT_PATH},
    ("trainer", "rollout_func"): {"pattern": _IMPORT_PATH},
    ("trainer", "agent", "run"): {"pattern": _IMPORT_PATH, "minItems": 1},
    ("trainer", "accelerate", "num_machines"): {"minimum": 1, "maximum": 1},
    ("trainer", "eval_dataset", "streaming"): {"not": {"const": True}},
    ("grpo", "save_steps"): {"multipleOf": 1},
    ("checkpoints", "spool"): {"pattern": "^(/|$)"},
    ("secrets",): {"pattern": _VARIABLE},
    ("notify", "url_env"): {"pattern": _VARIABLE},
}
_TEXT: Schema = {"type": "string"}
_MESSAGE: Schema = {
    "type": "object",
    "properties": {"role": _TEXT, "content": _TEXT},
    "required": ["role", "content"],
    "additionalProperties": False,
}
for _key in ("dataset", "eval_dataset"):
    _prompt = {"pattern": rf"\{{|{_IMPORT_PATH}", "items": _MESSAGE, "minItems": 1}
    _SHAPES |= {
        ("trainer", _key, "path"): {"minLength": 1},
        ("trainer", _key, "prompt"): _prompt,
        ("trainer", _key, "weight"): {"exclusiveMinimum": 0},
    }


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
        hints, texts = get_type_hints(cls), descriptions(cls)
        properties: Schema = {}
        required: list[str] = []
        for field in dataclasses.fields(cls):
            if field.name in NOT_IN_FILE:
                continue
            schema = self._field(hints[field.name], (*path, field.name))
            if is_required(field):
                required.append(field.name)
                schema = self._removable(schema)
            else:
                schema = _or_null(schema)
            properties[field.name] = _described(schema, texts[field.name], field.default)
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
            return self._variables()
        section = section_of(hint)
        if section is None:
            if path in TEXT_FOR_LIST:
                item = {**_TEXT, **_SHAPES.get(path, {})}
                return _any_of({"type": "array", "items": item}, item)
            return {**self._of_kind(kind_of(hint)), **_limits(path)}
        if path == FAULTS:
            return {"type": "array", "items": self._fault(section)}
        schema = self._section(section, path)
        if path == ("trainer",) and not self._is_patch:
            schema["anyOf"] = [{"required": [key]} for key in ("reward_funcs", "agent")]
        if path not in VALUE_FOR_SECTION:
            return schema
        kind, keys = VALUE_FOR_SECTION[path]
        short = {**_plain_type(kind.__name__), **_limits((*path, keys[0]))}
        if not is_list_of_sections(hint):
            return _any_of(schema, short)
        item = _any_of(_Form(is_patch=False)._section(section, path), short)  # a patch replaces whole lists
        return _any_of(schema, short, {"type": "array", "items": item, "minItems": 1})

    def _storage(self) -> Schema:
        url, options = STORAGE_KEYS
        text = {**_TEXT, **_limits(OPTIONS[:1])}
        return _any_of(text, self._mapping({url: text, options: _or_null(self._scalars())}, [url]))

    def _scalars(self) -> Schema:
        return {"type": "object", "additionalProperties": self._removable(_SCALAR)}

    def _variables(self) -> Schema:
        names = {} if self._is_patch else {"propertyNames": {"pattern": "^[^=]+$"}}  # a patch removes any name
        return {**self._scalars(), **names}

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
            key: self._removable({**self._of_kind(table.kind(key)), **_limits((*path, key))})
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
    """Add a description without its links, unless the schema has its own, and a default that JSON has."""
    if description:
        schema = {"description": _LINK.sub(r"\1", description), **schema}
    is_plain = isinstance(default, bool | int | float | str) and default != ""
    return {**schema, "default": default} if is_plain else schema


def _limits(path: KeyPath) -> Schema:
    """Return the shape and the bounds of the value at a path of RunSpec. Each keyword applies to one type only."""
    bounds: Schema = dict(_SHAPES.get(path, {}))
    if path in MINIMUM:
        minimum, is_exclusive = MINIMUM[path]
        bounds["exclusiveMinimum" if is_exclusive else "minimum"] = minimum
    if path in MAXIMUM:
        bounds["maximum"] = MAXIMUM[path]
    return bounds
