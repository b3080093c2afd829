"""A fetched policy's files, beside those of the base model: looked at before an engine reads them.

Headers alone are read. With `canary.json`, which the trainer puts beside the weights, come the log-probabilities
that the engine is then asked for (`policies.serving.canary`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import structlog

from checkpoint.store import layout
from policies.model.spec import RunSpec
from policies.serving.canary import Canary
from policies.weights.adapters import ADAPTER_BASE, ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_mismatch, engine_rank
from policies.weights.tensors import HEAD, Tensor, mismatch
from tasks.machine.base_model import identity_of, layout_of, tensors_in, tensors_of
from tasks.rollout.vllm.flags import base_config, base_folder, base_on_hub, may_start_bare, takes_adapters
from tasks.rollout.vllm.server import PolicyRefused

log = structlog.get_logger()

# Adapters on a rollout node: whether they are what it gets, and a look at each one's files before vLLM's.
#
# What vLLM is told of is small enough to be read whole here.

# By safetensors' names of types: as which integers numbers are read, and the bits that are all set in one that is
# infinite or NaN.
EXPONENTS = {
    "F64": (np.uint64, 0x7FF0 << 48),
    "F32": (np.uint32, 0x7F80 << 16),
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
}


class AdapterCheck:
    """Compares each adapter with the base model of the run."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._identity: str | None = None  # of the base model, once it is asked for

    def mismatch(self, folder: Path, base: Mapping[str, Tensor]) -> str:
        """Why the files in `folder` are no adapter for the base model, in a line; empty where they are.

        Args:
            base: the base model's tensors; empty where they are not known.

        Raises OSError, ValueError where they are not readable.
        """
        for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG, ADAPTER_BASE):
            if not (folder / name).is_file():
                return f"no adapter, which is what this run's nodes take: {name} is missing"
        config = _json_in(folder / ADAPTER_CONFIG)
        path = folder / ADAPTER_WEIGHTS
        theirs, ours = str(_json_in(folder / ADAPTER_BASE).get("identity", "")), self._base_identity()
        if theirs and ours and theirs != ours:
            return f"the adapter is for another base model, {theirs}; this node has {ours}"
        rank = engine_rank(self._spec.trainer.peft or {})
        if reason := adapter_mismatch(tensors_of(path), config, base, rank):
            return reason
        return next((f"not a number: {name} has such" for name in not_finite(path)), "")

    def _base_identity(self) -> str:
        """Empty where the model's files are not found."""
        if self._identity is None:
            folder = base_folder(self._spec)
            try:
                self._identity = "" if folder is None else identity_of(folder)
            except (OSError, ValueError) as error:
                log.warning("base_model_unreadable", folder=str(folder), why=str(error))
                self._identity = ""
        return self._identity


def not_finite(path: Path) -> list[str]:
    """The tensors of a safetensors file in which a number is infinite or NaN. Raises OSError, ValueError."""
    layout, content = layout_of(path), path.read_bytes()
    found = []
    for name, one in sorted(layout.items()):
        kind, exponent = EXPONENTS[one.dtype]
        numbers = np.frombuffer(content[one.begin : one.begin + one.size_bytes], kind)
        if np.any((numbers & kind(exponent)) == kind(exponent)):
            found.append(name)
    return found


def _json_in(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is no mapping")  # noqa: TRY004  # a damaged file, not a wrong argument
    return found


class PolicyCheck:
    """Compares each policy with the base model of the run.

    Of that the files' headers are needed: those on this machine, else the hub's.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._adapters: AdapterCheck | None = None  # for a run of adapters, once it is asked for
        self._base: dict[str, Tensor] | None = None  # once it is asked for
        self._tied = False
        self._reading = threading.Lock()  # a machine's engines ask at once

    def covers_engine(self) -> bool:
        """Whether a policy that passes with `bare` overwrites all that an engine holds: then this one may start
        without the base model's weights, which for a 32B model are 65 GB.

        Not where the head is said to be the embedding and is in the files as well: of these vLLM makes two where
        it reads them and they differ.
        """
        if takes_adapters(self._spec) or not may_start_bare(self._spec):
            return False
        base = self._known()
        return bool(base) and not (self._tied and any(HEAD.search(name) for name in base))

    def passed(self, folder: Path, *, bare: bool = False) -> Canary | None:
        """Return the canary of a policy whose tensors are those that the engine expects; None if its
        trainer, whose weights are then divided over processes, published none.

        Args:
            folder: the policy's.
            bare: whether the engine has no weights yet: then there is no tensor that the policy may lack.

        Raises PolicyRefused.
        """
        canary, base = canary_in(folder), self._known()
        unused = canary.unused if canary is not None and not bare else []
        try:
            if self._adapters is None:
                reason = mismatch(tensors_in(folder), base, tied=self._tied, unused=unused)
            else:
                reason = self._adapters.mismatch(folder, base)
        except (OSError, ValueError) as error:
            raise PolicyRefused(f"its files are not readable: {error}", touched=False) from error
        if reason:
            raise PolicyRefused(reason, touched=False)
        return canary

    def _known(self) -> dict[str, Tensor]:
        with self._reading:
            if self._base is None:
                self._adapters = AdapterCheck(self._spec) if takes_adapters(self._spec) else None
                self._base, self._tied = self._read_base()
            return self._base

    def _read_base(self) -> tuple[dict[str, Tensor], bool]:
        """The base model's tensors, none where its files are not found, and whether its head is tied."""
        folder = base_folder(self._spec)
        try:
            if folder is not None and (base := tensors_in(folder)):
                return base, _ties_its_head(json.loads((folder / "config.json").read_bytes()))
        except (OSError, ValueError) as error:
            log.warning("base_model_unreadable", folder=str(folder), why=str(error))
        if base := base_on_hub(self._spec):
            return base, _ties_its_head(base_config(self._spec))
        log.warning(
            "tensors_not_compared",
            model=self._spec.trainer.model,
            hint="the base model has no safetensors files here or on the hub; the canary alone tells a wrong one",
        )
        return {}, False


def canary_in(folder: Path) -> Canary | None:
    """The canary beside a policy's weights; None where there is none. Raises PolicyRefused."""
    path = folder / layout.CANARY
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Canary)
    except msgspec.DecodeError as error:
        raise PolicyRefused(f"{layout.CANARY} is not readable: {error}", touched=False) from error


def _ties_its_head(config: Mapping[str, Any]) -> bool:
    """Whether it may: where the file says nothing it does, for that was what transformers left out as usual."""
    of_text = config.get("text_config") or {}
    return bool(config.get("tie_word_embeddings", of_text.get("tie_word_embeddings", True)))
