"""DeepSpeed's configuration where it stands in a file of its own: how weights are divided is said there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.config.model_size import json_in
from policies.model.spec import RunSpec


def with_deepspeed(spec: RunSpec) -> RunSpec:
    """Return the run with that file's content in its place (`grpo.deepspeed`), where it can be read from here."""
    said = _elsewhere(spec)
    if said is None:
        return spec
    try:
        found = json.loads(said)
    except ValueError:
        found = json_in(Path(spec.workdir, said))
    return replace(spec, grpo={**spec.grpo, "deepspeed": found}) if isinstance(found, dict) and found else spec


def unread_deepspeed(spec: RunSpec) -> str:
    """The file that says how weights are divided, and could not be read; empty where there is none."""
    return _elsewhere(spec) or ""


def _elsewhere(spec: RunSpec) -> str | None:
    own: Any = (spec.trainer.accelerate or {}).get("deepspeed_config")
    theirs = spec.grpo.get("deepspeed")
    if theirs:
        return theirs if isinstance(theirs, str) else None
    named = own.get("deepspeed_config_file") if isinstance(own, Mapping) else None
    return str(named) if named else None
