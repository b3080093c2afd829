"""The interface that a store needs, with one implementation for each library that talks to stores.

`folder` serves file, `obstore_backend` s3, gs, az and memory, `fsspec_backend` any other scheme that fsspec knows,
and any scheme at all if the options say `driver: fsspec`. A backend makes each call once and lets its library's
exceptions out; `fault` says what they mean. Only `checkpoint.store.run_store` retries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from checkpoint.store.errors import StoreError

BytesLike = bytes | bytearray | memoryview
Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """One object of a listing; `key` is relative to the run."""

    key: str
    size_bytes: int
    modified_at: datetime


@dataclass(frozen=True, slots=True)
class Fault:
    """What an exception of a backend's library means to the caller; `text` and `hint` hold no secret."""

    kind: type[StoreError]
    text: str
    hint: str = ""


class Backend(Protocol):
    """Objects below one URL. Keys are relative to it."""

    @property
    def folder(self) -> Path | None:
        """Where they are files; None elsewhere. It may not be there yet."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """The exceptions that `fault` explains."""

    def get(self, key: str) -> memoryview:
        """The object's bytes, not copied where the library allows it."""

    def put(self, key: str, data: BytesLike) -> None:
        """Write in one request, so that nothing is left behind by one that is cut off."""

    def put_parts(self, key: str, parts: Iterable[BytesLike]) -> None:
        """Write an object of any size from its parts, one after another, in as many requests as it takes."""

    def create(self, key: str, data: BytesLike) -> None:
        """As `put`, only if there is no object of that name."""

    def secure(self, keys: Sequence[str]) -> None:
        """Return once these objects would survive a power cut. Created and small ones do at once."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete all of them, in few requests if the store can; missing ones are no error."""

    def entries(self, prefix: str, after: str | None) -> list[Entry]:
        """Every object below `prefix/`, in any order; with `after`, at least those beyond that key."""

    def folders(self, prefix: str) -> list[str]:
        """The keys directly below `prefix/` that have objects below them, in any order."""

    def sweep(self, prefix: str, older_than_s: float) -> None:
        """Remove what interrupted writes left below `prefix/` and no listing shows."""

    def fault(self, error: Exception) -> Fault | None:
        """What the exception means; None for one that is a mistake in this project."""
