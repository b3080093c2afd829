"""Publish a trainer's LoRA adapter as a policy version: PEFT's two files and the identity of the base model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import manifest
from grpo_orch.policies.model.vocabulary import PolicyVersion, Precedence
from grpo_orch.policies.serving.canary import Canary
from grpo_orch.policies.serving.wire import PolicyRef
from grpo_orch.policies.weights.adapters import ADAPTER_BASE, ADAPTER_CONFIG, ADAPTER_WEIGHTS
from grpo_orch.policies.weights.tensors import ServedTypes, Tensor
from grpo_orch.tasks.storing.publish import OF_TYPE, PolicyPublisher
from grpo_orch.tasks.storing.step_costs import StepCosts
from grpo_orch.tasks.storing.tensors import type_name

# Keys that differ between machines, left out so that equal adapters have equal digests.
MACHINE_KEYS = ("peft_version", "base_model_name_or_path")


class AdapterPublisher(PolicyPublisher):
    """Publishes adapters like a PolicyPublisher publishes weights.

    A policy's digest covers the adapter's tensors, its configuration and the identity of its base model.

    Args:
        store, scratch, by, costs: as for a PolicyPublisher.
        config: the adapter's configuration from LoraConfig's `to_dict`.
        model: the base model, as named in run.yaml.
        base: its identity (`tasks.machine.base_model.identity_of`); empty if unknown.
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
        """Store the adapter's tensors and their canary.

        The tensors are rounded to the type that nodes serve in, if known: vLLM does that first when it loads them
        (`vllm/lora/lora_model.py`), so a node computes the same from half the bytes. Otherwise they keep the type
        they are trained in. Raises StoreError.
        """
        self._await_removal()
        begun_s = time.monotonic()
        whole = dict(self._rounded(dict(tensors)))
        save_file(whole, self._extras / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        self._put_canary(canary)
        prefix = layout.policy(version, self._by)
        meta = {manifest.KIND: manifest.ADAPTER}
        published = manifest.publish(self._store, prefix, self._extras, version, time.time(), meta)
        self._costs.publish(round(time.monotonic() - begun_s, 3), published.size_bytes, published.size_bytes)
        self._remove_older(prefix, since_step)
        return PolicyRef(str(version), prefix, published.digest)

    def _rounded(self, trained: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        types = {
            name: Tensor(type_name(name, tensor.dtype), tuple(tensor.shape)) for name, tensor in trained.items()
        }
        for name, dtype in self._served.of(types).items():
            yield name, trained[name].detach().to("cpu", OF_TYPE[dtype]).contiguous()


class _Files:
    """The files that are the same in every version, written like PEFT's `save_pretrained`."""

    def __init__(self, config: Mapping[str, Any], model: str, base: str) -> None:
        kept = {key: _in_order(value) for key, value in config.items() if key not in MACHINE_KEYS}
        self._config = {**kept, "base_model_name_or_path": model, "inference_mode": True}
        self._base = {"model": model, "identity": base}

    def save_pretrained(self, folder: Path) -> None:
        for name, content in ((ADAPTER_CONFIG, self._config), (ADAPTER_BASE, self._base)):
            (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True))


def _in_order(value: Any) -> Any:
    """Sort sets, since PEFT keeps names in sets, whose order differs between processes."""
    return sorted(value) if isinstance(value, set | frozenset) else value
