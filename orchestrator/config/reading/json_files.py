"""Files beside a model's weights, which may be missing or anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def json_in(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file; empty where there is none that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
