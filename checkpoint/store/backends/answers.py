"""What a store's refusal means, whichever library reports it: a table, no I/O.

An answer may quote the request, session tokens and signed URLs included. So messages are built from its status,
code and sentence, never from the whole answer.
"""

from __future__ import annotations

import errno
import re

from checkpoint.store.backends import Fault
from checkpoint.store.errors import (
    AlreadyExists,
    NotFound,
    StoreDenied,
    StoreError,
    StoreUnavailable,
    StoreUnusable,
)

CREATE_ONLY = "use a store that supports If-None-Match: AWS S3, Google Cloud Storage, Azure, Ceph, or a folder"
FREE_SPACE = "free some space"
REACH = "check the endpoint, and that this machine reaches it"
RIGHTS = "check the credentials and their rights to this store"

_FULL = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "InsufficientCapacity"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_WRONG_KEY = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthorizationQueryParametersError"}
_ELSEWHERE = {
    "PermanentRedirect",
    "TemporaryRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}
# The network damaged the request, or two came at once: the same request may pass.
_AGAIN = {
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
    """What a failed HTTP answer means.

    Args:
        status: the HTTP status.
        code: the store's own name for it, or "".
        message: the store's sentence about it, or "".
        bucket: named in the hint if the bucket is wrong.
    """
    kind, hint = _meaning(status, code, bucket)
    words = " ".join(part for part in (str(status), code) if part)
    return Fault(kind, one_line(f"{words}: {message}" if message else words), hint)


def _meaning(status: int, code: str, bucket: str) -> tuple[type[StoreError], str]:
    if status == 507 or code in _FULL:
        return StoreUnavailable, FREE_SPACE
    if code in _AGAIN:
        return StoreUnavailable, ""
    if code == "NoSuchBucket":
        return StoreUnusable, f"create the bucket {bucket!r}, or name another"
    if code in _EXPIRED:
        return StoreDenied, "the credentials have expired: renew them"
    if code in _WRONG_KEY:
        return StoreDenied, "check the access key and its secret"
    if code == "RequestTimeTooSkewed":
        return StoreDenied, "set this machine's clock"
    if status in (301, 307) or code in _ELSEWHERE:
        return StoreUnusable, f"name the region and the endpoint of the bucket {bucket!r}"
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
            return StoreUnusable, "this store lacks something that a run needs"
        case _ if status >= 500:
            return StoreUnavailable, ""
        case _:
            return StoreUnusable, "the store does not take such requests"


def of_errno(number: int | None, text: str) -> Fault:
    """What an error of the operating system means."""
    if number in _FULL_ERRNO:
        return Fault(StoreUnavailable, one_line(text), FREE_SPACE)
    if number in _DENIED_ERRNO:
        return Fault(StoreDenied, one_line(text), "name a folder that can be written")
    if number == errno.ENOENT:
        return Fault(NotFound, "there is no such object")
    if number == errno.EEXIST:
        return Fault(AlreadyExists, one_line(text))
    if number in _NAMES_ERRNO:
        return Fault(StoreUnusable, one_line(text), "this name cannot be an object there")
    return Fault(StoreUnavailable, one_line(text))


def one_line(text: str) -> str:
    """The text's first line without passwords and query strings of URLs, 300 characters at most."""
    lines = text.strip().splitlines() or [""]
    return re.sub(r"(?<=://)[^/\s@]*@|\?[^\s\"']+=[^\s\"']*", "", lines[0])[:300]
