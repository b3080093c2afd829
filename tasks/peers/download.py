"""One download among peers: whom to ask for which chunk, and when to ask the store instead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from checkpoint.stream import chunks
from policies.serving.spreading import in_turn
from tasks.peers.peer import No, Peer
from tasks.peers.shelf import Place, Shelf

# A chunk below this share of a whole one is had from the store sooner than a peer is asked for it.
SMALL_SHARE = 1 / 16
# A peer that has not got a chunk after several times what one takes from the store here is late.
PATIENCE_S = (5.0, 30.0)  # at least; at most, and while nothing has come from the store here
PATIENCE_CHUNKS = 4.0
LONGEST_S = 120.0  # that a chunk is waited for, whoever promises it


class PeerDownload:
    """See `elsewhere.Download`.

    Args:
        folders: where its files are, now or later.
        us: this node's address.
    """

    def __init__(self, shelf: Shelf, root: str, folders: tuple[Path, ...], us: str) -> None:
        self.root = root
        self._shelf = shelf
        self._folders = folders
        self._us = us
        self._lock = threading.Lock()
        self._has: dict[Peer, set[str]] = {}  # of those who take part: what they had when they were met
        self._late: set[Peer] = set()
        self._last: dict[str, Peer] = {}  # by chunk: who gave it
        # Who is there, and the choice among them by chunk: read and replaced as one.
        self._view: tuple[list[Peer], dict[str, Peer | None]] = ([], {})
        self._begun_s: dict[str, float] = {}  # when the store was asked
        self._slowest_s: float | None = None

    def join(self, peer: Peer, has: frozenset[str]) -> None:
        """A peer takes part, and has or is getting these chunks."""
        with self._lock:
            self._has.setdefault(peer, set()).update(has)
            self._view = [], {}
        self._look()

    def expects(self, chunk: str) -> bool:
        """See `elsewhere.Download`."""
        return self._chosen(chunk) is not None  # as of the last look: it is asked for every chunk, again and again

    def get(
        self, chunk: str, size_bytes: int, still: Callable[[], None], room: Callable[[], None]
    ) -> memoryview | None:
        """See `elsewhere.Download`."""
        if size_bytes >= SMALL_SHARE * chunks.CHUNK_BYTES:
            data = self._ask(chunk, size_bytes, still, room)
            if data is not None:
                return data
        self._begun_s[chunk] = time.monotonic()
        self._shelf.begin_chunk(self.root, chunk)
        return None

    def get_at_once(
        self, chunk: str, size_bytes: int, still: Callable[[], None], room: Callable[[], None]
    ) -> memoryview | None:
        """See `elsewhere.Download`."""
        self._look()
        for peer in self._view[0]:
            still()
            data = peer.ask(self.root, chunk, size_bytes, room)
            if isinstance(data, memoryview):
                self._last[chunk] = peer
                return data
        return None

    def blame(self, chunk: str) -> None:
        """See `elsewhere.Download`."""
        self._last[chunk].shun("it gave other bytes than were asked for")

    def put(self, chunk: str, name: str, offset: int, size_bytes: int) -> None:
        """See `elsewhere.Download`."""
        begun_s = self._begun_s.pop(chunk, None)
        if begun_s is not None:
            took_s = time.monotonic() - begun_s
            self._slowest_s = max(took_s, self._slowest_s or 0.0)
        self._shelf.put(self.root, chunk, Place(self._folders, name, offset, size_bytes))

    def _ask(
        self, chunk: str, size_bytes: int, still: Callable[[], None], room: Callable[[], None]
    ) -> memoryview | None:
        without = set[Peer]()  # who has not got this one
        begun_s = asked_s = time.monotonic()
        while (peer := self._first(chunk, without)) is not None:
            still()
            match peer.ask(self.root, chunk, size_bytes, room):
                case No.NOT_HERE | No.FAILED:
                    without.add(peer)
                case No.NOT_YET:
                    now_s = time.monotonic()
                    if now_s - begun_s > LONGEST_S:
                        return None
                    if now_s - asked_s > self._patience_s():
                        self._late.add(peer)
                    else:
                        continue
                case memoryview() as data:
                    self._last[chunk] = peer
                    return data
            asked_s = time.monotonic()
        return None

    def _patience_s(self) -> float:
        least_s, most_s = PATIENCE_S
        if self._slowest_s is None:
            return most_s
        return min(most_s, max(least_s, PATIENCE_CHUNKS * self._slowest_s))

    def _first(self, chunk: str, without: Collection[Peer] = ()) -> Peer | None:
        """Whom to ask: one who had the chunk when it was met, else whose turn it is; None where it is ours."""
        self._look()
        if without:
            return self._choose(chunk, [peer for peer in self._view[0] if peer not in without])
        return self._chosen(chunk)

    def _look(self) -> None:
        """Who is there by now."""
        with self._lock:
            present = [peer for peer in self._has if peer.is_up and peer not in self._late]
            if present != self._view[0]:
                self._view = present, {}

    def _chosen(self, chunk: str) -> Peer | None:
        present, choices = self._view
        if chunk not in choices:
            choices[chunk] = self._choose(chunk, present)
        return choices[chunk]

    def _choose(self, chunk: str, present: Sequence[Peer]) -> Peer | None:
        holders = [peer for peer in present if chunk in self._has[peer]]
        by_address = {peer.address: peer for peer in holders or present}
        names = by_address if holders else [*by_address, self._us]
        return by_address.get(in_turn(chunk, names)[0])
