"""The queue of jobs that wait for a place on a member, and its limits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from grpo_orch.orchestrator.gateway.job import Job, QueueFull
from grpo_orch.orchestrator.gateway.nodes.link import Link
from grpo_orch.policies.serving.member import Load

# While the fleet is empty, a trainer's whole batch of 4,096 requests waits, and those of some clients. More than
# this comes from a client that sends requests in a loop.
WAITING_MAX = 65_536
# Of their prompts, at 8 bytes a token: two batches of 4,096 prompts of 16,384 tokens.
WAITING_SIZE_MAX = 1024**3
TOKEN_SIZE = 8


@dataclass(slots=True, eq=False)
class Place:
    """A job's place on a member, to be freed with `Places.release`."""

    link: Link
    load: Load
    has_first_token: bool = False


@dataclass(slots=True, eq=False)
class Waiter:
    """A waiting job, and the place that it will get."""

    job: Job
    load: Load
    avoid: frozenset[str]
    place: asyncio.Future[Place]


class Queue:
    """The jobs that wait for one policy, and the sum of their `tokens`.

    Jobs that were handed over come first, since they have waited before. The limit on recomputed tokens holds back
    only them, not new jobs.
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
    """Counts the waiting jobs and enforces the queue's limits."""

    def __init__(self) -> None:
        self._count = 0
        self._size_bytes = 0

    @property
    def count(self) -> int:
        """Number of jobs without a place."""
        return self._count

    @property
    def size_bytes(self) -> int:
        """Total size of their prompts."""
        return self._size_bytes

    def check_capacity(self, size_bytes: int = 0) -> None:
        """Raise QueueFull if a job with a prompt of `size_bytes` cannot wait."""
        if self._count >= WAITING_MAX or self._size_bytes + size_bytes > WAITING_SIZE_MAX:
            raise QueueFull(
                f"the queue is full: {self._count} requests ({self._size_bytes >> 20} MiB) wait for a node; "
                "retry later"
            )

    @contextmanager
    def counting(self, job: Job) -> Iterator[None]:
        """Count the job as waiting while the block runs. Raises QueueFull."""
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
