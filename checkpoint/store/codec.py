"""Encode documents as JSON, and decode them into typed values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from grpo_orch.checkpoint.store.errors import Corrupt, Torn
from grpo_orch.policies.model.events import EVENT_TYPES, Event
from grpo_orch.policies.model.state import RunState

# Increase it whenever a state's fields change, or `policies.model.fold.apply` makes another state of the same
# events: a state stored with another number is discarded and folded again from the events.
STATE_SCHEMA = 36


# Larger integers are rejected: arithmetic with a float would raise OverflowError.
_INT_END = 2**64
_MANY_DIGITS, _DIGITS_AS_ZERO = b"0" * 20, bytes.maketrans(b"123456789", b"0" * 9)

T = TypeVar("T")


def to_json(document: object) -> bytes:
    """Encode a dataclass, a msgspec struct or plain data."""
    return msgspec.json.encode(document)


def from_json(data: bytes, cls: type[T], where: str, check: Callable[[T, str], object] | None = None) -> T:
    """Decode and check against `cls`. Raises Corrupt naming `where`, or Torn for data that is not JSON.

    `check` is called with the value and `where`, and raises ValueError for an invalid value of the right types.
    """
    hint = "it was not written by this version of grpo-orch"
    try:
        value = msgspec.json.decode(data, type=cls)
        if _MANY_DIGITS in data.translate(_DIGITS_AS_ZERO):
            _check_ints(msgspec.json.decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if isinstance(error, msgspec.ValidationError | RecursionError):
            raise Corrupt(f"{where}: {error}", hint) from error
        raise Torn(
            f"{where}: {len(data)} bytes, {error}", "it was damaged, or its write was interrupted"
        ) from error
    try:
        if check:
            check(value, where)
    except ValueError as error:
        raise Corrupt(f"{where}: {error}", hint) from error
    return value


def _check_ints(plain: Any) -> None:
    """Raise ValidationError for an integer of more than 64 bits."""
    if isinstance(plain, int) and not -_INT_END < plain < _INT_END:
        raise msgspec.ValidationError("an integer of more than 64 bits")
    for inner in plain.values() if isinstance(plain, dict) else plain if isinstance(plain, list) else ():
        _check_ints(inner)


def check_schema(schema: int, newest: int, where: str) -> None:
    """Raise Corrupt, naming `where`, for the schema of a newer version."""
    if schema > newest:
        raise Corrupt(f"{where}: schema {schema}", f"this grpo-orch reads up to {newest}; use a newer one")


def event_to_plain(event: Event) -> dict[str, Any]:
    """Convert an event to JSON data, with its type's name under `type`."""
    return {"type": type(event).__name__, **msgspec.to_builtins(event)}


def event_from_plain(data: dict[str, Any], where: str) -> Event:
    """Convert JSON data to an event. Raises Corrupt for an event of a newer version."""
    fields = dict(data)
    cls = EVENT_TYPES.get(str(fields.pop("type", "")))
    if cls is None:
        raise Corrupt(
            f"{where}: unknown event {data.get('type')!r}", "use the grpo-orch that wrote it, or a newer one"
        )
    try:
        return msgspec.convert(fields, cls)
    except msgspec.ValidationError as error:
        raise Corrupt(f"{where}: {error}", "use the grpo-orch that wrote it, or a newer one") from error


def state_to_plain(state: RunState) -> dict[str, Any]:
    """Convert a state to JSON data, deterministically: sets are sorted, mappings keep their order."""
    return {**msgspec.to_builtins(state), "commands_taken": sorted(state.commands_taken)}


def state_from_plain(data: dict[str, Any], where: str) -> RunState:
    """Convert JSON data to a state. Raises Corrupt."""
    try:
        return msgspec.convert(data, RunState)
    except msgspec.ValidationError as error:
        raise Corrupt(f"{where}: {error}", "use the grpo-orch that wrote it, or a newer one") from error
