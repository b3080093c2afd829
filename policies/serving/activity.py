"""What a rollout machine's time went to, as its gateway sees it: loading a policy, being idle, or serving.

The journal knows the phases of machines, and would grow by an entry a node and step if it told these, too. What is
kept is how much of each minute went to what, a byte a machine and minute: however short the steps are, a thousand
machines are 60 kB an hour. This module counts seconds into such bytes; it reads no clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from policies.model.vocabulary import machine_of
from policies.serving.gateway_status import MemberStatus

UNKNOWN = 0xFF  # nothing was seen of it: loading and idle, four bits each, are never 15 both
PARTS = 15  # into which a share is divided


class Activity(StrEnum):
    """What a machine that may serve is at."""

    LOADING = "loading"  # none of its engines can serve what is wanted
    IDLE = "idle"  # one could, and none has anything to do
    SERVING = "serving"


@dataclass(frozen=True, slots=True)
class Shares:
    """Of some stretch of time, as far as it is known; the rest of it was serving."""

    loading: float
    idle: float


def activity_of(members: Sequence[MemberStatus]) -> Activity | None:
    """What a machine is at, from all its engines; None where none is a member that stays."""
    staying = [one for one in members if not one.draining]
    if not staying:
        return None
    serving = [one for one in staying if one.serving]
    if not serving:
        return Activity.LOADING
    return Activity.SERVING if any(one.requests_running for one in serving) else Activity.IDLE


def activities(members: Iterable[MemberStatus]) -> dict[str, Activity]:
    """Of each machine that has a member which stays."""
    engines = defaultdict[str, list[MemberStatus]](list)
    for one in members:
        engines[machine_of(one.node)].append(one)
    found = ((machine, activity_of(own)) for machine, own in engines.items())
    return {machine: activity for machine, activity in found if activity is not None}


def pack(loading_s: float, idle_s: float, known_s: float) -> int:
    """A byte for so many seconds of the known ones; UNKNOWN where none are known."""
    if known_s <= 0:
        return UNKNOWN
    loading = min(PARTS, round(PARTS * loading_s / known_s))
    return loading << 4 | min(PARTS - loading, round(PARTS * idle_s / known_s))


def unpack(byte: int) -> Shares | None:
    """The inverse of `pack`, to a thirtieth; None where nothing is known."""
    loading, idle = byte >> 4, byte & 0xF
    return Shares(loading / PARTS, idle / PARTS) if loading + idle <= PARTS else None


class Counted:
    """What every machine was at, in slots of one length; times are seconds since the epoch.

    Args:
        slot_s: how long a slot is.
        slots: how many belong together, as a group.
    """

    def __init__(self, slot_s: int, slots: int) -> None:
        self.slot_s, self.slots = slot_s, slots
        self._closed: dict[int, dict[str, bytearray]] = {}  # by group and machine, a byte a slot
        self._slot = 0  # the open one, counted from the epoch
        self._open: dict[str, list[float]] = {}  # seconds of it: loading, idle, known

    @property
    def group(self) -> int:
        """That of the open slot."""
        return self._slot // self.slots

    def see(self, now: Mapping[str, Activity], at_s: float, for_s: float) -> int | None:
        """They have been at that for so long, until `at_s`. Returns the group of the slot that this ended."""
        slot, ended = int(at_s // self.slot_s), None
        if slot != self._slot:
            ended = self.group if self._open else None
            self._close()
            self._slot = slot
        for machine, activity in now.items():
            seconds = self._open.setdefault(machine, [0.0, 0.0, 0.0])
            seconds[0] += for_s * (activity is Activity.LOADING)
            seconds[1] += for_s * (activity is Activity.IDLE)
            seconds[2] += for_s
        return ended

    def packed(self, group: int, *, open_too: bool = False) -> dict[str, bytes]:
        """A byte a slot for every machine, without unknown ones at the end; with `open_too` also the open slot's,
        as far as it is."""
        lines = {machine: bytearray(line) for machine, line in self._closed.get(group, {}).items()}
        if open_too and group == self.group:
            self._fill(lines)
        return {machine: bytes(line).rstrip(bytes([UNKNOWN])) for machine, line in lines.items()}

    def _close(self) -> None:
        """Write the open slot down, and forget the groups before the one before it."""
        self._fill(self._closed.setdefault(self.group, {}))
        for old in [one for one in self._closed if one < self.group - 1]:
            del self._closed[old]
        self._open = {}

    def _fill(self, lines: dict[str, bytearray]) -> None:
        for machine, seconds in self._open.items():
            line = lines.setdefault(machine, bytearray([UNKNOWN]) * self.slots)
            line[self._slot % self.slots] = pack(*seconds)
