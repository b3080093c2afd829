"""A checkpoint as plain files in the store."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import StoreUnavailable
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import chunks, transfer
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.checkpoint.stream.manifest import files_below
from grpo_orch.checkpoint.stream.transfer import Export, upload
from grpo_orch.policies.model.vocabulary import PolicyVersion

names = itertools.count()
AT = PolicyVersion(1, 8)
WEIGHTS = b"w" * (chunks.CHUNK_BYTES + 5)  # more than one chunk
FILES = {
    "model.safetensors": WEIGHTS,
    "config.json": b"{}",
    "base_model/model.safetensors": b"base",
    "optimizer.pt": b"o",
    "scheduler.pt": b"s",
    "rng_state.pth": b"r",
    "grpo_window_0.pt": b"g",
    "ref_model.safetensors": b"f",
    "detector.json": b"{}",
    "run.json": b"{}",
    "latest": b"global_step8",
    "zero_to_fp32.py": b"import torch",
    "zero_to_torch.py": b"import torch",
    "global_step8/mp_rank_00_model_states.pt": b"m",
    "pytorch_model_fsdp.bin": b"m",
}
EXPORTED = {"model.safetensors": WEIGHTS, "config.json": b"{}", "base_model/model.safetensors": b"base"}


class CuttingStore(Store):
    """Loses its connection in the middle of so many multi-part objects."""

    cuts = 0

    def put_parts(self, key: str, parts: object) -> None:
        if self.cuts:
            self.cuts -= 1
            super().put(key, b"half")
            raise StoreUnavailable(f"write {key}")
        super().put_parts(key, parts)  # type: ignore[arg-type]  # as it was given


@pytest.fixture
def store(tmp_path: Path) -> CuttingStore:
    store = CuttingStore(f"memory://exports-{next(names)}")
    for name, data in FILES.items():
        path = tmp_path / "made" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    upload(store, Catalog(store, "test"), files_below(tmp_path / "made"), AT, 1.0, {})
    return store


def exported(store: Store) -> dict[str, bytes]:
    prefix = f"{layout.export(AT)}/"
    keys = [entry.key for entry in store.entries(layout.EXPORTS) if entry.key.startswith(prefix)]
    return {key.removeprefix(prefix): store.get(key) for key in keys}


def test_export_has_weights_and_no_trainer_state(store: CuttingStore) -> None:
    assert transfer.export_of(AT).read(store) is None
    done = transfer.export_weights(store, AT)
    assert done == Export("1-8", "exports/1-8")
    assert transfer.export_of(AT).read(store) == done
    assert exported(store) == EXPORTED


def test_interrupted_export_does_not_count_and_is_repeated(store: CuttingStore) -> None:
    store.cuts = 1
    with pytest.raises(StoreUnavailable):
        transfer.export_weights(store, AT)
    assert transfer.export_of(AT).read(store) is None
    transfer.export_weights(store, AT)
    assert exported(store) == EXPORTED


def test_damaged_checkpoint_is_reported_and_not_exported(store: CuttingStore) -> None:
    for entry in store.entries(layout.BLOBS):
        store.put(entry.key, b"damaged")
    done = transfer.export_weights(store, AT)
    assert done.prefix == ""
    assert done.error
    assert transfer.export_weights(store, AT) == done
