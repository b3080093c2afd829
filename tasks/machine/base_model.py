"""Find and identify this machine's copy of the base model, which training starts from.

Trainer and nodes each find their own copy; `identity_of` shows whether these are copies of the same model.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import Corrupt
from grpo_orch.checkpoint.weights import safetensors
from grpo_orch.policies.weights.tensors import Tensor

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
TENSORS = "tensors.json"  # in the folder of a model without weights: describes its tensors
WEIGHTS = "*.safetensors"
# fnmatch patterns of files that a run needs of a model on the hub, and of files for other programs.
FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", WEIGHTS)
NOT_FILES = ("*/*", "consolidated*", "params.json")
# The identity samples each tensor in this many places: different models of the same shape differ everywhere.
SAMPLES = 4
SAMPLE_BYTES = 256
IDENTITY_BYTES = 16
# A cache with these files is complete; other files may be missing.
_PATTERNS: dict[str, Any] = {"allow_patterns": FILES, "ignore_patterns": NOT_FILES}


class _Index(msgspec.Struct):
    """A model's index, with the file of each tensor."""

    weight_map: dict[str, str]


def model_folder(model: str, **hub: Any) -> Path | None:
    """Return the model's folder, or its folder in this machine's hub cache; None if it is not cached.

    Args:
        hub: arguments of `snapshot_download`, such as `revision`.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True, **_PATTERNS, **hub))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return None


def model_config(model: str, **hub: Any) -> dict[str, Any]:
    """Return a model's config.json, fetched from the hub if necessary; empty if it is unavailable."""
    path = Path(model, CONFIG) if Path(model).is_dir() else _fetched(model, CONFIG, **hub)
    try:
        config = {} if path is None else json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Return the tensors in a model's folder by name. Raises OSError, ValueError for a damaged file."""
    if (folder / TENSORS).is_file():
        return msgspec.json.decode((folder / TENSORS).read_bytes(), type=dict[str, Tensor])
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        tensors |= tensors_of(path)
    return tensors


def hub_tensors(model: str, revision: str | None = None) -> dict[str, Tensor]:
    """Return the tensors of a model on the hub by name; empty if it is unavailable.

    Fetches only the headers of its files, a few hundred KiB.
    """
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import HTTPError, NotASafetensorsRepoError, SafetensorsParsingError

    unreadable = (NotASafetensorsRepoError, SafetensorsParsingError, ValueError, KeyError)
    try:
        files = get_safetensors_metadata(model, revision=revision).files_metadata.values()
    except (*unreadable, HTTPError, OSError):
        return {}
    return {
        name: Tensor(tensor.dtype, tuple(tensor.shape)) for file in files for name, tensor in file.tensors.items()
    }


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name. Raises OSError, ValueError for a damaged file."""
    return {name: Tensor(tensor.dtype, tensor.shape) for name, tensor in layout_of(path).items()}


def layout_of(path: Path) -> safetensors.Layout:
    """Return the positions of tensors in a safetensors file. Raises OSError, ValueError for a damaged file."""
    try:
        return safetensors.layout_of(path)
    except Corrupt as error:  # Corrupt is for objects in the store; this is a local file
        raise ValueError(str(error)) from error


def identity_of(folder: Path) -> str:
    """Return a hex digest of the model's tensors: their names, shapes and types, and sampled bytes of each.

    It does not depend on how tensors are divided over files. Empty without safetensors files. Raises OSError,
    ValueError.
    """
    lines: dict[str, bytes] = {}
    for path in _weight_files(folder):
        tensors = layout_of(path)
        with path.open("rb") as file:
            for name, tensor in tensors.items():
                end = tensor.begin + tensor.size_bytes
                stride = max(1, (tensor.size_bytes - SAMPLE_BYTES) // (SAMPLES - 1))
                offsets = range(tensor.begin, end, stride)[:SAMPLES]
                samples = [os.pread(file.fileno(), min(SAMPLE_BYTES, end - at), at) for at in offsets]
                lines[name] = f"{name} {tensor.dtype} {list(tensor.shape)} ".encode() + b"".join(samples)
    return blake3(b"\n".join(lines[name] for name in sorted(lines))).hexdigest(IDENTITY_BYTES) if lines else ""


def _fetched(model: str, name: str, **hub: Any) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError, HTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, name, **hub))
    except (LocalEntryNotFoundError, HFValidationError, HTTPError, OSError):
        return None


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that engines load: those of the index, else the single file, else all."""
    if (folder / INDEX).is_file():
        index = msgspec.json.decode((folder / INDEX).read_bytes(), type=_Index)
        return [folder / name for name in sorted(set(index.weight_map.values()))]
    if (folder / layout.MODEL).is_file():
        return [folder / layout.MODEL]
    return sorted(folder.glob("*.safetensors"))
