"""The trainer's weights, put into the store as a policy version that rollout nodes can pull and verify."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from checkpoint import layout, manifest
from checkpoint.store import Store
from policies.vocabulary import PolicyVersion
from policies.wire import PolicyRef

WEIGHTS = "model.safetensors"


class PolicyPublisher:
    """Publishes policy versions and keeps two in the store: the present one and the one before.

    Args:
        store: the run's store.
        model_config: the model's configuration, with `save_pretrained`; stored beside the weights.
        scratch: a folder of its own on this machine.
    """

    def __init__(self, store: Store, model_config: Any, scratch: Path) -> None:
        self._store = store
        self._folder = scratch
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        model_config.save_pretrained(scratch)
        self._remover = ThreadPoolExecutor(1, thread_name_prefix="remove-policies")  # no step waits for it
        self._removing: Future[None] = self._remover.submit(lambda: None)

    def publish(self, version: PolicyVersion, tensors: Iterable[tuple[str, torch.Tensor]]) -> PolicyRef:
        """Store the weights, named as in a Hugging Face checkpoint (tied ones once). Raises StoreError."""
        # A view is copied: what is stored must be the parameter, not the buffer it lives in.
        whole = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors}
        save_file(whole, self._folder / WEIGHTS, metadata={"format": "pt"})
        prefix = layout.policy(version)
        published = manifest.publish(self._store, prefix, self._folder, version, time.time())
        self._removing.result()  # of the policy before: long done
        self._removing = self._remover.submit(self._remove_older, version)
        return PolicyRef(str(version), prefix, published.digest)

    def _remove_older(self, version: PolicyVersion) -> None:
        """Remove all but the present and the one before, and what a killed trainer left of an unfinished one."""
        timeline = f"{layout.POLICIES}/{version.timeline:04d}"
        before = [v for v in manifest.committed(self._store, timeline) if v < version][-1:]
        found = {layout.version_of(f"{name}/") for name in self._store.folders(timeline)}
        for gone in sorted(v for v in found if v < version and v not in before):
            manifest.remove(self._store, layout.policy(gone))
