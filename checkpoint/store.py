"""One run's prefix in an object store: bytes and files by name, create-only where it matters.

Everything the project keeps goes through this class, on `file://` exactly as on `s3://`, `gs://`, `az://` and
`memory://`. Transient failures are retried here, for as long as the caller's patience; what comes out is one of
`checkpoint.errors`. Layout, manifests and the journal are built on top.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlparse

import obstore
import structlog
from obstore import exceptions as raw
from obstore.store import MemoryStore, from_url
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_delay, wait_exponential_jitter

from checkpoint.errors import AlreadyExists, NotFound, StoreDenied, StoreError, StoreUnavailable, StoreUnusable

log = structlog.get_logger()
T = TypeVar("T")

SCHEMES = ("file", "s3", "gs", "az", "memory")
_memory: dict[str, MemoryStore] = {}


@dataclass(frozen=True, slots=True)
class Entry:
    """One object of a listing; `key` is relative to the run."""

    key: str
    size_bytes: int
    modified_at: datetime


class Store:
    """Objects below one URL.

    Args:
        url: `file:///folder`, `s3://bucket/prefix`, `gs://...`, `az://...` or `memory://name`.
        patience_s: how long transient failures are retried before StoreUnavailable is raised.
        options: keys of obstore's store configuration (endpoint, region, ...); the environment serves too.

    Raises:
        StoreUnusable: the URL's scheme is not one of SCHEMES, or the folder cannot be made.
    """

    def __init__(self, url: str, *, patience_s: float = 30.0, options: dict[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self.patience_s = patience_s
        self._raw: Any = _open(self.url, options or {})

    def get(self, key: str) -> bytes:
        """Return the object's bytes. Raises NotFound."""
        return self._try(f"read {key}", lambda: bytes(obstore.get(self._raw, key).bytes()))

    def get_or_none(self, key: str) -> bytes | None:
        """Return the object's bytes, or None where there is no such object."""
        try:
            return self.get(key)
        except NotFound:
            return None

    def put(self, key: str, data: bytes) -> None:
        """Write the object, replacing any of that name; readers see the old or the new one, never a mixture."""
        self._try(f"write {key}", lambda: obstore.put(self._raw, key, data))

    def create(self, key: str, data: bytes) -> None:
        """Write the object only if there is none of that name. Raises AlreadyExists.

        An answer lost on the way is retried like any other, and then meets its own object: a caller that must
        tell the two apart reads it back (see `checkpoint.journal`).
        """
        self._try(f"create {key}", lambda: obstore.put(self._raw, key, data, mode="create"))

    def put_file(self, key: str, path: Path) -> None:
        """Upload a file in parts; replaces any object of that name."""
        self._try(f"upload {key}", lambda: obstore.put(self._raw, key, path))

    def get_file(self, key: str, path: Path) -> None:
        """Download to `path`, which appears only when complete. Raises NotFound."""
        path.parent.mkdir(parents=True, exist_ok=True)

        def download() -> None:
            handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            try:
                with os.fdopen(handle, "wb") as out:
                    for chunk in obstore.get(self._raw, key).stream(min_chunk_size=8 * 1024 * 1024):
                        out.write(cast(Any, chunk))
                Path(part).replace(path)
            except BaseException:
                Path(part).unlink(missing_ok=True)
                raise

        self._try(f"download {key}", download)

    def entries(self, prefix: str, *, after: str | None = None) -> list[Entry]:
        """Return every object below `prefix/` in name order; with `after`, only names beyond that key."""

        def listing() -> list[Entry]:
            pages: Iterator[Any] = iter(obstore.list(self._raw, prefix, offset=after))
            found = [
                Entry(str(one["path"]), int(one["size"]), one["last_modified"]) for page in pages for one in page
            ]
            return sorted(found, key=lambda entry: entry.key)

        return self._try(f"list {prefix}", listing)

    def folders(self, prefix: str) -> list[str]:
        """Return the names directly below `prefix/` that hold objects, in name order."""
        return self._try(
            f"list {prefix}",
            lambda: sorted(str(p) for p in obstore.list_with_delimiter(self._raw, prefix)["common_prefixes"]),
        )

    def delete(self, keys: list[str]) -> None:
        """Delete the objects; a missing one is not an error."""
        for key in keys:
            try:
                self._try(f"delete {key}", lambda key=key: obstore.delete(self._raw, key))  # type: ignore[misc]  # mypy cannot infer a lambda with a default
            except NotFound:
                continue

    def _try(self, what: str, call: Callable[[], T]) -> T:
        """Run `call` with this project's errors, again and again while it is transient and patience lasts."""

        def warn(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            log.warning("store_retry", what=what, store=self.url, attempt=state.attempt_number, error=str(error))

        retrying = Retrying(
            retry=retry_if_exception_type(StoreUnavailable),
            stop=stop_after_delay(self.patience_s),
            wait=wait_exponential_jitter(multiplier=0.1, max=10.0),
            before_sleep=warn,
            reraise=True,
        )
        return cast(T, retrying(_translated, self.url, what, call))


def _open(url: str, options: dict[str, str]) -> Any:
    parts = urlparse(url)
    if parts.scheme not in SCHEMES:
        raise StoreUnusable(
            f"store {url!r}", "expected a URL that starts with " + ", ".join(f"{s}://" for s in SCHEMES)
        )
    if parts.scheme == "memory":
        return _memory.setdefault(url, MemoryStore())
    if parts.scheme == "file":
        try:
            Path(parts.path).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnusable(f"store {url!r}: {error.strerror}", "name a folder that can be written") from error
    return from_url(url, config=cast(Any, options)) if options else from_url(url)


def _translated(url: str, what: str, call: Callable[[], T]) -> T:
    """Run `call` once; what obstore and the system raise becomes one of `checkpoint.errors`."""
    try:
        return call()
    except StoreError:
        raise
    except raw.AlreadyExistsError as error:
        raise AlreadyExists(f"{what} in {url}") from error
    except FileNotFoundError as error:
        raise NotFound(f"{what} in {url}") from error
    except (raw.PermissionDeniedError, raw.UnauthenticatedError, PermissionError) as error:
        raise StoreDenied(f"{what} in {url}: denied", "check the credentials and their rights") from error
    except (raw.BaseError, OSError) as error:
        text = str(error).splitlines()[0]
        hint = "free some space" if "No space left" in str(error) else ""
        raise StoreUnavailable(f"{what} in {url}: {text}", hint) from error
