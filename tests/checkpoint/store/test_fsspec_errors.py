"""What fsspec's libraries raise is one of the store's errors; a mistake in this project's own code is not."""

from __future__ import annotations

from typing import Any

import aiohttp
import fsspec
import pytest
from botocore.exceptions import EndpointConnectionError, NoCredentialsError
from botocore.parsers import ResponseParserError
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.memory import MemoryFileSystem

from grpo_orch.checkpoint.store.errors import StoreDenied, StoreError, StoreUnavailable
from grpo_orch.checkpoint.store.run_store import Store


class Broken(MemoryFileSystem):
    """Raises `error` at each read."""

    error: BaseException

    def cat_file(self, *_: Any, **__: Any) -> bytes:
        raise self.error


@pytest.fixture
def store() -> Store:
    fsspec.register_implementation("broken", Broken, clobber=True)
    return Store("broken://run", retry_s=0.0)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (aiohttp.ClientPayloadError("cut"), StoreUnavailable),
        (aiohttp.http_exceptions.TransferEncodingError("no length"), StoreUnavailable),
        (EndpointConnectionError(endpoint_url="http://s3"), StoreUnavailable),
        (ResponseParserError("no XML"), StoreUnavailable),
        (FSTimeoutError(), StoreUnavailable),
        (ConnectionResetError(), StoreUnavailable),
        (RuntimeError("Credentials were refreshed, but they are still expired."), StoreUnavailable),
        (NoCredentialsError(), StoreDenied),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_library_raises_is_an_error_of_the_store(
    store: Store, error: Exception, told: type[StoreError]
) -> None:
    Broken.error = error
    with pytest.raises(told, match="read a in broken://run"):
        store.get("a")


@pytest.mark.parametrize("error", [KeyError, RuntimeError, TypeError, ValueError, NotImplementedError])
def test_a_mistake_is_not_taken_for_a_store_that_fails(store: Store, error: type[Exception]) -> None:
    Broken.error = error("mistake")
    with pytest.raises(error, match="mistake"):
        store.get("a")
