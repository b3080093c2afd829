"""The trainer's weights, put into the store as a policy version that rollout nodes can pull and verify."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from checkpoint.store import layout
from checkpoint.store.codec import to_json
from checkpoint.store.run_store import Store
from checkpoint.stream import manifest
from policies.model.vocabulary import PolicyVersion, Precedence
from policies.serving.canary import Canary
from policies.serving.wire import PolicyRef

WEIGHTS = "model.safetensors"


class PolicyPublisher:
    """Publishes policy versions and keeps two in the store: the present one and the one before.

    Each publisher writes below names of its own, and removes its own and older publishers' policies: one that was
    replaced and does not know it takes nothing from the newer one, which removes what it leaves.

    Args:
        store: the run's store.
        model_config: the model's configuration, with `save_pretrained`; stored beside the weights.
        scratch: a folder of its own on this machine.
        by: the precedence of its trainer.
    """

    def __init__(self, store: Store, model_config: Any, scratch: Path, by: Precedence) -> None:
        self._store = store
        self._by = by
        self._folder = scratch
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        model_config.save_pretrained(scratch)
        self._remover = ThreadPoolExecutor(1, thread_name_prefix="remove-policies")  # no step waits for it
        self._removing: Future[None] = self._remover.submit(lambda: None)

    def publish(
        self, version: PolicyVersion, tensors: Iterable[tuple[str, torch.Tensor]], canary: Canary | None
    ) -> PolicyRef:
        """Store the weights, named as in a Hugging Face checkpoint (tied ones once), and what they compute.

        Raises StoreError.
        """
        # A view is copied: what is stored must be the parameter, not the buffer it lives in.
        whole = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors}
        save_file(whole, self._folder / WEIGHTS, metadata={"format": "pt"})
        (self._folder / layout.CANARY).unlink(missing_ok=True)
        if canary is not None:
            (self._folder / layout.CANARY).write_bytes(to_json(canary))
        prefix = layout.policy(version, self._by)
        published = manifest.publish(self._store, prefix, self._folder, version, time.time())
        self._removing.result()  # of the policy before: long done
        self._removing = self._remover.submit(self._remove_older, prefix)
        return PolicyRef(str(version), prefix, published.digest)

    def _remove_older(self, present: str) -> None:
        """Remove all but the present and the one before, of this and of older timelines, and what a killed trainer
        left of an unfinished one."""
        keys = [entry.key for entry in self._store.entries(layout.POLICIES)]
        whole = {key.removesuffix(f"/{layout.MANIFEST}") for key in keys if key.endswith(f"/{layout.MANIFEST}")}
        older: dict[str, tuple[Precedence, int]] = {}
        for prefix in {"/".join(key.split("/")[:3]) for key in keys}:
            with contextlib.suppress(ValueError):  # a foreign file
                older[prefix] = _age(prefix)
        in_order = sorted((p for p in older if older[p] < _age(present)), key=lambda p: older[p])
        before = [prefix for prefix in in_order if prefix in whole][-1:]
        for gone in in_order:
            if gone not in before:
                manifest.remove(self._store, gone)


def _age(prefix: str) -> tuple[Precedence, int]:
    """By which published policies are in the order of their making."""
    return layout.author_of(prefix), layout.version_of(f"{prefix}/").step
