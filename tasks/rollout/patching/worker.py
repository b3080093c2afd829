"""Changes of weights inside vLLM's workers, through `collective_rpc`: put into the parameters, or compared."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from checkpoint.weights import delta
from tasks.rollout.vllm.places import NotFollowed, Places, bits, places_of

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
SIGNED = {1: "u1", 2: "<i2", 4: "<i4", 8: "<i8"}  # torch takes no others of numpy's words
AT_A_TIME = 2**22  # elements: what is computed about their places takes 0.3 GB beside the model


class Patching:
    """What each worker of vLLM can do in addition, through `collective_rpc`."""

    def follow_loader(self: Any, deltas: Sequence[str]) -> str:
        """Find out where the tensors that these deltas change are in the parameters. Returns why that cannot be
        said; empty where it can. Changes nothing. Raises Corrupt, OSError."""
        tensors = [one for path in deltas for one in delta.index_of(Path(path)).tensors]
        for one in tensors:
            if one.dtype not in TYPES:
                return f"{one.name} is of {one.dtype}"
        kinds = {one.name: (TYPES[one.dtype], one.shape) for one in tensors}
        model = self.model_runner.get_model()
        now = {name: one.data_ptr() for name, one in model.named_parameters()}
        known: tuple[dict[str, int], Places] = getattr(self, "_grpo_places", ({}, {}))
        places = known[1] if known[0] == now else {}  # a reload may have put parameters elsewhere
        if new := {name: one for name, one in kinds.items() if name not in places}:
            try:
                places |= places_of(model, new)
            except NotFollowed as error:
                return str(error)[:500]
        self._grpo_places = now, places
        return ""

    def apply_deltas(self: Any, deltas: Sequence[str], digests: Sequence[str]) -> None:
        """Put what has changed into the parameters, and read it back. `follow_loader` knows the tensors.

        Args:
            deltas: paths of files, one after the other.
            digests: of the weights before the first and after each.

        Raises Corrupt, OSError, ValueError: then the parameters are those of no policy.
        """
        places: Places = self._grpo_places[1]
        with ThreadPoolExecutor(delta.WORKERS) as pool, torch.no_grad():
            for path, base, weights in zip(deltas, digests[:-1], digests[1:], strict=True):
                for one in delta.changes_in(Path(path), base, weights, pool):
                    for begin in range(0, len(one.places), AT_A_TIME):
                        piece = slice(begin, begin + AT_A_TIME)
                        at = torch.from_numpy(one.places[piece]).to(self.device)
                        words = torch.from_numpy(one.values[piece].view(SIGNED[one.values.itemsize]))
                        values = words.to(self.device).view(TYPES[one.tensor.dtype])
                        if not all(part.write(at, values) for part in places[one.tensor.name]):
                            raise ValueError(f"{one.tensor.name} does not hold what was put into it")

    def differs(self: Any, path: str, first: int, step: int) -> str:
        """The first tensor that the parameters do not hold as the file at `path` does, bit for bit; empty if there
        is none. Of those that `follow_loader` knows, by name, each `step`th is compared from the `first`. Raises
        OSError."""
        places: Places = self._grpo_places[1]
        with safe_open(path, "pt") as file:
            for name in sorted(places.keys() & set(file.keys()))[first::step]:
                for part in places[name]:
                    wanted = part.of(file.get_tensor(name)).to(part.target.device, part.target.dtype)
                    if not torch.equal(bits(wanted), bits(part.target)):
                        return name
        return ""
