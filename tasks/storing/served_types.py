"""What the nodes' engines hold weights in, from run.yaml and the base model's files on the trainer's machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from policies.weights.tensors import ServedTypes, served_types
from tasks.machine.base_model import tensors_in

log = structlog.get_logger()


def read_served_types(vllm: Mapping[str, Any], base_model: Path | None) -> ServedTypes:
    """The types in which to publish; each tensor's own where the base model's files are not at hand or unreadable.

    Args:
        vllm: the flags in run.yaml.
        base_model: the folder that training began from.
    """
    if base_model is None:
        return ServedTypes()
    try:
        config = json.loads((base_model / "config.json").read_bytes())
        return served_types(vllm, config, tensors_in(base_model))
    except (OSError, ValueError) as error:
        log.warning("weights_published_as_trained", folder=str(base_model), why=str(error))
        return ServedTypes()
