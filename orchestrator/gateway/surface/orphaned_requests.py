"""Running requests whose trainer has disconnected, kept for the next trainer, which makes the same requests.

A gateway stops with its trainer. It saves its requests in a file on the machine, and the next gateway continues
them. The file has the tokens so far, so a node recomputes only a prefill.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import structlog

from grpo_orch.orchestrator.gateway.job import Finished, Job
from grpo_orch.orchestrator.gateway.routing.dispatch import Completer, Ledger
from grpo_orch.orchestrator.gateway.routing.gateway_members import Members
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.wire import Batch, Handover, labelled_version

log = structlog.get_logger()

CHUNK_REQUESTS = 100  # requests started or cancelled in one round of the event loop
# A restarted trainer loads its model and replays stored steps before it makes requests.
ORPHAN_TTL_S = 1800.0
# A trainer that requests a newer policy may request an older one at the same time.
SUPERSEDED_TTL_S = 30.0


@dataclass(slots=True, eq=False)
class BatchRequest:
    """One request of a batch. Requests for the same completion have the same `key`."""

    key: Hashable
    job: Job
    task: asyncio.Future[Finished]
    delivered: bool = False  # its whole completion, to some trainer


def key_of(batch: Batch, sampling: bytes, group: int, seed: int) -> Hashable:
    """Return the identity of a request; `sampling` is the batch's, encoded, and `group` identifies the prompt."""
    return batch.policy.label, sampling, batch.recovery, group, seed


def group_of(prompt: array[int]) -> int:
    """Return the group of all requests of a prompt, valid in this process."""
    return hash(prompt.tobytes())


def job_of(batch: Batch, prompt: array[int], group: int, seed: int, prompt_size: int) -> Job:
    """Return the job of a batch's request."""
    return Job(
        body={**batch.sampling, "prompt": prompt, "seed": seed},
        policy=batch.policy.label,
        group=group,
        recovery=batch.recovery,
        is_admitted=True,
        prompt_size=prompt_size,
    )


@dataclass(frozen=True, slots=True)
class _SavedRequest:
    """A request that one gateway saves for the next. Without a finish reason it is still running."""

    prompt_token_ids: list[int]
    seed: int
    token_ids: list[int]
    logprobs: list[float]
    handed_over: list[Handover]
    finish_reason: str = ""
    node: str = ""
    delivered: bool = False


@dataclass(frozen=True, slots=True)
class _SavedBatch:
    batch: Batch  # without its requests
    requests: list[_SavedRequest]

    @property
    def version(self) -> PolicyVersion:
        return labelled_version(self.batch.policy.label)


@dataclass(slots=True, eq=False)
class OrphanedBatch:
    """The requests that a trainer left of one batch."""

    batch: Batch
    requests: dict[Hashable, BatchRequest]
    timer: asyncio.TimerHandle | None = None


