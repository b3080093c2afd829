"""Jobs that wait for a place on a member, in their order, and how many may."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from orchestrator.gateway.job import Job, QueueFull
from orchestrator.gateway.nodes.link import Link
from policies.serving.member import Load

# A trainer's batch of 4,096 requests waits whole while there is no node, and so do those of some impatient
# clients; beyond this somebody asks in a loop.
WAITING_MAX = 65_536
# Their prompts, at 8 bytes a token: two batches of 4,096 prompts of 16,384 tokens.
WAITING_SIZE_MAX = 1024**3
TOKEN_SIZE = 8


@dataclass(slots=True, eq=False)
class Place:
    """A job's place on a member, to be given back with `Places.release`."""

    link: Link
    load: Load
    has_first_token: bool = False


@dataclass(slots=True, eq=False)
class Waiter:
    """A job, and the place that it will get."""

    job: Job
    load: Load
    avoid: frozenset[str]
    place: asyncio.Future[Place]


class Queue:
    """The jobs that wait for one policy, and their `tokens`.

    A job that was handed over has waited once already and comes first; but what holds it back, the limit to tokens
    that are computed again, does not hold back new ones.
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


class Waiting:
    """How many jobs wait, and how many more may."""

    def __init__(self) -> None:
        self._count = 0
        self._size_bytes = 0

    @property
    def count(self) -> int:
        """How many jobs have no place."""
        return self._count

    @property
    def size_bytes(self) -> int:
        """The size of their prompts."""
        return self._size_bytes

    def check_capacity(self, size_bytes: int = 0) -> None:
        """Raise QueueFull if no more may wait, with prompts of so many bytes."""
        if self._count >= WAITING_MAX or self._size_bytes + size_bytes > WAITING_SIZE_MAX:
            raise QueueFull(
                f"{self._count} requests of {self._size_bytes >> 20} MiB wait for a node: no more are taken"
            )

    @contextmanager
    def counting(self, job: Job) -> Iterator[None]:
        """The job waits for as long as the block runs. Raises QueueFull."""
        size_bytes = job.prompt_tokens * TOKEN_SIZE if job.prompt_size is None else job.prompt_size
        if not job.is_admitted:
            self.check_capacity(size_bytes)
        self._count += 1
        self._size_bytes += size_bytes
        job.is_waiting = True
        try:
            yield
        finally:
            self._count -= 1
            self._size_bytes -= size_bytes
            job.is_waiting = False
