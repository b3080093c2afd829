"""What can go wrong with the store, typed by what the caller can do about it."""

from __future__ import annotations


class StoreError(Exception):
    """Base of all. `hint` names the remedy in one sentence."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.hint = hint


class NotFound(StoreError):
    """The object does not exist."""


class AlreadyExists(StoreError):
    """A create-only write met an object of that name."""


class StoreUnavailable(StoreError):
    """The store did not answer, or is full: worth another try."""


class StoreDenied(StoreError):
    """The credentials do not allow it: only the user can help."""


class StoreUnusable(StoreError):
    """The URL is not a store this project can work on."""


class NothingWhole(StoreError):
    """Checkpoints are listed but none can be restored: no retry helps, a person has to decide."""


class Corrupt(StoreError):
    """What was read is not what was written, or of a schema this version does not know."""


class Torn(Corrupt):
    """What was read is no document at all: empty, cut off or overwritten, as a power cut leaves a file."""
