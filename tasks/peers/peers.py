"""The other nodes as a second place for chunks: `checkpoint.stream.elsewhere`, between the nodes of a run.

A download first asks every known node whether it takes part, and so tells it. Each chunk then has one of those who
take part that gets it from the store, by `policies.serving.spreading`; the others ask that node, which answers
once it has the chunk. Nobody coordinates: nodes that see different peers ask the store for more, and that is all.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import structlog

from checkpoint.security import identity
from checkpoint.store.backends import Options
from tasks.peers.download import PeerDownload
from tasks.peers.peer import Peer
from tasks.peers.server import PeerServer
from tasks.peers.shelf import Shelf

log = structlog.get_logger()

MEET_S = 2.0  # a download waits so long for peers to say whether they take part; who answers later is let in
MEETINGS = 16  # at a time
ROOTS_MAX = 128  # of which it is remembered who takes part


class Peers:
    """One node among its peers; a context manager, which others can ask while it is entered. Where nothing can
    listen at `host` its `address` stays empty, and it is alone.

    Args:
        host: where they reach this machine.
        token: the run's secret.
    """

    def __init__(self, host: str, token: str) -> None:
        self._host = host
        self._token = token
        self._tls = identity.client_context(token) if identity.protects(host) else None
        self._shelf = Shelf()
        self._server = PeerServer(self._shelf, host, token, self._hear)
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}  # by address
        self._known: tuple[str, ...] = ()
        self._heard: dict[str, set[str]] = {}  # by root: addresses
        self._downloads: list[PeerDownload] = []
        self._meetings = ThreadPoolExecutor(MEETINGS, thread_name_prefix="meet")
        self.address = ""

    def __enter__(self) -> Peers:
        try:
            self.address = self._server.start()
        except OSError as error:
            log.warning("peers_off", host=self._host, why=str(error))
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()
        self._meetings.shutdown(wait=False, cancel_futures=True)
        for peer in self._peers.values():
            peer.close()

    def know(self, addresses: Iterable[str]) -> list[Future[None]]:
        """These are the nodes that there are. Those of them that are new are connected to, so that no download has
        to find out who cannot be reached, and asked about what is under way. Returns what does that."""
        with self._lock:
            before, self._known = self._known, tuple(one for one in addresses if one != self.address)
            new, under_way = set(self._known) - set(before), list(self._downloads)
            for gone in self._peers.keys() - set(self._known) - set().union(*self._heard.values()):
                self._peers.pop(gone).close()
        greeted = [self._meetings.submit(self._peer(address).greet) for address in sorted(new)]
        return greeted + [
            self._meetings.submit(self._meet, download, address) for download in under_way for address in new
        ]

    @contextmanager
    def download(self, root: str, names: Sequence[str], folders: Sequence[Path]) -> Iterator[PeerDownload]:
        """See `elsewhere.Elsewhere`."""
        self._shelf.begin(root, names, folders)
        download = PeerDownload(self._shelf, root, tuple(folders), self.address)
        try:
            with self._lock:
                self._downloads.append(download)
                others = {*self._known, *self._heard.get(root, ())} if self.address else set()
            met = [self._meetings.submit(self._meet, download, address) for address in sorted(others)]
            wait(met, timeout=MEET_S)
            yield download
        finally:
            with self._lock:
                self._downloads.remove(download)
            self._shelf.end(root)

    def _meet(self, download: PeerDownload, address: str) -> None:
        """Ask a peer whether it takes part, and tell it that this node does."""
        peer = self._peer(address)
        if not peer.is_up:
            return
        has = peer.on_hand(download.root, self.address)
        if has is not None:
            download.join(peer, has)

    def _hear(self, root: str, address: str) -> None:
        """Another node takes part in that download."""
        if not address or address == self.address:
            return
        with self._lock:
            while len(self._heard) > ROOTS_MAX:
                del self._heard[next(iter(self._heard))]
            self._heard.setdefault(root, set()).add(address)
            under_way = [one for one in self._downloads if one.root == root]
        for download in under_way:
            download.join(self._peer(address), frozenset())

    def _peer(self, address: str) -> Peer:
        with self._lock:
            return self._peers.setdefault(address, Peer(address, self._token, self._tls))


def may_pay(url: str, options: Options, host: str) -> bool:
    """Whether the store may be slower for many nodes than for one, and asking others worth it (decision 029).

    The stores of AWS, Google and Azure give each machine what its network takes, and count no bytes within a
    region, where those between machines of two zones cost money. A server of one's own has one network for all.

    Args:
        url: the run's store.
        options: as for Store.
        host: where others reach this machine.
    """
    scheme = url.partition("://")[0]
    if scheme in ("s3", "s3a"):
        given = {key.lower(): str(value) for key, value in {**os.environ, **_flat(options)}.items()}
        ends = ("aws_endpoint", "aws_endpoint_url", "aws_endpoint_url_s3", "endpoint", "endpoint_url")
        return any(given.get(end) and "amazonaws.com" not in given[end] for end in ends)
    if scheme == "file":
        return identity.protects(host)  # a file server's; nodes on one machine read from one disk
    return scheme not in ("gs", "gcs", "az", "abfs", "abfss", "memory")


def _flat(options: Options) -> dict[str, object]:
    inner = options.get("client_kwargs")  # of s3fs
    return {**options, **(inner if isinstance(inner, dict) else {})}
