"""How many processes train: one for each GPU of the trainer's node, unless run.yaml says another number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ALTERNATIVES = ("any_of", "ordered")  # SkyPilot's: lists of machines, each over the keys beside the list


def processes_in(accelerate: Mapping[str, Any], resources: Mapping[str, Any]) -> int:
    """How many processes train, by these sections of `trainer`; of alternatives the smallest decides."""
    count = accelerate.get("num_processes")
    if isinstance(count, int) and count > 0:
        return count
    return min((count for count in gpu_counts(resources) if count), default=1)


def gpu_counts(resources: Mapping[str, Any]) -> set[int | None]:
    """The counts in SkyPilot's `accelerators`: `H100:8`, `H100`, `{H100: 8}`, or a list of alternatives.

    One for each alternative, those of `any_of` and `ordered` too; None for one that names none.
    """
    return {count for one in alternatives_of(resources) for count in _counts(one)}


def alternatives_of(resources: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The machines that SkyPilot's `resources` allows, in their order: each entry of `any_of` or `ordered` over
    the keys beside the list; without such a list the one that is named."""
    nested = [one for key in ALTERNATIVES for one in _listed(resources.get(key)) if isinstance(one, Mapping)]
    beside = {key: value for key, value in resources.items() if key not in ALTERNATIVES}
    return [{**beside, **one} for one in nested or [{}]]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _counts(resources: Mapping[str, Any]) -> Iterator[int | None]:
    accelerators = resources.get("accelerators")
    if isinstance(accelerators, Mapping):
        accelerators = [f"{name}:{count}" for name, count in accelerators.items()]
    elif isinstance(accelerators, str):
        accelerators = [accelerators]
    for one in _listed(accelerators) or (None,):
        yield _count(one) if isinstance(one, str) else None


def _count(text: str) -> int | None:
    """Of `NAME` or `NAME:COUNT`, read as SkyPilot does; None for what is no whole count of GPUs, which is its to
    judge."""
    name, _, count = text.partition(":")
    if name.lower().startswith("tpu"):
        return None
    try:
        number = float(count or 1)
    except ValueError:
        return None
    return int(number) if number.is_integer() and number >= 0 else None
