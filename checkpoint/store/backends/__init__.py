"""The interface of a store's backend, with one implementation for each library.

`files` serves folders, `obstore_backend` s3, gs, az and memory. A backend makes each call once and lets its
library's exceptions pass; `fault` classifies them. Only `checkpoint.store.run_store` retries.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from grpo_orch.checkpoint.store.errors import (
    AlreadyExists,
    NotFound,
    StoreDenied,
    StoreError,
    StoreUnavailable,
    StoreUnusable,
)

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

    def fault(self, error: Exception) -> Fault:
        """Classify one of these exceptions."""


# The classification of a store's error responses, for all libraries. No I/O.
#
# A response may quote the request, including session tokens and signed URLs. So messages contain only its status,
# code and sentence, never the whole response.

CREATE_ONLY = "use a store that supports If-None-Match: AWS S3, Google Cloud Storage, Azure, Ceph, or a folder"
FREE_SPACE = "free some space"
REACH = "check the endpoint and this machine's network"
RIGHTS = "check the credentials and their permissions for this store"

_FULL = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "InsufficientCapacity"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_WRONG_KEY = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthorizationQueryParametersError"}
_ELSEWHERE = {
    "PermanentRedirect",
    "TemporaryRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}
# The store is busy, the network damaged the request, or requests conflicted: a retry may succeed.
_TRANSIENT = {
    "SlowDown",
    "RequestTimeout",
    "InternalError",
    "ServiceUnavailable",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "TooManyRequests",
    "IncompleteBody",
    "BadDigest",
    "InvalidDigest",
    "XAmzContentSHA256Mismatch",
    "ConditionalRequestConflict",
    "OperationAborted",
}
_FULL_ERRNO = {errno.ENOSPC, errno.EDQUOT}
_NAMES_ERRNO = {errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL}
_DENIED_ERRNO = {errno.EACCES, errno.EPERM, errno.EROFS}


def of_answer(status: int, code: str, message: str, bucket: str) -> Fault:
    """Classify a failed HTTP response.

    Args:
        status: the HTTP status.
        code: the store's error code, or "".
        message: the store's error message, or "".
        bucket: for the hint if the bucket is wrong.
    """
    kind, hint = _meaning(status, code, bucket)
    error = " ".join(part for part in (str(status), code) if part)
    return Fault(kind, one_line(f"{error}: {message}" if message else error), hint)


def _meaning(status: int, code: str, bucket: str) -> tuple[type[StoreError], str]:
    if status == 507 or code in _FULL:
        return StoreUnavailable, FREE_SPACE
    if code in _TRANSIENT:
        return StoreUnavailable, ""
    if code == "NoSuchBucket":
        return StoreUnusable, f"create the bucket {bucket!r}, or name another"
    if code in _EXPIRED:
        return StoreDenied, "renew the credentials, which have expired"
    if code in _WRONG_KEY:
        return StoreDenied, "check the access key and its secret"
    if code == "RequestTimeTooSkewed":
        return StoreDenied, "correct this machine's clock"
    if status in (301, 307) or code in _ELSEWHERE:
        return StoreUnusable, f"set the region and the endpoint of the bucket {bucket!r}"
    match status:
        case 401 | 403:
            return StoreDenied, RIGHTS
        case 404:
            return NotFound, ""
        case 409 | 412:
            return AlreadyExists, ""
        case 408 | 429:
            return StoreUnavailable, ""
        case 501:
            return StoreUnusable, "use another store: this one lacks an operation that a run needs"
        case _ if status >= 500:
            return StoreUnavailable, ""
        case _:
            return StoreUnusable, "the store rejects such requests"


def of_errno(number: int | None, text: str) -> Fault:
    """Classify an error of the operating system."""
    if number in _FULL_ERRNO:
        return Fault(StoreUnavailable, one_line(text), FREE_SPACE)
    if number in _DENIED_ERRNO:
        return Fault(StoreDenied, one_line(text), "name a folder that can be written")
    if number == errno.ENOENT:
        return Fault(NotFound, "no such object")
    if number == errno.EEXIST:
        return Fault(AlreadyExists, one_line(text))
    if number in _NAMES_ERRNO:
        return Fault(StoreUnusable, one_line(text), "the file system does not allow this name")
    return Fault(StoreUnavailable, one_line(text))


def one_line(text: str) -> str:
    """Return the first line without URLs' passwords and query strings, cut to 300 characters."""
    lines = text.strip().splitlines() or [""]
    return re.sub(r"(?<=://)[^/\s@]*@|\?[^\s\"']+=[^\s\"']*", "", lines[0])[:300]
