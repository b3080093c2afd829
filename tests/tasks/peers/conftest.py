from __future__ import annotations

import pytest

from checkpoint.stream import chunks
from tests.stand_ins.catalog_rig import CHUNK
from tests.tasks.peers.patience import with_patience


@pytest.fixture(autouse=True)
def small_chunks_and_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", CHUNK)
    with_patience(monkeypatch)
