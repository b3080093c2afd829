"""Assign jobs to places on members, keep the queue of waiting jobs, and hold the links to the members."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from grpo_orch.orchestrator.gateway.job import Job, QueueFull
from grpo_orch.orchestrator.gateway.nodes.upstream import Link
from grpo_orch.policies.serving.membership import Load, Member, Membership

# While other members load a new policy, the first member that holds it gets no more than its share of the jobs for
# this long. Moving surplus jobs to the others later would cost a connection each, and their computed prompts.
SHARE_LIMIT_S = 0.25

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
    """Counts the waiting jobs and enforces the queue's limits.

    Attributes:
        count: number of jobs without a place.
        size_bytes: total size of their prompts.
        jobs_max: the largest number of them.
    """

    def __init__(self) -> None:
        self.jobs_max = WAITING_MAX
        self.count = self.size_bytes = 0

    def check_capacity(self, size_bytes: int = 0) -> None:
        """Raise QueueFull if a job with a prompt of `size_bytes` cannot wait."""
        if self.count >= self.jobs_max or self.size_bytes + size_bytes > WAITING_SIZE_MAX:
            raise QueueFull(
                f"the queue is full: {self.count} requests ({self.size_bytes >> 20} MiB) wait for a node; "
                "retry later"
            )

    @contextmanager
    def counting(self, job: Job) -> Iterator[None]:
        """Count the job as waiting while the block runs. Raises QueueFull."""
        size_bytes = job.prompt_tokens * TOKEN_SIZE if job.prompt_size is None else job.prompt_size
        if not job.is_admitted:
            self.check_capacity(size_bytes)
        self.count += 1
        self.size_bytes += size_bytes
        job.is_waiting = True
        try:
            yield
        finally:
            self.count -= 1
            self.size_bytes -= size_bytes
            job.is_waiting = False


class Places:
    """Assigns the members' places to jobs.

    Args:
        table: the members.
        connect: makes the link to a member for its current term.
        on_release: called with the node's name whenever a job has left a member.
    """

    def __init__(
        self, table: Membership, connect: Callable[[Member], Link], on_release: Callable[[str], None]
    ) -> None:
        self.share_limit_s = SHARE_LIMIT_S
        self._table = table
        self._connect = connect
        self._on_release = on_release
        self.links: dict[int, Link] = {}  # to the members that have had jobs, by term
        self._queues: dict[str, Queue] = {}  # by policy label
        self._wanted = ""  # the newest policy's label
        self._changed = asyncio.Event()  # set once, by the next change
        self._share_limit_until_s: float | None = 0.0  # None: no member serves the wanted policy yet
        self.waiting = Waiting()

    def want(self, policy: str) -> None:
        """Set the policy that members are to hold from now on."""
        self._wanted = policy
        self._share_limit_until_s = None
        self._table.forget_groups()
        self.note_change()

    def link(self, row: Member) -> Link:
        """Return the link to a member for its current term, made on the first call."""
        link = self.links.get(row.term)
        if link is None:
            link = self.links[row.term] = self._connect(row)
        return link

    async def wait_for_change(self) -> None:
        """Return after the next change of the table."""
        await self._changed.wait()

    def note_change(self) -> None:
        """Wake those that wait for a change of the table or of the wanted policy."""
        self._changed.set()
        self._changed = asyncio.Event()

    def end_term(self, term: int, why: str) -> None:
        """Close the link of a term that has ended; its jobs move to other members."""
        link = self.links.pop(term, None)
        if link is not None:
            link.close(why)

    async def acquire(self, job: Job, load: Load, avoid: frozenset[str]) -> Place:
        """Return a place on a member that may serve the job, waiting until one is free.

        Raises QueueFull.
        """
        if job.policy not in self._queues or load.replayed:
            row = self._choose(job, load, avoid)
            if row is not None:
                return self._place_on(row, load)
        with self.waiting.counting(job):
            waiter = Waiter(job, load, avoid, asyncio.get_running_loop().create_future())
            self._queues.setdefault(job.policy, Queue()).add(waiter)
            self._assign_places()  # jobs ahead of it may have been cancelled
            try:
                return await waiter.place
            except asyncio.CancelledError:
                if waiter.place.done() and not waiter.place.cancelled():
                    self.release(waiter.place.result())
                raise

    def note_first_token(self, place: Place) -> None:
        """Record that the job at this place got its first token there."""
        place.has_first_token = True
        self._table.first_token(place.link.node, place.link.term, place.load)
        self._assign_places()

    def release(self, place: Place) -> None:
        """Free the place of a job that has left it, finished or not."""
        self._table.request_finished(place.link.node, place.link.term, place.load, got_token=place.has_first_token)
        self._on_release(place.link.node)
        self._assign_places()

    async def wait_for_other_member(self, job: Job) -> bool:
        """Return whether some member that has not refused the job can serve it.

        Waits while such a member still loads the job's policy. Raises QueueFull.
        """
        if _any_accepts(job, self._table.serving(job.policy)):
            return True
        with self.waiting.counting(job):
            while _any_accepts(job, self._table.loading(job.policy)):
                await self.wait_for_change()
                if _any_accepts(job, self._table.serving(job.policy)):
                    return True
        return False

    def has_waiting(self, policy: str) -> bool:
        """Return whether a job waits for a place on a member with this policy."""
        return policy in self._queues

    def assign(self) -> None:
        """Give free places to waiting jobs, after members joined or changed."""
        if self._share_limit_until_s is None and self._wanted and self._table.serving(self._wanted):
            # The first member with a new policy gets only its share; others may follow within `share_limit_s`.
            self._share_limit_until_s = time.monotonic() + self.share_limit_s
            asyncio.get_running_loop().call_later(self.share_limit_s, self._assign_places)
        self._assign_places()

    def _assign_places(self) -> None:
        """Give free places to waiting jobs, in order."""
        for policy, queue in list(self._queues.items()):
            for waiters in (queue.handed_over, queue.new):
                skipped = []  # a job that one member refused must not keep the next jobs from that member
                while waiters:
                    waiter = waiters[0]
                    if not waiter.place.done():
                        row = self._choose(waiter.job, waiter.load, waiter.avoid)
                        if row is None and waiter.job.refused_by:
                            skipped.append(waiters.popleft())
                            continue
                        if row is None:
                            break
                        waiter.place.set_result(self._place_on(row, waiter.load))
                    queue.tokens -= waiters.popleft().load.tokens
                waiters.extendleft(reversed(skipped))
            if not queue:
                del self._queues[policy]

    def _choose(self, job: Job, load: Load, avoid: frozenset[str]) -> Member | None:
        row = self._table.choose(job.policy, load, avoid, job.refused_by)
        if row is not None and not load.replayed and self._has_full_share(job.policy, row):
            return None
        return row

    def _has_full_share(self, policy: str, row: Member) -> bool:
        """Return whether the member has its share, and the rest is reserved for members that still load."""
        if self._share_limit_until_s is None or time.monotonic() >= self._share_limit_until_s:
            return False
        serving, loading = self._table.serving(policy), self._table.loading(policy)
        if not loading:
            return False
        queue = self._queues.get(policy)
        tokens = sum(member.outstanding for member in serving) + (queue.tokens if queue else 0)
        return row.outstanding * (len(serving) + len(loading)) >= tokens

    def _place_on(self, row: Member, load: Load) -> Place:
        self._table.request_started(row.node, load)
        return Place(self.link(row), load)


def _any_accepts(job: Job, rows: tuple[Member, ...]) -> bool:
    return any(row.node not in job.refused_by for row in rows)
