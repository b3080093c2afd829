"""The errors of the store, typed by what the caller can do."""

from __future__ import annotations


class StoreError(Exception):
    """Base class of all. `hint` names the remedy in one sentence."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.hint = hint


class NotFound(StoreError):
    """The object does not exist."""


class AlreadyExists(StoreError):
    """A create-only write found an object of that name."""


class StoreUnavailable(StoreError):
    """The store did not answer, or is full. Retry."""


class StoreDenied(StoreError):
    """The credentials do not allow the operation. The user must act."""


class StoreUnusable(StoreError):
    """The store does not support an operation that a run needs, or its URL is wrong."""


class NoIntactCheckpoint(StoreError):
    """Checkpoints are listed but none can be restored. Do not retry: the user must decide."""


class Corrupt(StoreError):
    """The object is damaged, or its schema is unknown to this version."""


class Torn(Corrupt):
    """The object is not JSON: empty, truncated or overwritten, as a power failure may leave a file."""
