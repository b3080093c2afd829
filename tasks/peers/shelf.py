"""Which chunks this node has on its disk, or is about to have, for others to be given them.

A file may be renamed, overwritten with what has changed, or deleted at any moment; nobody tells the shelf. So what
is read is verified before it is given away, and forgotten where it is something else by now.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from checkpoint.stream import chunks


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk's bytes are: in a file that is in one of the folders."""

    folders: tuple[Path, ...]
    name: str
    offset: int
    size_bytes: int

    def read(self, chunk: str) -> bytes | None:
        """The chunk's bytes, if they are there."""
        for folder in self.folders:
            try:
                with (folder / self.name).open("rb") as file:
                    file.seek(self.offset)
                    data = file.read(self.size_bytes)
            except OSError:
                continue
            if chunks.matches(memoryview(data), chunk):
                return data
        return None


@dataclass(slots=True)
class _Root:
    """What is known of the chunks below one root. `downloads` are under way."""

    folders: set[Path] = field(default_factory=set)
    held: dict[str, Place] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)  # on their way from the store
    wanted: set[str] = field(default_factory=set)
    arrivals: dict[str, Future[None]] = field(default_factory=dict)
    downloads: int = 0

    def is_over(self, taken: Sequence[Path] = ()) -> bool:
        """Whether nothing of it can be there, now that others have these folders."""
        return not self.downloads and not any(folder.exists() for folder in self.folders - set(taken))


class Shelf:
    """The chunks of one node. Thread-safe."""

    def __init__(self) -> None:
        self._roots: dict[str, _Root] = {}
        self._lock = threading.Lock()

    def begin(self, root: str, wanted: Iterable[str], folders: Sequence[Path]) -> None:
        """A download begins."""
        with self._lock:
            # What was in those folders is in them no more.
            kept = {name: one for name, one in self._roots.items() if name == root or not one.is_over(folders)}
            self._roots = kept
            one = self._roots.setdefault(root, _Root())
            one.wanted.update(wanted)
            one.folders.update(folders)
            one.downloads += 1

    def end(self, root: str) -> None:
        """A download is over: what it did not bring will not come."""
        with self._lock:
            one = self._roots[root]
            one.downloads -= 1
            if not one.downloads:
                one.wanted.clear()
                one.begun.clear()
                over = [one.arrivals.pop(chunk) for chunk in list(one.arrivals)]
            else:
                over = []
        _tell(over)

    def begin_chunk(self, root: str, chunk: str) -> None:
        """The store is being asked for it."""
        with self._lock:
            self._roots[root].begun.add(chunk)

    def put(self, root: str, chunk: str, place: Place) -> None:
        """It was verified and is there."""
        with self._lock:
            one = self._roots[root]
            one.held[chunk] = place
            one.wanted.discard(chunk)
            one.begun.discard(chunk)
            arrival = one.arrivals.pop(chunk, None)
        _tell([arrival] if arrival is not None else [])

    def on_hand(self, root: str) -> list[str] | None:
        """The chunks that are there or on their way from the store; None where none is and none is wanted."""
        with self._lock:
            one = self._roots.get(root)
            if one is None or one.is_over():
                return None
            return [*one.held, *one.begun]

    def arrival(self, root: str, chunk: str) -> Future[None] | None:
        """Done once the chunk is there or will not come; None where it is not wanted."""
        with self._lock:
            one = self._roots.get(root)
            if one is None:
                return None
            if chunk in one.held:
                done: Future[None] = Future()
                done.set_result(None)
                return done
            return one.arrivals.setdefault(chunk, Future()) if chunk in one.wanted else None

    def read(self, root: str, chunk: str) -> bytes | None:
        """The chunk's bytes; None where they are not there."""
        with self._lock:
            one = self._roots.get(root)
            place = None if one is None else one.held.get(chunk)
        if one is None or place is None:
            return None
        data = place.read(chunk)
        if data is None:
            with self._lock:
                one.held.pop(chunk, None)
        return data


def _tell(arrivals: Iterable[Future[None]]) -> None:
    for arrival in arrivals:
        if arrival.set_running_or_notify_cancel():
            arrival.set_result(None)
