"""Nodes that download from one store and from each other, in one process, on loopback or under TLS."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from blake3 import blake3

from checkpoint.stream import manifest
from checkpoint.stream.manifest import Manifest
from policies.model.vocabulary import PolicyVersion
from tasks.peers.peers import Peers
from tests.stand_ins.catalog_rig import CHUNK, DictStore

TOKEN = "the run's secret"
PREFIX = "policies/0000/00000001-i1-a1"
CHUNKS = 60


class CountingStore(DictStore):
    """Counts what is read; while `closed` nobody is answered, and with `away` set it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []
        self.open = threading.Event()
        self.open.set()
        self.error: Exception | None = None

    def get_buffer(self, key: str) -> memoryview:
        self.open.wait()
        if self.error is not None:
            raise self.error
        self.read.append(key)
        return super().get_buffer(key)


class Rig:
    """A published policy of CHUNKS chunks, and nodes."""

    def __init__(self, folder: Path, host: str) -> None:
        self.folder = folder
        self.host = host
        self.store = CountingStore()
        source = folder / "source"
        source.mkdir()
        content = blake3(b"weights").digest(length=CHUNKS * CHUNK - 7)
        (source / "model.safetensors").write_bytes(content)
        self.content = content
        self.policy: Manifest = manifest.publish(self.store, PREFIX, source, PolicyVersion(0, 1), 0.0)

    def fetch(self, node: int, peers: Peers | None) -> None:
        """Have the node download the policy; what it gets must be what was published."""
        folder = self.folder / f"node-{node}" / "policy"
        manifest.materialize(self.store, PREFIX, self.policy.files, folder, elsewhere=peers)
        assert (folder / "model.safetensors").read_bytes() == self.content

    def fetch_together(self, nodes: Sequence[Peers], numbers: Sequence[int] | None = None) -> None:
        with ThreadPoolExecutor(len(nodes)) as pool:
            list(pool.map(self.fetch, numbers or range(len(nodes)), nodes))

    @property
    def copies(self) -> float:
        """Bytes read from the store over bytes of the policy, as all chunks but one are of one size."""
        return len(self.store.read) / CHUNKS


@contextmanager
def nodes(count: int, host: str, token: str = TOKEN) -> Iterator[list[Peers]]:
    """So many that know of each other."""
    with ExitStack() as stack:
        found = [stack.enter_context(Peers(host, token)) for _ in range(count)]
        introduce(found)
        yield found


def introduce(found: Sequence[Peers], *more: str) -> None:
    """Tell each of all, as the gateway does."""
    for one in found:
        one.know([*(other.address for other in found), *more])
