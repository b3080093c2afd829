"""Compare a fetched policy's files with the base model before an engine loads them.

Only the headers are read. `canary.json`, which the trainer stores with the weights, contains the log-probabilities
that the engine must reproduce (`policies.serving.canary`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog

from grpo_orch.checkpoint.store import layout
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.serving.canary import Canary
from grpo_orch.policies.weights.adapters import (
    ADAPTER_BASE,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_mismatch,
    engine_rank,
)
from grpo_orch.policies.weights.tensors import HEAD, Tensor, mismatch
from grpo_orch.tasks.machine.base_model import identity_of, tensors_in, tensors_of
from grpo_orch.tasks.rollout.vllm.flags import (
    base_config,
    base_folder,
    base_on_hub,
    may_start_bare,
    takes_adapters,
)
from grpo_orch.tasks.rollout.vllm.server import PolicyRefused

log = structlog.get_logger()


class PolicyCheck:
    """Compares policies with the run's base model, by the headers of its files on this machine or on the hub."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._base: dict[str, Tensor] | None = None  # read at the first use, as all below
        self._is_tied = False
        self._takes_adapters = False
        self._identity = ""  # of the base model, in a run with adapters
        self._lock = threading.Lock()  # engines of a machine call concurrently

    def covers_engine(self) -> bool:
        """Return whether an accepted policy sets all weights of an engine.

        An engine may then start without the base model's weights, which for a 32B model are 65 GB. Not so if the
        head is tied to the embedding but is in the files as well: vLLM unties them if they differ in the files.
        """
        if takes_adapters(self._spec) or not may_start_bare(self._spec):
            return False
        base = self._base_tensors()
        return bool(base) and not (self._is_tied and any(HEAD.search(name) for name in base))

    def verify(self, folder: Path, *, bare: bool = False) -> Canary | None:
        """Check that a policy has the tensors that the engine expects. Raises PolicyRefused.

        Returns its canary; None if the trainer published none, because its weights are sharded over processes.

        Args:
            folder: of the policy.
            bare: the engine has no weights yet, so the policy must have all tensors, even unused ones.
        """
        canary, base = canary_in(folder), self._base_tensors()
        unused = canary.unused if canary is not None and not bare else []
        try:
            if self._takes_adapters:
                reason = self._adapter_mismatch(folder, base)
            else:
                reason = mismatch(tensors_in(folder), base, tied=self._is_tied, unused=unused)
        except (OSError, ValueError) as error:
            raise PolicyRefused(f"unreadable files: {error}", touched=False) from error
        if reason:
            raise PolicyRefused(reason, touched=False)
        return canary

    def _base_tensors(self) -> dict[str, Tensor]:
        with self._lock:
            if self._base is None:
                self._takes_adapters = takes_adapters(self._spec)
                self._identity = self._read_identity() if self._takes_adapters else ""
                self._base, self._is_tied = self._read_base()
            return self._base

    def _adapter_mismatch(self, folder: Path, base: Mapping[str, Tensor]) -> str:
        """Explain in one line why the files in `folder` are not an adapter for the base model; empty if they are.

        Args:
            base: the base model's tensors; empty if unknown.

        Raises OSError, ValueError for unreadable files.
        """
        for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG, ADAPTER_BASE):
            if not (folder / name).is_file():
                return f"not an adapter, which this run's nodes require: {name} is missing"
        config = _json_in(folder / ADAPTER_CONFIG)
        theirs, ours = str(_json_in(folder / ADAPTER_BASE).get("identity", "")), self._identity
        if theirs and ours and theirs != ours:
            return f"the adapter is for another base model, {theirs}; this node has {ours}"
        rank = engine_rank(self._spec.trainer.peft or {})
        return adapter_mismatch(tensors_of(folder / ADAPTER_WEIGHTS), config, base, rank)

    def _read_identity(self) -> str:
        """Return the base model's identity; empty without its files."""
        folder = base_folder(self._spec)
        try:
            return "" if folder is None else identity_of(folder)
        except (OSError, ValueError) as error:
            log.warning("base_model_unreadable", folder=str(folder), reason=str(error))
            return ""

    def _read_base(self) -> tuple[dict[str, Tensor], bool]:
        """Return the base model's tensors, empty without its files, and whether its head is tied."""
        folder = base_folder(self._spec)
        try:
            if folder is not None and (base := tensors_in(folder)):
                return base, _has_tied_head(json.loads((folder / "config.json").read_bytes()))
        except (OSError, ValueError) as error:
            log.warning("base_model_unreadable", folder=str(folder), reason=str(error))
        if base := base_on_hub(self._spec):
            return base, _has_tied_head(base_config(self._spec))
        log.warning(
            "tensors_not_compared",
            model=self._spec.trainer.model,
            hint="the base model has no safetensors files here or on the hub; only the canary checks policies",
        )
        return {}, False


def _json_in(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is not a mapping")  # noqa: TRY004  # a damaged file, not a wrong argument
    return content


def canary_in(folder: Path) -> Canary | None:
    """Read the canary of a policy; None if it has none. Raises PolicyRefused."""
    path = folder / layout.CANARY
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Canary)
    except msgspec.DecodeError as error:
        raise PolicyRefused(f"{layout.CANARY} is unreadable: {error}", touched=False) from error


def _has_tied_head(config: Mapping[str, Any]) -> bool:
    """Return whether the head may be tied. A missing key means tied, transformers' default that it omits."""
    text_config = config.get("text_config") or {}
    return bool(config.get("tie_word_embeddings", text_config.get("tie_word_embeddings", True)))
