"""Stores through fsspec: for schemes that obstore does not support, and optionally for S3.

Bytes are copied in Python. Most of fsspec's filesystems inherit a create-only write that is not atomic; such a
store cannot hold a run. `checkpoint.store.probe` tests the others before a run begins. Whether readers see
unfinished objects depends on the filesystem; files are written as with obstore.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
import threading
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from grpo_orch.checkpoint.store.backends import BytesLike, Entry, Fault, Options, files
from grpo_orch.checkpoint.store.backends.answers import CREATE_ONLY, RIGHTS, of_answer, of_errno, one_line
from grpo_orch.checkpoint.store.errors import (
    AlreadyExists,
    NotFound,
    StoreDenied,
    StoreUnavailable,
    StoreUnusable,
)

S3_SCHEMES = ("s3", "s3a")
READ_TIMEOUT_S = 120  # includes uploads: 16 MiB at 140 KB/s
ONE_PUT_BYTES = 5 << 30  # S3's limit; s3fs uses a multipart upload above twice its chunk size
PART_BYTES = 16 << 20  # S3 allows 10,000 parts
BULK_KEYS = 1000
_memory = threading.Lock()
_TIMES = ("LastModified", "last_modified", "modified", "mtime", "updated", "created")
# Exceptions of fsspec's libraries besides OSError (the base of TimeoutError), by module.
_RAISED = {
    "aiohttp": ("ClientError",),
    "aiohttp.http_exceptions": ("HttpProcessingError",),
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "botocore.parsers": ("ResponseParserError",),
    "gcsfs.retry": ("HttpError", "ChecksumError", "NonRetryableError"),
    "google.auth.exceptions": ("GoogleAuthError",),
    "google.api_core.exceptions": ("GoogleAPIError",),
    "azure.core.exceptions": ("AzureError",),
}
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError")
_STILL_EXPIRED = "Credentials were refreshed, but"  # botocore's RuntimeError, identified by its message


class FsspecBackend:
    """A folder of an fsspec filesystem."""

    def __init__(self, filesystem: Any, root: str, is_s3: bool) -> None:
        self._fs = filesystem
        self.folder = Path(root) if isinstance(filesystem, LocalFileSystem) else None
        self._can_create = _can_create(filesystem)
        self._root = root.rstrip("/")
        self._is_s3 = is_s3
        self._put_options = {"chunksize": ONE_PUT_BYTES} if is_s3 else {}

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        return _raised(RuntimeError)

    def get(self, key: str) -> memoryview:
        return memoryview(self._fs.cat_file(self._path(key)))

    def put(self, key: str, data: BytesLike) -> None:
        self._write(key, data, "overwrite")

    def put_parts(self, key: str, parts: Iterable[BytesLike]) -> None:
        if not self._is_s3:
            self._fs.makedirs(self._path(key).rpartition("/")[0], exist_ok=True)
        with self._fs.open(self._path(key), "wb", block_size=PART_BYTES) as out:
            for part in parts:
                out.write(bytes(part))

    def create(self, key: str, data: BytesLike) -> None:
        if not self._can_create:
            name = type(self._fs).__name__
            raise StoreUnusable(f"fsspec's {name} has no atomic create-only write", CREATE_ONLY)
        # The process's memory needs a lock.
        with _memory if isinstance(self._fs, MemoryFileSystem) else contextlib.nullcontext():
            self._write(key, data, "create")

    def secure(self, keys: Sequence[str]) -> None:
        if self.folder is not None:
            files.secure(self.folder / key for key in keys)

    def delete(self, keys: Sequence[str]) -> None:
        # Bulk deletion expands patterns: names with pattern characters are deleted one by one.
        bulk = [key for key in keys if self._is_s3 and not set(key) & set("*?[")]
        for start in range(0, len(bulk), BULK_KEYS):
            self._fs.rm([self._path(key) for key in bulk[start : start + BULK_KEYS]])
        for key in set(keys).difference(bulk):
            try:
                self._fs.rm_file(self._path(key))
            except FileNotFoundError as error:
                if _code(error) == "NoSuchBucket":
                    raise
        if self.folder is not None:
            files.remove_empty({(self.folder / key).parent for key in keys}, self.folder)

    def entries(self, prefix: str, after: str | None) -> list[Entry]:  # noqa: ARG002  # fsspec lists whole folders
        below = f"{self._path(prefix)}/"
        found = self._fs.find(below, detail=True)
        return [
            Entry(path.removeprefix(f"{self._root}/"), int(info["size"]), _time_of(info))
            for path, info in found.items()
            if path.startswith(below) and info["type"] == "file" and not self._is_staged(path)
        ]

    def folders(self, prefix: str) -> list[str]:
        try:
            found = self._fs.ls(self._path(prefix), detail=True)
        except FileNotFoundError as error:
            if _code(error) == "NoSuchBucket":
                raise
            return []
        return [
            info["name"].rstrip("/").removeprefix(f"{self._root}/")
            for info in found
            if info["type"] == "directory"
        ]

    def sweep(self, prefix: str, older_than_s: float) -> None:
        """Sweep files; other filesystems list the remains of interrupted writes."""
        if self.folder is not None:
            files.sweep(self.folder / prefix, older_than_s)

    def fault(self, error: Exception) -> Fault | None:
        if isinstance(error, RuntimeError):
            text = one_line(str(error))
            expired = text.startswith(_STILL_EXPIRED)
            return Fault(StoreUnavailable, text, "renew the credentials") if expired else None
        answer = _answer(error)
        if answer is not None:
            details = answer.get("Error", {})
            status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            bucket = self._root.partition("/")[0]
            return of_answer(status, str(details.get("Code", "")), str(details.get("Message", "")), bucket)
        match error:
            case FileExistsError():
                return Fault(AlreadyExists, "the object exists")
            case FileNotFoundError():
                return Fault(NotFound, "no such object")
            case PermissionError():
                return Fault(StoreDenied, one_line(str(error)), RIGHTS)
            case OSError():
                return of_errno(error.errno, error.strerror or str(error) or type(error).__name__)
        if type(error).__name__ in _NO_CREDENTIALS:
            return Fault(StoreDenied, one_line(str(error)), "set the credentials in the environment")
        return Fault(StoreUnavailable, one_line(str(error) or type(error).__name__))

    def _write(self, key: str, data: BytesLike, mode: str) -> None:
        if self.folder is not None:
            files.write(self.folder / key, data, create=mode == "create")
            return
        # Copied: the libraries accept only bytes.
        path, content = self._path(key), bytes(data)
        try:
            self._fs.pipe_file(path, content, mode=mode, **self._put_options)
        except FileNotFoundError:
            if self._is_s3:
                raise  # the bucket is missing; the user creates it
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(path, content, mode=mode)

    def _is_staged(self, path: str) -> bool:
        return self.folder is not None and files.is_staged(path)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"


def open_fsspec(url: str, options: Options) -> FsspecBackend:
    """Open the backend of an fsspec URL; `options` are its filesystem's arguments. Raises StoreUnusable."""
    shown = one_line(url)
    is_s3 = url.partition("://")[0] in S3_SCHEMES
    arguments = {key: _decoded(value) for key, value in options.items()}
    if is_s3:
        arguments = _s3_arguments(shown, arguments)
    try:
        filesystem, root = url_to_fs(url, skip_instance_cache=True, **arguments)
        if is_s3:
            filesystem.retries = 1  # attempts in total: only checkpoint.store.run_store retries
            _check_s3(filesystem, root)
    except _raised(ImportError, ValueError, TypeError) as error:
        raise StoreUnusable(
            f"store {shown!r}: {one_line(str(error))}", "expected a URL that fsspec supports"
        ) from error
    return FsspecBackend(filesystem, root, is_s3)


