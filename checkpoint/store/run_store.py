"""A run's prefix in an object store: objects by name, with create-only writes.

All stored data goes through this class, for `file://`, `s3://`, `gs://`, `az://` and `memory://` alike. Transient
failures are retried here and nowhere below, for as long as the caller allows. All errors are of
`checkpoint.store.errors`.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, cast

import structlog
from tenacity import (
    RetryCallState,
    Retrying,
    retry,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential_jitter,
)

from grpo_orch.checkpoint.store.backends import Backend, BytesLike, Entry, Options, one_line
from grpo_orch.checkpoint.store.backends.files import open_folder
from grpo_orch.checkpoint.store.backends.obstore_backend import open_obstore
from grpo_orch.checkpoint.store.errors import NotFound, StoreUnavailable, StoreUnusable, Torn

log = structlog.get_logger()

__all__ = ["OPTIONS_ENV", "Entry", "Store", "in_parallel"]

S = TypeVar("S")
T = TypeVar("T")

OPTIONS_ENV = "GRPO_ORCH_STORAGE_OPTIONS"  # the options as a JSON object, for daemon and nodes
SCHEMES = ("file", "s3", "gs", "az", "memory")
EXPECTED = "expected a URL that starts with " + ", ".join(f"{scheme}://" for scheme in SCHEMES)

# Read a torn object again: the network may have failed, not the store.
retry_torn = retry(retry=retry_if_exception_type(Torn), stop=stop_after_attempt(3), reraise=True)


READERS = 16  # concurrent requests; a store answers one in tens of milliseconds


def in_parallel(read: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """Call `read` for each item, READERS at a time, and return the results in order. Raises the first error."""
    if len(items) < 2:
        return [read(item) for item in items]
    with ThreadPoolExecutor(READERS, thread_name_prefix="read") as pool:
        return list(pool.map(read, items))


class Store:
    """Objects below one URL.

    Args:
        url: `file:///folder`, `s3://bucket/prefix`, `gs://...`, `az://...` or `memory://name`.
        retry_s: how long transient failures are retried before StoreUnavailable is raised. A running attempt is
            not interrupted: a request that hangs ends after 30 s, a large upload after 300 s.
        options: obstore's own configuration keys (endpoint, region, timeout, ...), or `profile`, an AWS profile.
            None: those of the environment variable OPTIONS_ENV. Credentials, endpoint and region also come from
            AWS's environment variables.

    Raises:
        StoreUnusable: the URL's scheme is unknown, an option is wrong, or, at the first write, the
            folder cannot be created.
        StoreDenied: the AWS profile has no credentials.
    """

    def __init__(self, url: str, *, retry_s: float = 30.0, options: Options | None = None) -> None:
        self.url = url.rstrip("/")
        self.retry_s = retry_s
        self._shown = one_line(self.url)
        self.options = _options_of_environment() if options is None else options  # may hold secrets
        self._backend = _open(self.url, self.options)

    @property
    def quoted(self) -> str:
        """Return the URL quoted for use in a shell command."""
        return shlex.quote(self.url)

    @property
    def folder(self) -> Path | None:
        """Return the folder of a file store; None for others. The first write creates it."""
        return self._backend.folder

    def get(self, key: str) -> bytes:
        """Return the object's bytes. Raises NotFound."""
        return bytes(self.get_buffer(key))

    def get_buffer(self, key: str) -> memoryview:
        """Return the object's bytes, read-only and without a copy, for large objects. Raises NotFound."""
        return self._try(f"read {key}", lambda: self._backend.get(key))

    def get_or_none(self, key: str) -> bytes | None:
        """Return the object's bytes, or None if it does not exist."""
        try:
            return self.get(key)
        except NotFound:
            return None

    def put(self, key: str, data: BytesLike) -> None:
        """Write or replace the object in one request; readers see the old or the new one.

        Google Cloud Storage accepts one write a second to a name and refuses more with 429, which is retried.
        """
        self._try(f"write {key}", lambda: self._backend.put(key, data))

    def put_parts(self, key: str, parts: Callable[[], Iterable[BytesLike]]) -> None:
        """Write an object of any size from its parts; each attempt calls `parts` again.

        It appears once complete.
        """
        self._try(f"write {key}", lambda: self._backend.put_parts(key, parts()))

    def create(self, key: str, data: BytesLike) -> None:
        """Write the object only if it does not exist. Raises AlreadyExists.

        After a lost response the retry finds its own object: a caller that needs to know reads it back (see
        `checkpoint.journal`).
        """
        self._try(f"create {key}", lambda: self._backend.create(key, data))

    def secure(self, keys: Sequence[str]) -> None:
        """Return once these objects would survive a power failure. Call it before anything depends on them.

        Object stores respond to a write only then. Files are durable once written if they were written by `create`
        or have at most 1 MiB. Raises NotFound.
        """
        self._try("sync written objects", lambda: self._backend.secure(keys))

    def entries(self, prefix: str, *, after: str | None = None) -> list[Entry]:
        """Return every object below `prefix/` in name order; with `after`, only those after that key."""
        found = self._try(f"list {prefix}", lambda: self._backend.entries(prefix, after))
        return sorted(
            (entry for entry in found if after is None or entry.key > after), key=lambda entry: entry.key
        )

    def folders(self, prefix: str) -> list[str]:
        """Return the keys directly below `prefix/` that have objects below them, in name order."""
        return sorted(self._try(f"list {prefix}", lambda: self._backend.folders(prefix)))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete any number of objects, in any order; a missing one is not an error."""
        if keys:
            what = f"delete {keys[0]}" + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")
            self._try(what, lambda: self._backend.delete(keys))

    def sweep(self, prefix: str, older_than_s: float) -> None:
        """Remove unfinished writes of killed writers below `prefix/`."""
        self._try(f"sweep {prefix}", lambda: self._backend.sweep(prefix, older_than_s))

    def _try(self, what: str, call: Callable[[], T]) -> T:
        """Run `call`, retrying transient failures for `retry_s`."""

        def warn(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            log.warning(
                "store_retry", what=what, store=self._shown, attempt=state.attempt_number, error=str(error)
            )

        retrying = Retrying(
            retry=retry_if_exception_type(StoreUnavailable),
            stop=stop_after_delay(self.retry_s),
            wait=wait_exponential_jitter(multiplier=0.1, max=10.0),
            before_sleep=warn,
            reraise=True,
        )
        return cast(T, retrying(self._once, what, call))

    def _once(self, what: str, call: Callable[[], T]) -> T:
        """Run `call` once and convert the library's exceptions to those of `checkpoint.store.errors`."""
        try:
            return call()
        except self._backend.errors as error:
            fault = self._backend.fault(error)
            # Not chained: a library's message may quote the request, including a session token or a signed URL.
            raise fault.kind(f"{what} in {self._shown}: {fault.text}", fault.hint) from None


def _options_of_environment() -> Options:
    text = os.environ.get(OPTIONS_ENV)
    if not text:
        return {}
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise StoreUnusable(f"the environment variable {OPTIONS_ENV} is not a JSON object")
    return options


def _open(url: str, options: Options) -> Backend:
    scheme, colon, _ = url.partition("://")
    if not colon:
        raise StoreUnusable(f"store {url!r}", EXPECTED)
    if scheme == "file":
        return open_folder(url, options)
    if scheme in SCHEMES:
        return open_obstore(url, options)
    raise StoreUnusable(f"store {one_line(url)!r}: unknown scheme", EXPECTED)
