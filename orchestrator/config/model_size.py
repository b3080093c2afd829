"""How large the model of a run is: from its folder here, from the hub's cache, or from the hub; and its
config.json.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from checkpoint.store.errors import Corrupt
from checkpoint.weights.safetensors import layout_of
from policies.model.spec import RunSpec
from policies.weights.disks import ModelSize
from policies.weights.tensors import NAMED, WIDTH


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


# The size.

INDEX = "model.safetensors.index.json"
ASK_S = 5.0  # for the whole of it, the look-up of the hub's address included
# Of an element, by the hub's names of types; what is packed into fewer bits is counted as its bytes.
ITEM_BYTES = {**WIDTH, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1}


class NotKnown(Exception):
    """It cannot be told; the message says why, in a few words."""


def find_size(spec: RunSpec) -> ModelSize:
    """Return the size of the run's model. Asks the hub at most for ASK_S seconds. Raises NotKnown."""
    folder, name = Path(spec.workdir, spec.trainer.model), spec.trainer.model
    if folder.is_dir():
        return _in_folder(folder)
    if name.startswith((".", "/", "~")):
        raise NotKnown(f"{name} is a folder of the machines'")
    if (cached := _cached(name)) is not None and _is_whole(cached):
        return _in_folder(cached)
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise NotKnown("HF_HUB_OFFLINE is set")
    return _within(ASK_S, name)


def find_config(spec: RunSpec) -> Mapping[str, Any]:
    """Return the model's config.json, also where its weights are not at hand; empty where there is none here."""
    folder = Path(spec.workdir, spec.trainer.model)
    found = folder if folder.is_dir() else _cached(spec.trainer.model)
    return {} if found is None else config_in(found / "config.json")


def _cached(name: str) -> Path | None:
    """The model's newest revision in the hub's cache on this machine (huggingface_hub, `constants.py`)."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()
    repository = hub / f"models--{name.replace('/', '--')}"
    try:
        return repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
    except (OSError, ValueError):
        return None


def _is_whole(snapshot: Path) -> bool:
    """Whether all files with its weights are there: a download may have been cut off, or have left them out."""
    files = json_in(snapshot / INDEX).get("weight_map") or {"": "model.safetensors"}
    return isinstance(files, dict) and all((snapshot / str(name)).is_file() for name in files.values())


def _in_folder(folder: Path) -> ModelSize:
    config = config_in(folder / "config.json")
    try:
        tensors = [one for path in sorted(folder.glob("*.safetensors")) for one in layout_of(path).values()]
    except (Corrupt, OSError) as error:
        raise NotKnown(str(error)) from error
    if tensors:
        params = sum(one.size_bytes // one.item_bytes for one in tensors)
        return ModelSize(params, sum(one.size_bytes for one in tensors), config)
    metadata = json_in(folder / INDEX).get("metadata")
    stored_bytes = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(stored_bytes, int) or stored_bytes <= 0:
        raise NotKnown(f"{folder} has no safetensors files and no index of them")
    text = config.get("text_config") or {}
    kinds = [one.get(key) for one in (config, text) for key in ("dtype", "torch_dtype") if one.get(key)]
    width = WIDTH[NAMED.get(str(kinds[0]).removeprefix("torch.") if kinds else "bfloat16", "BF16")]
    return ModelSize(stored_bytes // width, stored_bytes, config)


def _within(limit_s: float, name: str) -> ModelSize:
    """Ask in a thread: where the name service does not answer, no limit of a request's holds."""
    found: list[ModelSize | Exception] = []

    def ask() -> None:
        try:
            found.append(_on_hub(name))
        except (httpx.HTTPError, httpx.InvalidURL, ImportError, ValueError, NotKnown) as error:
            found.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(limit_s)
    match found[:]:
        case [ModelSize() as size]:
            return size
        case [NotKnown() as error]:
            raise error
        case [Exception() as error]:
            raise NotKnown(f"the hub cannot be asked: {str(error) or type(error).__name__}") from error
    raise NotKnown(f"the hub did not answer within {limit_s:.0f} s")


def _on_hub(name: str) -> ModelSize:
    from huggingface_hub import constants, get_token  # not for every command: it takes a while

    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    base = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    with httpx.Client(base_url=base, headers=headers, timeout=ASK_S, follow_redirects=True) as http:
        answer = http.get(f"/api/models/{name}")
        if answer.status_code in (401, 403, 404):
            raise NotKnown(f"the hub shows no {name} (it answered {answer.status_code}; is HF_TOKEN set?)")
        said = answer.raise_for_status().json()
        stored = said.get("safetensors") if isinstance(said, dict) else None
        counts = stored.get("parameters") if isinstance(stored, dict) else None
        if not isinstance(counts, dict) or not all(isinstance(count, int) for count in counts.values()):
            raise NotKnown("the hub says nothing of its size: it has no safetensors files")
        file = http.get(f"/{name}/resolve/main/config.json")
        config = file.json() if file.status_code == 200 else {}
    stored_bytes = sum(count * ITEM_BYTES.get(kind, 2) for kind, count in counts.items())
    return ModelSize(sum(counts.values()), stored_bytes, config_of(config))
