"""Nodes that fetch from each other: the store is read about once, and whatever a peer does costs no content."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint.stream import chunks
from tests.stand_ins.catalog_rig import CHUNK
from tests.tasks.peers.rig import CHUNKS, Rig, nodes

HOSTS = ["127.0.0.1", "0.0.0.0"]  # plain, and under mutual TLS: the latter is not loopback, and is this machine


@pytest.fixture(autouse=True)
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", CHUNK)
        yield


@pytest.fixture(params=HOSTS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    return Rig(tmp_path, request.param)


def test_a_node_that_is_alone_reads_the_store_once_and_asks_nobody(rig: Rig) -> None:
    with nodes(1, rig.host) as found:
        rig.fetch(0, found[0])
    assert len(rig.store.read) == CHUNKS


def test_ten_nodes_at_once_read_the_store_little_more_than_once(rig: Rig) -> None:
    with nodes(10, rig.host) as found:
        rig.fetch_together(found)
    assert 1.0 <= rig.copies < 2.0


def test_a_node_that_comes_later_gets_everything_from_the_others(rig: Rig) -> None:
    with nodes(3, rig.host) as found:
        rig.fetch_together(found[:2])
        rig.store.read.clear()
        rig.fetch(2, found[2])
    assert rig.store.read == []
