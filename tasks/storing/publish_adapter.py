"""A trainer's LoRA adapter, put into the store as a policy version: PEFT's two files, and what it is for."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from checkpoint.store import layout
from checkpoint.store.run_store import Store
from checkpoint.stream import manifest
from policies.model.vocabulary import PolicyVersion, Precedence
from policies.serving.canary import Canary
from policies.serving.wire import PolicyRef
from policies.weights.adapters import ADAPTER_BASE, ADAPTER_CONFIG, ADAPTER_WEIGHTS
from policies.weights.tensors import ServedTypes, Tensor
from tasks.storing.publish import OF_TYPE, PolicyPublisher
from tasks.storing.step_costs import StepCosts
from tasks.storing.tensors import type_name

# Where they lie on the machine that trains; what has the same content must have the same name on the next machine.
OF_THIS_MACHINE = ("peft_version", "base_model_name_or_path")


class AdapterPublisher(PolicyPublisher):
    """Publishes adapters as a PolicyPublisher does whole weights. A policy's digest covers the adapter's tensors,
    its configuration and the identity of its base model.

    Args:
        store, scratch, by, costs: as of a PolicyPublisher.
        config: the adapter's, as LoraConfig's `to_dict` gives it.
        model: the base model, as run.yaml names it.
        base: its identity (`tasks.machine.base_model.identity_of`); empty where its files do not tell.
        served: the type that the nodes' engines round an adapter to.
    """

    def __init__(
        self,
        store: Store,
        config: Mapping[str, Any],
        model: str,
        base: str,
        scratch: Path,
        by: Precedence,
        served: ServedTypes,
        costs: StepCosts,
    ) -> None:
        super().__init__(store, _Files(config, model, base), scratch, by, served, costs)

    def publish(
        self,
        version: PolicyVersion,
        tensors: Iterable[tuple[str, torch.Tensor]],
        canary: Canary | None,
        since_step: int | None = None,
    ) -> PolicyRef:
        """Store the adapter's tensors and what the model computes with them.

        They are rounded as a node would round them, where that is known: vLLM does so before anything else
        (`vllm/lora/lora_model.py`), so that a node computes the same from half the bytes. Else they keep the type
        in which they are trained. Raises StoreError.
        """
        self._heed_removal()
        begun_s = time.monotonic()
        whole = dict(self._rounded(dict(tensors)))
        save_file(whole, self._beside / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        self._put_canary(canary)
        prefix = layout.policy(version, self._by)
        meta = {manifest.KIND: manifest.ADAPTER}
        published = manifest.publish(self._store, prefix, self._beside, version, time.time(), meta)
        self._costs.publish(round(time.monotonic() - begun_s, 3), published.size_bytes, published.size_bytes)
        self._remove_older(prefix, since_step)
        return PolicyRef(str(version), prefix, published.digest)

    def _rounded(self, trained: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        held = {name: Tensor(type_name(name, one.dtype), tuple(one.shape)) for name, one in trained.items()}
        for name, dtype in self._served.of(held).items():
            yield name, trained[name].detach().to("cpu", OF_TYPE[dtype]).contiguous()


class _Files:
    """What stays the same from version to version, as PEFT's `save_pretrained` writes it."""

    def __init__(self, config: Mapping[str, Any], model: str, base: str) -> None:
        kept = {key: _in_order(value) for key, value in config.items() if key not in OF_THIS_MACHINE}
        self._config = {**kept, "base_model_name_or_path": model, "inference_mode": True}
        self._base = {"model": model, "identity": base}

    def save_pretrained(self, folder: Path) -> None:
        for name, content in ((ADAPTER_CONFIG, self._config), (ADAPTER_BASE, self._base)):
            (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True))


def _in_order(value: Any) -> Any:
    """PEFT holds names in sets, whose order differs from process to process."""
    return sorted(value) if isinstance(value, set | frozenset) else value
