"""Whether a completion is JSON of a given form, by a JSON schema or a Pydantic model.

A schema may hold a pattern that takes for ever over some text, a model the user's own code: both are tried in
processes that can be killed.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from tasks.rewards.in_workers import in_workers
from tasks.rewards.texts import answer_of, fenced


@in_workers(needs=("jsonschema",))
def json_schema(text: str, schema: Any) -> float | None:
    """1 for JSON that the schema allows, else 0; None where the dataset has no schema. A completion may be JSON
    alone, or have it in its last code block.

    Args:
        schema: a schema as a mapping or its JSON, or a file of it beside run.yaml. An argument for all, or a
        column.
    """
    if schema is None:
        return None
    written = schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True)
    validator = _validator(written)
    try:
        return float(validator.is_valid(json.loads(_document(text), parse_constant=_refuse)))
    except (ValueError, OverflowError, RecursionError):  # no JSON, or a number too large for `multipleOf`
        return 0.0


@in_workers(needs=("pydantic",))
def pydantic_model(text: str, model: str) -> float:
    """1 for JSON of which the Pydantic model can be made, else 0.

    Args:
        model: the import path of a model, as in `rewards.Answer`.
    """
    from pydantic import ValidationError

    module, _, name = model.rpartition(".")
    try:
        getattr(importlib.import_module(module), name).model_validate_json(_document(text))
    except (ValidationError, UnicodeEncodeError):
        return 0.0
    return 1.0


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _document(text: str) -> str:
    answer = answer_of(text)
    return answer if (block := fenced(answer)) is None else block


@functools.lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    from jsonschema import validators

    text = schema if schema.lstrip().startswith(("{", "true", "false")) else _file(schema).read_text()
    loaded = json.loads(text)
    kind = validators.validator_for(loaded)
    kind.check_schema(loaded)
    return kind(loaded)


def _file(name: str) -> Path:
    """A file where modules are found: beside run.yaml first. Raises FileNotFoundError."""
    found = next((Path(folder, name) for folder in sys.path if Path(folder, name).is_file()), None)
    if found is None:
        raise FileNotFoundError(f"no schema {name} beside run.yaml")
    return found