def _raised(*also: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the exceptions of a failing store, of the libraries loaded so far."""
    loaded = {name: sys.modules[name] for name in _RAISED if name in sys.modules}
    return OSError, *also, *(getattr(module, kind) for name, module in loaded.items() for kind in _RAISED[name])


def _check_s3(filesystem: Any, root: str) -> None:
    """Detect a wrong bucket name or endpoint: s3fs would raise a plain ValueError at a request."""
    from botocore.handlers import VALID_BUCKET, VALID_S3_ARN

    bucket, _, _ = filesystem.split_path(root)
    if not VALID_BUCKET.search(bucket) and not VALID_S3_ARN.search(bucket):
        raise ValueError(f"{bucket!r} is not a valid bucket name")
    filesystem.connect()


def _can_create(filesystem: Any) -> bool:
    """Whether a filesystem may have an atomic create: files and memory do, others if they define one.

    The method inherited from fsspec checks for the object before it writes. The probe tests the others.
    """
    if isinstance(filesystem, LocalFileSystem | MemoryFileSystem):
        return True
    own = type(filesystem)
    method = own._pipe_file if issubclass(own, AsyncFileSystem) else own.pipe_file
    if method in (AsyncFileSystem._pipe_file, AbstractFileSystem.pipe_file):
        return False
    return "mode" in inspect.signature(method).parameters


def _s3_arguments(shown: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for s3fs over our defaults. Reject unknown ones, which s3fs would ignore."""
    from s3fs import S3FileSystem

    known = inspect.signature(S3FileSystem.__init__).parameters
    for key in arguments:
        if key not in known:
            raise StoreUnusable(f"store {shown!r}: option {key!r}", "s3fs has no such argument")
    ours = {
        "read_timeout": READ_TIMEOUT_S,
        "retries": {"max_attempts": 0},
        # Older stores (Ceph 16) refuse the checksums that newer clients add by default.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    config = ours | arguments.get("config_kwargs", {})
    # One range at a time: concurrent ranges of an object that is being replaced would be mixed.
    return {"use_listings_cache": False, "max_concurrency": 1, **arguments, "config_kwargs": config}


def _decoded(value: Any) -> Any:
    """Decode true, false and JSON objects in an option's text; return other text unchanged."""
    if isinstance(value, str) and (value in ("true", "false") or value.startswith("{")):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _time_of(info: dict[str, Any]) -> datetime:
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, datetime):
            return value if value.tzinfo else value.replace(tzinfo=UTC)
        if isinstance(value, int | float):
            return datetime.fromtimestamp(value, UTC)
    raise StoreUnusable(f"{info.get('name')}: the listing has no modification time", "use another kind of store")


def _answer(error: BaseException) -> dict[str, Any] | None:
    """Return the response that botocore attaches to its errors, which s3fs wraps in OSErrors."""
    for source in (error, error.__cause__):
        response = getattr(source, "response", None)
        if isinstance(response, dict) and "Error" in response:
            return response
    return None


def _code(error: BaseException) -> str:
    answer = _answer(error)
    return str(answer["Error"].get("Code", "")) if answer else ""
