"""A second place for chunks, beside the store: what a download asks of it, and in which order it asks whom.

What comes from there is verified like what comes from the store, so it can cost time and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

# Jobs that are looked at for one: at 140 GB there are 9,000, and looking at all for each held every thread up.
LOOKED_AT = 256


class Dropped(Exception):
    """Another part of the download has failed, and the rest is of no use."""


class Download(Protocol):
    """One download, as the other place sees it. All methods are called from many threads."""

    def expects(self, chunk: str) -> bool:
        """Whether others are to be asked for the chunk before the store is."""
        ...

    def get(
        self, chunk: str, size_bytes: int, still: Callable[[], None], room: Callable[[], None]
    ) -> memoryview | None:
        """What others say that the chunk is; None where the store is to be asked.

        Args:
            still: called now and then while this waits; what it raises ends the waiting.
            room: called before bytes come; it returns once there is room for them.
        """
        ...

    def get_at_once(
        self, chunk: str, size_bytes: int, still: Callable[[], None], room: Callable[[], None]
    ) -> memoryview | None:
        """The same from whoever has it by now, also where the store was to be asked: it has failed."""
        ...

    def blame(self, chunk: str) -> None:
        """What was got last for that chunk was something else."""
        ...

    def put(self, chunk: str, name: str, offset: int, size_bytes: int) -> None:
        """The chunk was verified, and is in that file of the download."""
        ...


class Elsewhere(Protocol):
    """The other place."""

    def download(
        self, root: str, chunks: Sequence[str], folders: Sequence[Path]
    ) -> AbstractContextManager[Download]:
        """For as long as the block runs these chunks below `root` are wanted. Their files are in one of the
        folders, now or later, for others to be given them."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """A chunk that is to be brought into a file. With `begun` it may be there already."""

    chunk: str
    name: str
    path: Path
    offset: int
    size_bytes: int
    begun: bool


class Jobs:
    """The jobs of one download that nobody has taken, in their order.

    Args:
        expects: whether others are to be asked for a chunk before the store is.
    """

    def __init__(self, jobs: Sequence[Job], expects: Callable[[str], bool]) -> None:
        self._left = list(jobs)
        self._expects = expects
        self._dropped = False
        self._lock = threading.Lock()

    def take(self, *, expected: bool) -> Job | None:
        """The first job of a chunk that others are, or are not, expected to have, among the next LOOKED_AT; else
        the first; None: all are taken."""
        with self._lock:
            if not self._left:
                return None
            ahead = enumerate(islice(self._left, LOOKED_AT))
            found = next((at for at, job in ahead if self._expects(job.chunk) is expected), 0)
            return self._left.pop(found)

    def drop(self) -> None:
        """One has failed: take no more."""
        with self._lock:
            self._left, self._dropped = [], True

    def check(self) -> None:
        """Raise Dropped if one has failed."""
        if self._dropped:
            raise Dropped
