"""Stores through obstore: s3, gs, az and memory. Bytes are not copied in Python."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast
from urllib.parse import urlparse

import obstore
from obstore import exceptions as raw
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from grpo_orch.checkpoint.store.backends import (
    REACH,
    RIGHTS,
    BytesLike,
    Entry,
    Fault,
    Options,
    of_answer,
    of_errno,
    one_line,
)
from grpo_orch.checkpoint.store.backends.aws import aws_settings
from grpo_orch.checkpoint.store.errors import AlreadyExists, NotFound, StoreDenied, StoreUnavailable, StoreUnusable

# A response that keeps arriving may take SLOW_TIMEOUT (16 MiB at 56 KB/s); one that stalls fails after
# HANG_TIMEOUT. The latter also runs during an upload, so large uploads have only the former.
HANG_TIMEOUT = "30s"
SLOW_TIMEOUT = "300s"
CONNECT_TIMEOUT = "10s"
LARGE_BYTES = 1 << 20
# S3 allows 10,000 parts: 156 GiB in one object.
PART_BYTES = 16 << 20
PARTS_AT_ONCE = 4

# obstore takes these separately from the store's own keys, and panics if they are mixed.
CLIENT_KEYS = {
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "default_content_type",
    "default_headers",
    "http1_only",
    "http2_keep_alive_interval",
    "http2_keep_alive_timeout",
    "http2_keep_alive_while_idle",
    "http2_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "randomize_addresses",
    "read_timeout",
    "root_certificate",
    "timeout",
    "user_agent",
}
_STATUS = re.compile(r"Server returned non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>|\(code: (\w+)\)")
_MESSAGE = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_CAUSE = re.compile(r'^ *(?:message|error): "([^"\n]+)"', re.MULTILINE)
_ADDRESS = re.compile(r"uri: Some\(\s*(\w+://[^/\s@]+)/")
_METADATA_SERVICE = "http://169.254.169.254/"

_REFUSED = (raw.BaseError, ValueError, TypeError)

_memory: dict[str, MemoryStore] = {}


class ObstoreBackend:
    """One of obstore's stores.

    Args:
        quick: a client with a timeout for stalled responses.
        slow: a client for large uploads, whose responses come late; may be the same.
        bucket: for hints.
        keeps_input: the store would use the caller's memory as the object.
    """

    errors: tuple[type[Exception], ...] = (raw.BaseError, OSError)
    folder = None

    def __init__(self, quick: Any, slow: Any, bucket: str = "", *, keeps_input: bool = False) -> None:
        self._quick = quick
        self._slow = slow
        self._bucket = bucket
        self._keeps_input = keeps_input

    def get(self, key: str) -> memoryview:
        return memoryview(cast(Any, obstore.get(self._quick, key).bytes()))

    def put(self, key: str, data: BytesLike) -> None:
        self._put(key, data, "overwrite")

    def secure(self, keys: Sequence[str]) -> None:
        """Do nothing: a write returns once it is durable."""

    def put_parts(self, key: str, parts: Iterable[BytesLike]) -> None:
        with obstore.open_writer(self._slow, key, buffer_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE) as out:
            for part in parts:
                out.write(part)

    def create(self, key: str, data: BytesLike) -> None:
        self._put(key, data, "create")

    def delete(self, keys: Sequence[str]) -> None:
        try:
            obstore.delete(self._quick, list(keys))
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise
            # GCS and Azure may stop at the first missing object without naming it.
            if len(keys) > 1:
                for key in keys:
                    self.delete([key])

    def entries(self, prefix: str, after: str | None) -> list[Entry]:
        pages = obstore.list(self._quick, prefix, offset=after, chunk_size=1000)
        return [Entry(item["path"], item["size"], item["last_modified"]) for page in pages for item in page]

    def folders(self, prefix: str) -> list[str]:
        return list(obstore.list_with_delimiter(self._quick, prefix)["common_prefixes"])

    def sweep(self, prefix: str, older_than_s: float) -> None:
        """Do nothing: an interrupted write leaves nothing behind."""

    def fault(self, error: Exception) -> Fault:
        text = str(error)
        if _METADATA_SERVICE in text:
            return _no_credentials(text)
        if isinstance(error, raw.UnauthenticatedError) and "credential provider" in text:
            return Fault(StoreDenied, one_line(text.partition("provider: ")[2]), "renew the credentials")
        if status := _STATUS.search(text):
            code, message = _CODE.search(text), _MESSAGE.search(text)
            return of_answer(
                int(status[1]), (code[1] or code[2]) if code else "", message[1] if message else "", self._bucket
            )
        match error:
            case raw.AlreadyExistsError():
                return Fault(AlreadyExists, "the object exists")
            case FileNotFoundError():
                return Fault(NotFound, "no such object")
            case raw.PermissionDeniedError() | raw.UnauthenticatedError():
                return Fault(StoreDenied, one_line(text), RIGHTS)
            case raw.InvalidPathError() | raw.NotSupportedError():
                return Fault(StoreUnusable, one_line(text))
            case OSError():
                return of_errno(error.errno, str(error.strerror))
            case _:
                return _connection_fault(text)

    def _put(self, key: str, data: BytesLike, mode: Literal["overwrite", "create"]) -> None:
        store = self._slow if memoryview(data).nbytes > LARGE_BYTES else self._quick
        content = bytes(data) if self._keeps_input else data
        obstore.put(store, key, content, mode=mode, use_multipart=False)


def open_obstore(url: str, options: Options) -> ObstoreBackend:
    """Open the backend of a memory, s3, gs or az URL. Raises StoreUnusable, StoreDenied."""
    scheme = url.partition("://")[0]
    if scheme != "memory":
        return _remote(url, scheme, options)
    if options:
        raise StoreUnusable(f"store {url!r}: option {next(iter(options))!r}", "memory:// takes no options")
    memory = _memory.setdefault(url, MemoryStore())
    return ObstoreBackend(memory, memory, keeps_input=True)


def _remote(url: str, scheme: str, options: Options) -> ObstoreBackend:
    if not urlparse(url).netloc:
        raise StoreUnusable(f"store {url!r} names no bucket", f"expected {scheme}://BUCKET/PREFIX")
    config, provider = aws_settings(options) if scheme == "s3" else (dict(options), None)
    client = {key: config.pop(key) for key in list(config) if key in CLIENT_KEYS}
    # Only checkpoint.store.run_store retries.
    settings: dict[str, Any] = {"retry_config": {"max_retries": 0}}
    if provider:
        settings["credential_provider"] = provider
    slow = {"connect_timeout": CONNECT_TIMEOUT, "timeout": SLOW_TIMEOUT, **client}
    quick = {"read_timeout": HANG_TIMEOUT, **slow}
    slow.pop("read_timeout", None)
    try:
        stores = [_raw(url, config=config, client_options=client, **settings) for client in (quick, slow)]
    except _REFUSED as error:
        raise StoreUnusable(f"store {one_line(url)!r}: {_wrong_option(url, config, client, error)}") from None
    return ObstoreBackend(stores[0], stores[1], urlparse(url).netloc)


def _raw(url: str, **settings: Any) -> Any:
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    match scheme:
        case "s3":
            return S3Store(bucket, prefix=prefix or None, **settings)
        case "gs":
            return GCSStore(bucket, prefix=prefix or None, **settings)
        case _:
            return AzureStore.from_url(url, **settings)


def _wrong_option(url: str, config: dict[str, Any], client: dict[str, Any], error: Exception) -> str:
    """Find the wrong option by trying each: obstore names a wrong key, but not the key of a wrong value."""
    for kind, settings in (("config", config), ("client_options", client)):
        for key, value in settings.items():
            try:
                _raw(url, **{kind: {key: value}})
            except _REFUSED as refusal:
                if str(refusal) != str(error):
                    continue  # it is wrong only without the others
                return f"option {key!r}: {one_line(str(refusal)).removeprefix('Generic Config error: ')}"
    return one_line(str(error))


def _connection_fault(text: str) -> Fault:
    """Classify a request without a valid response: obstore's message contains the cause and the address."""
    message, causes = one_line(text.partition(" - ")[2] or text), _CAUSE.findall(text)
    address = _ADDRESS.search(text)
    if not causes or not address:
        return Fault(StoreUnavailable, message)
    return Fault(StoreUnavailable, one_line(f"{causes[-1]}, connecting to {address[1]}"), REACH)


def _no_credentials(text: str) -> Fault:
    """Classify a failed request to the machine's metadata service, which obstore makes without credentials."""
    status = _STATUS.search(text)
    kind = StoreDenied if status and int(status[1]) < 500 else StoreUnavailable
    return Fault(kind, "no credentials are set, and this machine provides none", "set them in the environment")
