"""Jobs that wait for a place on a member, and the places that they get."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from orchestrator.gateway.job import Job
from orchestrator.gateway.nodes.link import Link
from policies.serving.membership import Load


@dataclass(slots=True, eq=False)
class Place:
    """A job's place on a member, to be given back with `Members.give_back`."""

    link: Link
    policy: str  # the label that the member held then
    load: Load
    begun: bool = False


@dataclass(slots=True, eq=False)
class Waiter:
    job: Job
    load: Load
    avoid: frozenset[str]
    place: asyncio.Future[Place]


class Queue:
    """Those who wait for one policy, and their `tokens`.

    Who was handed over has waited once already, and comes first; but what holds them back, a limit to tokens that
    are computed again, does not hold back the others.
    """

    def __init__(self) -> None:
        self.handed_over: deque[Waiter] = deque()
        self.new: deque[Waiter] = deque()
        self.tokens = 0

    def add(self, waiter: Waiter) -> None:
        self.tokens += waiter.load.tokens
        (self.handed_over if waiter.load.replayed else self.new).append(waiter)

    def __bool__(self) -> bool:
        return bool(self.handed_over or self.new)
