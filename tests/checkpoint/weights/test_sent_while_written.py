"""Weights and deltas that travel while they are written: what is sent early is what the file holds in the end."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_orch.checkpoint.store.errors import StoreUnavailable
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import chunks
from grpo_orch.checkpoint.stream.chunks import ChunkUpload
from grpo_orch.checkpoint.weights import scratch
from grpo_orch.checkpoint.weights.scratch import Tensor
from tests.budget import HANG_S
from tests.checkpoint.weights.files import POOL

CHUNK = mmap.ALLOCATIONGRANULARITY
TENSOR = 4 * CHUNK
NUMBER = 32


class Arrivals(Store):
    """Says when the first chunk has come; with `away`, fails instead."""

    def __init__(self, name: str) -> None:
        super().__init__(f"memory://{name}", retry_s=0.0)
        self.first, self.away = threading.Event(), False

    def put(self, key: str, data: Any) -> None:
        if self.away:
            raise StoreUnavailable("the store is away")
        super().put(key, data)
        self.first.set()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Arrivals:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(scratch, "AHEAD_BYTES", 2 * TENSOR)
    return Arrivals(str(tmp_path))


def weights(*shares: float, seed: int = 0) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Tensors of which these shares of the elements are not as they were with shares of 0."""
    draw = np.random.default_rng(0)
    begun = [draw.integers(0, 2**16, TENSOR // 2, np.uint16) for _ in shares]
    draw = np.random.default_rng(seed)
    hits = [draw.random(TENSOR // 2) < share for share in shares]
    return [(one + hit * 7).astype(np.uint16).view(np.uint8) for one, hit in zip(begun, hits, strict=True)]


def tensors(contents: list[Any], before_last: Any = lambda: None) -> dict[str, Tensor]:
    def content(number: int) -> Any:
        if number == len(contents) - 1:
            before_last()
        return contents[number]

    return {
        f"{number:03}": Tensor("BF16", (TENSOR // 2,), TENSOR, lambda n=number: content(n))  # type: ignore[misc]
        for number in range(len(contents))
    }


@pytest.mark.parametrize("share", [0.0, 0.1], ids=["whole", "delta"])
def test_first_bytes_are_sent_while_last_tensors_are_pending(
    store: Arrivals, tmp_path: Path, share: float
) -> None:
    path, changes, base = tmp_path / "weights", tmp_path / "delta", ""
    if share:
        base = scratch.rewrite(path, tensors(weights(*[0.0] * NUMBER)), "", changes, POOL).digest

    def arrived() -> None:
        assert store.first.wait(HANG_S)

    new = tensors(weights(*[share] * NUMBER), arrived)
    with ChunkUpload(store, "root", stored={}) as sending:
        scratch.rewrite(path, new, base, changes, POOL, sending.send_prefix)
        [sent] = sending.finish([("file", changes if share else path)])
    assert b"".join(chunks.parts(store, "root", sent)) == (changes if share else path).read_bytes()
    assert changes.exists() == bool(share)


def test_a_delta_that_turns_out_not_to_pay_has_hardly_travelled(store: Arrivals, tmp_path: Path) -> None:
    path, changes, told = tmp_path / "weights", tmp_path / "delta", dict[Path, int]()
    base = scratch.rewrite(path, tensors(weights(*[0.0] * NUMBER)), "", changes, POOL).digest
    late = tensors(weights(*[0.3] * (NUMBER // 2), *[1.0] * (NUMBER // 2)))
    with ChunkUpload(store, "root", stored={}) as sending:

        def grown(file: Path, size_bytes: int) -> None:
            told[file] = size_bytes
            sending.send_prefix(file, size_bytes)

        written = scratch.rewrite(path, late, base, changes, POOL, grown)
        [sent] = sending.finish([("file", path)])
    assert written.delta_bytes is None
    assert told[changes] <= scratch.SPECULATIVE * written.size_bytes
    assert b"".join(chunks.parts(store, "root", sent)) == path.read_bytes()


def test_failing_store_ends_the_upload_and_its_threads(store: Arrivals, tmp_path: Path) -> None:
    path = tmp_path / "weights"

    def away() -> None:
        store.away = True

    def publish() -> None:
        new = tensors(weights(*[0.0] * NUMBER), away)
        with ChunkUpload(store, "root", stored={}) as sending:
            scratch.rewrite(path, new, "", tmp_path / "delta", POOL, sending.send_prefix)
            sending.finish([("file", path)])

    with pytest.raises(StoreUnavailable):
        publish()
    assert not [one.name for one in threading.enumerate() if one.name.startswith("send")]