class OrphanedRequests:
    """The requests of batches that are over, or whose trainer has disconnected.

    Running requests continue. Finished ones stay too, since a trainer may die before it has stored their lines. A
    trainer that makes the same request takes it over.

    Requests are dropped after `ttl_s`, or `superseded_ttl_s` after a newer policy is requested; and immediately
    when another timeline is requested, or other weights of the same version.
    """

    def __init__(self, members: Members, completer: Completer, ledger: Ledger) -> None:
        self._members, self._completer, self._ledger = members, completer, ledger
        self.ttl_s, self.superseded_ttl_s = ORPHAN_TTL_S, SUPERSEDED_TTL_S
        self.batches: list[OrphanedBatch] = []
        self._ending: set[asyncio.Task[None]] = set()

    def begin(self, batch: Batch, key: Hashable, job: Job) -> BatchRequest:
        """Start completing a job of a batch, counted in its policy's demand while it runs.

        Its error goes to its trainer, if it has one by then.
        """
        self._members.want(batch.policy, 1, batch.recovery)
        task = asyncio.ensure_future(self._completer.complete(job))
        task.add_done_callback(partial(self._ended, job.policy))
        return BatchRequest(key, job, task)

    def _ended(self, policy: str, task: asyncio.Future[Finished]) -> None:
        if not task.cancelled():
            task.exception()  # keeps asyncio from logging that of an orphaned request
        self._members.finish(policy, 1)

    def keep(self, batch: Batch, requests: list[BatchRequest]) -> None:
        """Keep these requests, of which some still run."""
        orphaned = OrphanedBatch(batch, {request.key: request for request in requests})
        self.batches.append(orphaned)
        self._end_after(orphaned, self.ttl_s)

    def take(self, key: Hashable) -> BatchRequest | None:
        """Remove and return a request."""
        for orphaned in self.batches:
            if (request := orphaned.requests.pop(key, None)) is not None:
                if request.task.done() and request.task.exception() is not None:
                    return None  # try again instead of returning an old error
                return request
        return None

    def expire_superseded(self, policy: str) -> None:
        """Shorten the time to live of requests that the newly requested `policy` supersedes."""
        requested = labelled_version(policy)
        for orphaned in list(self.batches):
            label = orphaned.batch.policy.label
            version = labelled_version(label)
            if not orphaned.requests:
                self._forget(orphaned)
            elif version.timeline != requested.timeline or (version == requested and label != policy):
                self._end_after(orphaned, 0.0)
            elif version < requested:
                self._end_after(orphaned, self.superseded_ttl_s)

    def save(self, path: Path) -> None:
        """Save all requests for the next gateway. Only logs a warning if that fails."""
        saved = [_SavedBatch(replace(one.batch, requests=[]), list(_saved(one))) for one in self.batches]
        try:
            path.write_bytes(msgspec.msgpack.encode(saved))
        except OSError as error:
            log.warning("requests_save_failed", error=str(error))
            path.unlink(missing_ok=True)

    def load(self, path: Path, timeline: int) -> None:
        """Resume the requests that the previous gateway saved, those of `timeline`, and delete the file."""
        try:
            age_s, data = time.time() - path.stat().st_mtime, path.read_bytes()
            path.unlink()
            saved = msgspec.msgpack.decode(data, type=list[_SavedBatch]) if age_s < self.ttl_s else []
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("requests_load_failed", error=str(error))
            return
        for saved_batch in sorted(saved, key=lambda one: one.version):  # the newest policy must be wanted last
            batch = saved_batch.batch
            if saved_batch.version.timeline != timeline or not saved_batch.requests:
                continue
            requests = [self._resume(batch, request) for request in saved_batch.requests]
            running = sum(not request.task.done() for request in requests)
            self._members.want(batch.policy, 0, batch.recovery)
            self.keep(batch, requests)
            tokens = sum(len(request.job.token_ids) for request in requests)
            log.info("batch_resumed", policy=batch.policy.label, tokens=tokens, running=running)

    def _resume(self, batch: Batch, saved: _SavedRequest) -> BatchRequest:
        prompt = array("I", saved.prompt_token_ids)
        group = group_of(prompt)
        job = job_of(batch, prompt, group, saved.seed, prompt.itemsize * len(prompt))
        job.handed_over = saved.handed_over
        key = key_of(batch, msgspec.json.encode(batch.sampling), group, saved.seed)
        if saved.finish_reason:
            job.token_ids, job.logprobs = saved.token_ids, saved.logprobs
            task: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
            task.set_result(Finished(job, saved.finish_reason, None, saved.node))
            return BatchRequest(key, job, task, saved.delivered)
        self._completer.restore(job, saved.token_ids, saved.logprobs)
        return self.begin(batch, key, job)

    def _end_after(self, orphaned: OrphanedBatch, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        at_s = loop.time() + seconds
        if orphaned.timer is not None:
            at_s = min(at_s, orphaned.timer.when())
            orphaned.timer.cancel()
        orphaned.timer = loop.call_at(at_s, self.end, orphaned)

    def _forget(self, orphaned: OrphanedBatch) -> None:
        if orphaned.timer is not None:
            orphaned.timer.cancel()
        self.batches.remove(orphaned)

    def end(self, orphaned: OrphanedBatch) -> None:
        """Drop the requests that no trainer took over. The next batch reports their tokens as discarded."""
        requests = list(orphaned.requests.values())
        orphaned.requests.clear()
        self._forget(orphaned)
        tokens = sum(len(request.job.token_ids) for request in requests if not request.delivered)
        self._ledger.discarded += tokens
        self._ledger.unreported_discards += tokens
        if tokens:
            log.warning("batch_expired", policy=orphaned.batch.policy.label, tokens=tokens)
        ending = asyncio.ensure_future(_cancel_and_empty(requests))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


async def cancel(requests: list[BatchRequest]) -> None:
    """Cancel the running requests, CHUNK_REQUESTS at a time.

    The last ones first: they wait, and would otherwise get the places that become free.
    """
    tasks = [request.task for request in reversed(requests) if not request.task.done()]
    for start in range(0, len(tasks), CHUNK_REQUESTS):
        for task in tasks[start : start + CHUNK_REQUESTS]:
            task.cancel()
        await asyncio.sleep(0)
    for task in tasks:  # waiting for all in one call would block the event loop
        if not task.done():
            await asyncio.wait([task])


async def _cancel_and_empty(requests: list[BatchRequest]) -> None:
    await cancel(requests)
    for request in requests:  # frames of cancelled tasks form cycles, and garbage collection runs rarely
        del request.job.body["prompt"][:]


def _saved(orphaned: OrphanedBatch) -> Iterator[_SavedRequest]:
    for request in orphaned.requests.values():
        job, task = request.job, request.task
        if task.done() and (task.cancelled() or task.exception() is not None):
            continue
        saved = _SavedRequest(
            list(job.prompt),
            job.body["seed"],
            job.token_ids,
            job.logprobs,
            job.handed_over,
            delivered=request.delivered,
        )
        got = task.result() if task.done() else None
        yield saved if got is None else replace(saved, finish_reason=got.finish_reason, node=got.node)
