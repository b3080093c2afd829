"""The interface of a store's backend, with one implementation for each library.

`files` serves folders, `obstore_backend` s3, gs, az and memory. A backend makes each call once and lets its
library's exceptions pass; `fault` classifies them. Only `checkpoint.store.run_store` retries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from grpo_orch.checkpoint.store.errors import StoreError

BytesLike = bytes | bytearray | memoryview
Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """An object in a listing. `key` is relative to the run."""

    key: str
    size_bytes: int
    modified_at: datetime


@dataclass(frozen=True, slots=True)
class Fault:
    """The classification of an exception of a backend's library. `text` and `hint` contain no secret."""

    kind: type[StoreError]
    text: str
    hint: str = ""


class Backend(Protocol):
    """Objects below one URL. Keys are relative to it."""

    @property
    def folder(self) -> Path | None:
        """Return the folder of a file store, which may not exist yet; None for others."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """Return the exceptions that `fault` classifies."""

    def get(self, key: str) -> memoryview:
        """Return the object's bytes, without a copy if the library allows it."""

    def put(self, key: str, data: BytesLike) -> None:
        """Write in one request, so that an interrupted write leaves nothing behind."""

    def put_parts(self, key: str, parts: Iterable[BytesLike]) -> None:
        """Write an object of any size from its parts, in several requests."""

    def create(self, key: str, data: BytesLike) -> None:
        """As `put`, only if the object does not exist."""

    def secure(self, keys: Sequence[str]) -> None:
        """Return once these objects would survive a power failure. Created and small ones always do."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete the objects, in few requests if the store allows; missing ones are not an error."""

    def entries(self, prefix: str, after: str | None) -> list[Entry]:
        """Return every object below `prefix/`, in any order; with `after`, at least those after that key."""

    def folders(self, prefix: str) -> list[str]:
        """Return the keys directly below `prefix/` that have objects below them, in any order."""

    def sweep(self, prefix: str, older_than_s: float) -> None:
        """Remove unlisted remains of interrupted writes below `prefix/`."""

    def fault(self, error: Exception) -> Fault | None:
        """Classify the exception; None for a bug in this project."""
