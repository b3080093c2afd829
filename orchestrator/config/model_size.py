"""Find the size and config.json of a run's model: in a local folder, in the hub's cache, or on the hub."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from grpo_orch.checkpoint.store.errors import Corrupt
from grpo_orch.checkpoint.weights.safetensors import layout_of
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.weights.disk_sizes import ModelSize
from grpo_orch.policies.weights.tensors import NAMED, WIDTH


def json_in(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; empty if it cannot be read or is not a mapping."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def config_in(path: Path) -> dict[str, Any]:
    """Return a model's config.json, filtered by `filter_config`."""
    return filter_config(json_in(path))


def filter_config(config: Any) -> dict[str, Any]:
    """Drop values whose type differs from what transformers writes: a config.json may come from anyone."""
    if not isinstance(config, Mapping):
        return {}
    return {
        name: filter_config(value) if name == "text_config" else value
        for name, value in config.items()
        if name not in CONFIG_TYPES or CONFIG_TYPES[name](value)
    }


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_item, value))


CONFIG_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "architectures": _is_list_of(lambda item: isinstance(item, str)),
    "max_position_embeddings": _is_int,
    "mlp_only_layers": _is_list_of(_is_int),
    "text_config": lambda value: isinstance(value, Mapping),
    "vocab_size": _is_int,
}


# The size.

INDEX = "model.safetensors.index.json"
HUB_TIMEOUT_S = 5.0  # for all requests together, including the DNS lookup
# Bytes per element, by the hub's type names. Packed types are counted as their bytes.
ITEM_BYTES = {**WIDTH, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1}


class SizeUnknown(Exception):
    """The size is unknown; the message is the reason in a few words."""


def find_size(spec: RunSpec, timeout_s: float = HUB_TIMEOUT_S) -> ModelSize:
    """Return the size of the run's model. Waits up to `timeout_s` for the hub. Raises SizeUnknown."""
    folder, name = Path(spec.workdir, spec.trainer.model), spec.trainer.model
    if folder.is_dir():
        return _in_folder(folder)
    if name.startswith((".", "/", "~")):
        raise SizeUnknown(f"{name} is a folder on the machines")
    if (cached := _cached(name)) is not None and _is_complete(cached):
        return _in_folder(cached)
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise SizeUnknown("HF_HUB_OFFLINE is set")
    return _size_on_hub(timeout_s, name)


def find_config(spec: RunSpec) -> Mapping[str, Any]:
    """Return the model's config.json from this machine, with or without its weights; empty if it is not here."""
    path = Path(spec.workdir, spec.trainer.model)
    folder = path if os.path.isdir(path) else _cached(spec.trainer.model)  # `is_dir` raises if a name is too long
    return {} if folder is None else config_in(folder / "config.json")


def _cached(name: str) -> Path | None:
    """Return the newest revision in this machine's hub cache (huggingface_hub, `constants.py`)."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()
    repository = hub / f"models--{name.replace('/', '--')}"
    try:
        return repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
    except (OSError, ValueError):
        return None


def _is_complete(snapshot: Path) -> bool:
    """Return whether all weight files exist: a download may be partial or without weights."""
    files = json_in(snapshot / INDEX).get("weight_map") or {"": "model.safetensors"}
    return isinstance(files, dict) and all((snapshot / str(name)).is_file() for name in files.values())


def _in_folder(folder: Path) -> ModelSize:
    config = config_in(folder / "config.json")
    try:
        tensors = [tensor for path in sorted(folder.glob("*.safetensors")) for tensor in layout_of(path).values()]
    except (Corrupt, OSError) as error:
        raise SizeUnknown(str(error)) from error
    if tensors:
        params = sum(tensor.size_bytes // tensor.item_bytes for tensor in tensors)
        return ModelSize(params, sum(tensor.size_bytes for tensor in tensors), config)
    metadata = json_in(folder / INDEX).get("metadata")
    stored_bytes = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(stored_bytes, int) or stored_bytes <= 0:
        raise SizeUnknown(f"{folder} has no safetensors files and no index")
    text_config = config.get("text_config") or {}
    dtypes = [
        section.get(key)
        for section in (config, text_config)
        for key in ("dtype", "torch_dtype")
        if section.get(key)
    ]
    width = WIDTH[NAMED.get(str(dtypes[0]).removeprefix("torch.") if dtypes else "bfloat16", "BF16")]
    return ModelSize(stored_bytes // width, stored_bytes, config)


def _size_on_hub(timeout_s: float, name: str) -> ModelSize:
    """Request the size in a thread: httpx timeouts do not cover a DNS server that does not answer."""
    results: list[ModelSize | Exception] = []

    def request() -> None:
        try:
            results.append(_request_size(timeout_s, name))
        except (httpx.HTTPError, httpx.InvalidURL, ImportError, ValueError, SizeUnknown) as error:
            results.append(error)

    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(timeout_s)
    match results[:]:
        case [ModelSize() as size]:
            return size
        case [SizeUnknown() as error]:
            raise error
        case [Exception() as error]:
            raise SizeUnknown(f"cannot reach the hub: {str(error) or type(error).__name__}") from error
    raise SizeUnknown(f"the hub did not answer within {timeout_s:.0f} s")


def _request_size(timeout_s: float, name: str) -> ModelSize:
    from huggingface_hub import constants, get_token  # a slow import

    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    base = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    with httpx.Client(base_url=base, headers=headers, timeout=timeout_s, follow_redirects=True) as http:
        answer = http.get(f"/api/models/{name}")
        if answer.status_code in (401, 403, 404):
            raise SizeUnknown(f"the hub answered {answer.status_code} for {name}; is HF_TOKEN set?")
        model = answer.raise_for_status().json()
        safetensors = model.get("safetensors") if isinstance(model, dict) else None
        counts = safetensors.get("parameters") if isinstance(safetensors, dict) else None
        if not isinstance(counts, dict) or not all(isinstance(count, int) for count in counts.values()):
            raise SizeUnknown("the hub reports no size: it has no safetensors files")
        file = http.get(f"/{name}/resolve/main/config.json")
        config = file.json() if file.status_code == 200 else {}
    stored_bytes = sum(count * ITEM_BYTES.get(dtype, 2) for dtype, count in counts.items())
    return ModelSize(sum(counts.values()), stored_bytes, filter_config(config))
