"""Files beside a model's weights, which may be missing or anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def json_in(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file; empty where there is none that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def config_in(path: Path) -> dict[str, Any]:
    """The mapping in a model's config.json, as `config_of` has it."""
    return config_of(json_in(path))


def config_of(found: Any) -> dict[str, Any]:
    """A model's config.json without what is of another kind than transformers writes it: it may be anybody's."""
    if not isinstance(found, Mapping):
        return {}
    return {
        name: config_of(value) if name == "text_config" else value
        for name, value in found.items()
        if name not in CONFIG_KINDS or CONFIG_KINDS[name](value)
    }


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _listed(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(kind, value))


CONFIG_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "architectures": _listed(lambda one: isinstance(one, str)),
    "max_position_embeddings": _whole,
    "mlp_only_layers": _listed(_whole),
    "text_config": lambda value: isinstance(value, Mapping),
    "vocab_size": _whole,
}
