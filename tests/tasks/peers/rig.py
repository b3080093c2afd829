"""Nodes that download from one store and from each other, in one process, on loopback or under TLS."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from blake3 import blake3

from checkpoint.stream import manifest
from checkpoint.stream.elsewhere import Elsewhere
from checkpoint.stream.manifest import Manifest
from policies.model.vocabulary import PolicyVersion
from tasks.peers.download import PeerDownload
from tasks.peers.peers import Peers
from tests.budget import HANG_S
from tests.stand_ins.catalog_rig import CHUNK, DictStore

TOKEN = "the run's secret"
PREFIX = "policies/0000/00000001-i1-a1"
CHUNKS = 60


class CountingStore(DictStore):
    """Counts what is read; with `error` set it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []
        self.error: Exception | None = None

    def get_buffer(self, key: str) -> memoryview:
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

    def fetch(self, node: int, peers: Elsewhere | None) -> None:
        """Have the node download the policy; what it gets must be what was published."""
        folder = self.folder / f"node-{node}" / "policy"
        manifest.materialize(self.store, PREFIX, self.policy.files, folder, elsewhere=peers)
        assert (folder / "model.safetensors").read_bytes() == self.content

    def fetch_together(self, nodes: Sequence[Peers], met: Callable[[], None] = lambda: None) -> None:
        """All at once; `met` is called when all know that all take part, and none has begun."""
        barrier = threading.Barrier(len(nodes), met, HANG_S)
        with ThreadPoolExecutor(len(nodes)) as pool:
            list(pool.map(self.fetch, range(len(nodes)), [Together(one, barrier) for one in nodes]))

    @property
    def read(self) -> list[str]:
        """Names of the chunks that were read from the store, in order of their names."""
        return sorted(key.removeprefix(f"{PREFIX}/") for key in self.store.read)


class Together:
    """A node that waits for all others before it begins with the chunks. Each has asked all others by then, and of
    a pair the later one has told the earlier one that it takes part: so all choose alike."""

    def __init__(self, peers: Peers, barrier: threading.Barrier) -> None:
        self._peers = peers
        self._barrier = barrier

    @contextmanager
    def download(self, root: str, names: Sequence[str], folders: Sequence[Path]) -> Iterator[PeerDownload]:
        with self._peers.download(root, names, folders) as download:
            self._barrier.wait()
            yield download


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
