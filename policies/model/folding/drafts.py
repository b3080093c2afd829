"""States in the making: who folds many events changes mappings of its own, where a state's are copied each time.

A `RunState` is a value. A draft is one, too, to everybody but who made it: `apply` of `folding.fold` changes its
mappings in place, and the draft before is not to be used any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from policies.model.state import RunState

K = TypeVar("K")
V = TypeVar("V")


class _Own(dict[K, V]):
    """A draft's mapping."""


def draft(state: RunState) -> RunState:
    """Return a draft of the state, for one holder."""
    return replace(
        state,
        nodes=_Own(state.nodes),
        slots=_Own(state.slots),
        kinds=_Own(state.kinds),
        pools=_Own(state.pools),
    )


def final(state: RunState) -> RunState:
    """Return a draft as a value, which nothing changes any more."""
    return replace(
        state,
        nodes=MappingProxyType(state.nodes),
        slots=MappingProxyType(state.slots),
        kinds=MappingProxyType(state.kinds),
        pools=MappingProxyType(state.pools),
    )


def with_item(mapping: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """Return the mapping with that value: itself, where it is a draft's."""
    if isinstance(mapping, _Own):
        mapping[key] = value
        return mapping
    return MappingProxyType({**mapping, key: value})


def without_item(mapping: Mapping[K, V], key: K) -> Mapping[K, V]:
    """Return the mapping without that key: itself, where it is a draft's."""
    if isinstance(mapping, _Own):
        del mapping[key]
        return mapping
    return MappingProxyType({k: v for k, v in mapping.items() if k != key})


def in_place_of(mapping: Mapping[K, V], changed: dict[K, V]) -> Mapping[K, V]:
    """Return what takes the mapping's place: in a draft its own, too."""
    return _Own(changed) if isinstance(mapping, _Own) else MappingProxyType(changed)
