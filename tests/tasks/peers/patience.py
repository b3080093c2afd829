"""Peers that wait for each other as long as it takes."""

from __future__ import annotations

import pytest

from tasks.peers import download, peer, peers, server
from tests.budget import HANG_S


def with_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine a peer that is well may answer late: no limit passes that a test does not shorten."""
    monkeypatch.setattr(peers, "MEET_S", HANG_S)
    monkeypatch.setattr(peer, "CONNECT_S", HANG_S)
    monkeypatch.setattr(peer, "SILENT_S", HANG_S)
    monkeypatch.setattr(server, "SEND_S", HANG_S)
    monkeypatch.setattr(download, "PATIENCE_S", (HANG_S, HANG_S))
    monkeypatch.setattr(download, "LONGEST_S", HANG_S)
