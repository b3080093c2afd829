"""The files here of the model that training begins from: where they are, what is in them, which one it is.

Trainer and nodes each find their own copy; that they are copies of one model is told by `identity_of`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from checkpoint.store import layout
from checkpoint.store.errors import Corrupt
from checkpoint.weights import safetensors
from policies.weights.tensors import Tensor

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
TENSORS = "tensors.json"  # beside a model without weights: what they would be
WEIGHTS = "*.safetensors"
# What a run needs of a model on the hub, and what of it another program would read: fnmatch's patterns.
FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", WEIGHTS)
NOT_FILES = ("*/*", "consolidated*", "params.json")
# Of each tensor so many pieces are read, spread over it: models of one shape differ everywhere.
PIECES = 4
PIECE_BYTES = 256
IDENTITY_BYTES = 16
# A cache is whole that has these; others may have been left out.
_PARTS: dict[str, Any] = {"allow_patterns": FILES, "ignore_patterns": NOT_FILES}


class _Index(msgspec.Struct):
    """What a model's index tells: the file of each tensor."""

    weight_map: dict[str, str]


def model_folder(model: str, **hub: Any) -> Path | None:
    """The folder with a model's files: its own, or that of the hub's cache on this machine.

    Args:
        hub: of `snapshot_download`, as `revision`.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True, **_PARTS, **hub))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return None


def model_config(model: str, **hub: Any) -> dict[str, Any]:
    """A model's config.json, fetched if it is on the hub alone; empty where there is none to be had."""
    path = Path(model, CONFIG) if Path(model).is_dir() else _fetched(model, CONFIG, **hub)
    try:
        config = {} if path is None else json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """The tensors in a model's folder, by name. Raises OSError, ValueError for a damaged file."""
    if (folder / TENSORS).is_file():
        return msgspec.json.decode((folder / TENSORS).read_bytes(), type=dict[str, Tensor])
    found: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        found |= tensors_of(path)
    return found


def hub_tensors(model: str, revision: str | None = None) -> dict[str, Tensor]:
    """The tensors of a model on the hub, by name; empty where there are none to be had.

    The headers of its files are fetched, a few hundred KiB, and none of the weights.
    """
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import HTTPError, NotASafetensorsRepoError, SafetensorsParsingError

    unreadable = (NotASafetensorsRepoError, SafetensorsParsingError, ValueError, KeyError)
    try:
        files = get_safetensors_metadata(model, revision=revision).files_metadata.values()
    except (*unreadable, HTTPError, OSError):
        return {}
    return {name: Tensor(one.dtype, tuple(one.shape)) for file in files for name, one in file.tensors.items()}


def tensors_of(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, by name. Raises OSError, ValueError for a damaged file."""
    return {name: Tensor(one.dtype, one.shape) for name, one in layout_of(path).items()}


def layout_of(path: Path) -> safetensors.Layout:
    """Where in a safetensors file its tensors are. Raises OSError, ValueError for a damaged file."""
    try:
        return safetensors.layout_of(path)
    except Corrupt as error:  # of a file here, not of the store
        raise ValueError(str(error)) from error


def identity_of(folder: Path) -> str:
    """Names the model in a folder, in hex: by its tensors' names, shapes and types, and some bytes of each.

    However they are divided over files. Empty where there are no safetensors files. Raises OSError, ValueError.
    """
    lines: dict[str, bytes] = {}
    for path in _weight_files(folder):
        tensors = layout_of(path)
        with path.open("rb") as file:
            for name, one in tensors.items():
                end = one.begin + one.size_bytes
                stride = max(1, (one.size_bytes - PIECE_BYTES) // (PIECES - 1))
                places = range(one.begin, end, stride)[:PIECES]
                pieces = [os.pread(file.fileno(), min(PIECE_BYTES, end - at), at) for at in places]
                lines[name] = f"{name} {one.dtype} {list(one.shape)} ".encode() + b"".join(pieces)
    return blake3(b"\n".join(lines[name] for name in sorted(lines))).hexdigest(IDENTITY_BYTES) if lines else ""


def _fetched(model: str, name: str, **hub: Any) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError, HTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, name, **hub))
    except (LocalEntryNotFoundError, HFValidationError, HTTPError, OSError):
        return None


def _weight_files(folder: Path) -> list[Path]:
    """The files that engines load: those of the index, else the whole one, else all."""
    if (folder / INDEX).is_file():
        index = msgspec.json.decode((folder / INDEX).read_bytes(), type=_Index)
        return [folder / name for name in sorted(set(index.weight_map.values()))]
    if (folder / layout.MODEL).is_file():
        return [folder / layout.MODEL]
    return sorted(folder.glob("*.safetensors"))
