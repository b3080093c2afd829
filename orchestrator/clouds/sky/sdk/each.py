"""One odd record of many costs what it says itself, never what the others say. Imports no SkyPilot.

SkyPilot reads its records of clusters all at once, here and on its server: one that it cannot read, as after a
change of its version, or a price that its catalog has twice, is an error for all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import structlog

from orchestrator.clouds.protocol import CloudRefused, CloudUnavailable

log = structlog.get_logger()

_KINDS_OF_TROUBLE = 1024
INIT = "INIT"


@functools.lru_cache(maxsize=_KINDS_OF_TROUBLE)
def say_once(event: str, what: str, why: str) -> None:
    """Warn of what a record does not tell, the first time that this process meets it."""
    log.warning(event, what=what, why=why)


def why_not(error: Exception) -> str:
    """An error as the reason of `say_once`: SkyPilot's assertions end with a whole table."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def decode_each(
    decode: Callable[[list[dict[str, Any]]], list[Any]],
) -> Callable[[list[dict[str, Any]]], list[Any]]:
    """SkyPilot's `decode` of a list of records, made to decode each by itself, as far as it can be."""

    def decode_all(answer: list[dict[str, Any]]) -> list[Any]:
        return [_decoded(decode, said) for said in answer]

    return decode_all


def _decoded(decode: Callable[[list[dict[str, Any]]], list[Any]], said: dict[str, Any]) -> Any:
    why = ""
    for left_out in ({}, {"status": INIT}, {"handle": None}):
        try:
            (record,) = decode([{**said, **left_out}])
        except Exception as error:  # noqa: BLE001 whatever it is, this one record is not whole
            why = why or why_not(error)
            continue
        if why:
            say_once("cluster_half_read", said["name"], why)
        return record
    return unread(said["name"], why)


def read_each(ask: Callable[[Sequence[str]], list[Any]], names: Sequence[str]) -> list[Any]:
    """The records of these clusters, asked for together and, where the server fails at one of them, apart.

    Raises CloudUnavailable when the server does not answer.
    """
    try:
        return ask(names) if names else []
    except CloudUnavailable as error:
        if not was_answered(error):
            raise
        if len(names) == 1:
            return [unread(names[0], str(error))]
    half = len(names) // 2
    return [*read_each(ask, names[:half]), *read_each(ask, names[half:])]


def was_answered(error: CloudUnavailable) -> bool:
    """Whether it was the answer to a question, and not that none came."""
    return isinstance(error.__cause__, CloudRefused)


def unread(name: str, why: str) -> Any:
    """In place of a record of which only this is known: there is one."""
    say_once("cluster_not_read", name, why)
    return SimpleNamespace(name=name, status=SimpleNamespace(value=INIT), handle=None)
