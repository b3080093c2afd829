"""A fetched policy's files, beside those of the base model: looked at before an engine reads them.

Headers alone are read. With `canary.json`, which the trainer puts beside the weights, come the log-probabilities
that the engine is then asked for (`policies.serving.canary`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog

from checkpoint.store import layout
from policies.model.spec import RunSpec
from policies.serving.canary import Canary
from policies.serving.tensors import Tensor, mismatch
from tasks.rollout.vllm_flags import model_of
from tasks.rollout.vllm_server import PolicyRefused

log = structlog.get_logger()

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
HEADER_SIZE_MAX = 100 * 2**20  # which is safetensors' own limit


class PolicyCheck:
    """Compares each policy with the base model of the run."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._base: dict[str, Tensor] | None = None  # once it is asked for
        self._tied = False

    def passed(self, folder: Path) -> Canary | None:
        """Return the canary of a policy whose tensors are those that the engine expects; None if its trainer, an
        older one or one whose weights are divided over processes, published none. Raises PolicyRefused."""
        canary = _canary_in(folder)
        if self._base is None:
            self._base, self._tied = self._read_base()
        try:
            published = tensors_in(folder)
        except (OSError, ValueError) as error:
            raise PolicyRefused(f"its files are not readable: {error}", touched=False) from error
        unused = canary.unused if canary is not None else []
        if reason := mismatch(published, self._base, tied=self._tied, unused=unused):
            raise PolicyRefused(reason, touched=False)
        return canary

    def _read_base(self) -> tuple[dict[str, Tensor], bool]:
        """The base model's tensors, none where its files are not found, and whether its head is tied."""
        folder = _base_folder(self._spec)
        try:
            if folder is not None and (base := tensors_in(folder)):
                return base, _ties_its_head(json.loads((folder / "config.json").read_bytes()))
        except (OSError, ValueError) as error:
            log.warning("base_model_unreadable", folder=str(folder), why=str(error))
        log.warning(
            "tensors_not_compared",
            model=self._spec.trainer.model,
            hint="the base model has no safetensors files on this machine; its canary alone tells a wrong policy",
        )
        return {}, False


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """The tensors in a model's folder, by name. Raises OSError, ValueError for a damaged file."""
    found: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        found |= _header_of(path)
    return found


def _weight_files(folder: Path) -> list[Path]:
    """The files that engines load: those of the index, else the whole one, else all."""
    if (folder / INDEX).is_file():
        named = json.loads((folder / INDEX).read_bytes())["weight_map"]
        return [folder / name for name in sorted(set(named.values()))]
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    return sorted(folder.glob("*.safetensors"))


def _header_of(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > HEADER_SIZE_MAX:
            raise ValueError(f"{path.name} is no safetensors file")
        header: dict[str, dict[str, Any]] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {name: Tensor(one["dtype"], tuple(one["shape"])) for name, one in header.items()}


def _canary_in(folder: Path) -> Canary | None:
    path = folder / layout.CANARY
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Canary)
    except msgspec.DecodeError as error:
        raise PolicyRefused(f"{layout.CANARY} is not readable: {error}", touched=False) from error


def _base_folder(spec: RunSpec) -> Path | None:
    """Where vLLM has read the base model from: the run's folder, or the hub's cache on this machine."""
    model = model_of(spec)
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    flags = spec.rollout.vllm
    try:
        where = snapshot_download(
            model, revision=flags.get("revision"), cache_dir=flags.get("download-dir"), local_files_only=True
        )
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return None
    return Path(where)


def _ties_its_head(config: Mapping[str, Any]) -> bool:
    """Whether it may: where the file says nothing it does, for that was what transformers left out as usual."""
    of_text = config.get("text_config") or {}
    return bool(config.get("tie_word_embeddings", of_text.get("tie_word_embeddings", True)))
