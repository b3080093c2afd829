from __future__ import annotations

import pytest

from checkpoint.stream import chunks
from tasks.peers import download, peer, peers, server
from tests.budget import HANG_S
from tests.stand_ins.catalog_rig import CHUNK


@pytest.fixture(autouse=True)
def small_chunks_and_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine a peer that is well may answer late: no limit passes that a test does not shorten."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(peers, "MEET_S", HANG_S)
    monkeypatch.setattr(peer, "CONNECT_S", HANG_S)
    monkeypatch.setattr(peer, "SILENT_S", HANG_S)
    monkeypatch.setattr(server, "SEND_S", HANG_S)
    monkeypatch.setattr(download, "PATIENCE_S", (HANG_S, HANG_S))
    monkeypatch.setattr(download, "LONGEST_S", HANG_S)
