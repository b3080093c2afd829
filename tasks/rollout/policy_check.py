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
import structlog

from checkpoint.store import layout
from policies.model.spec import RunSpec
from policies.serving.canary import Canary
from policies.weights.tensors import HEAD, Tensor, mismatch
from tasks.machine.base_model import tensors_in
from tasks.rollout.adapters import AdapterCheck
from tasks.rollout.vllm.flags import base_config, base_folder, base_on_hub, may_start_bare, takes_adapters
from tasks.rollout.vllm.server import PolicyRefused

log = structlog.get_logger()


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
