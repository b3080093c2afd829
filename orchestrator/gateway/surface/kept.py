"""Requests whose trainer has gone, kept for the next trainer, which makes the same requests.

A gateway ends with its trainer. It leaves its requests in a file of the machine, and the next gateway continues
them. The tokens so far are in the file, so a node computes only a prefill again.
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

from orchestrator.gateway.job import Finished, Job
from orchestrator.gateway.routing.dispatch import Completer, Ledger
from orchestrator.gateway.routing.members import Members
from policies.model.vocabulary import PolicyVersion
from policies.serving.wire import Batch, HandOver, labelled_version

log = structlog.get_logger()

CHUNK_REQUESTS = 100  # requests that begin, or end, in one round of the event loop
# A trainer that is started again loads its model and replays what is stored before it asks.
ORPHAN_TTL_S = 1800.0
# One that asks for a newer policy may ask for an older one beside it, at the same moment.
SUPERSEDED_TTL_S = 30.0


@dataclass(slots=True, eq=False)
class BatchRequest:
    """One request under way. `key` is what it asks for."""

    key: Hashable
    job: Job
    task: asyncio.Future[Finished]
    delivered: bool = False  # all of it, to some asker


def begin(completer: Completer, key: Hashable, job: Job) -> BatchRequest:
    """Have a job completed. What it fails with is told to its asker, if there is one by then."""
    task = asyncio.ensure_future(completer.complete(job))
    task.add_done_callback(_hear)
    return BatchRequest(key, job, task)


def _hear(task: asyncio.Future[Finished]) -> None:
    if not task.cancelled():
        task.exception()


def key_of(batch: Batch, sampling: bytes, group: int, seed: int) -> Hashable:
    """What a request asks for; `sampling` is the batch's, encoded, and `group` tells its prompt from others."""
    return batch.policy.label, sampling, batch.recovery, group, seed


def group_of(prompt: array[int]) -> int:
    """What all requests of a prompt have in common, in this process."""
    return hash(prompt.tobytes())


def job_of(batch: Batch, prompt: array[int], group: int, seed: int, prompt_size: int) -> Job:
    """The job of a batch's request; as Job has it."""
    return Job(
        body={**batch.sampling, "prompt": prompt, "seed": seed},
        policy=batch.policy.label,
        group=group,
        prompt_tokens=len(prompt),
        recovery=batch.recovery,
        prompt_token_ids=prompt,
        is_admitted=True,
        prompt_size=prompt_size,
    )


@dataclass(frozen=True, slots=True)
class _SavedRequest:
    """A request as one gateway leaves it to the next. Without a finish reason it is under way."""

    batch: Batch  # but for its requests
    prompt_token_ids: list[int]
    seed: int
    token_ids: list[int]
    logprobs: list[float]
    handed_over: list[HandOver]
    finish_reason: str = ""
    node: str = ""
    delivered: bool = False


@dataclass(slots=True, eq=False)
class _OrphanedBatch:
    """What a trainer left of one batch."""

    batch: Batch
    requests: dict[Hashable, BatchRequest]
    open: set[BatchRequest]  # those that are counted: a task is done a little before its callbacks are called
    ends: asyncio.TimerHandle | None = None


class OrphanedRequests:
    """The requests of batches that are over, or whose trainer went away.

    Those under way continue. Finished ones stay too: a trainer may die before it has stored what it was given. A
    trainer that makes the same request takes it over.

    What nobody takes over is dropped after ORPHAN_TTL_S, or SUPERSEDED_TTL_S after a newer policy is requested. It is dropped at
    once when another timeline is requested, or other weights of the same version.
    """

    def __init__(self, members: Members, completer: Completer, ledger: Ledger) -> None:
        self._members, self._completer, self._ledger = members, completer, ledger
        self._batches: list[_OrphanedBatch] = []
        self._ending: set[asyncio.Task[None]] = set()

    def keep(self, batch: Batch, requests: list[BatchRequest]) -> None:
        """Go on with these, which are counted as open requests of the policy where they are not done."""
        left = _OrphanedBatch(
            batch, {one.key: one for one in requests}, {one for one in requests if not one.task.done()}
        )
        for one in left.open:
            one.task.add_done_callback(partial(self._done, left, one))
        self._batches.append(left)
        self._end_after(left, ORPHAN_TTL_S)

    def take(self, key: Hashable) -> BatchRequest | None:
        """Hand over a request; its new asker counts it."""
        for left in self._batches:
            if (found := left.requests.pop(key, None)) is not None:
                self._finish(left, {found})
                if found.task.done() and found.task.exception() is not None:
                    return None  # whatever it was, the answer of today counts
                return found
        return None

    def expire_superseded(self, policy: str) -> None:
        """A policy is asked for: what is left of others may be over."""
        asked = labelled_version(policy)
        for left in list(self._batches):
            label = left.batch.policy.label
            version = labelled_version(label)
            if not left.requests:
                self._forget(left)
            elif version.timeline != asked.timeline or (version == asked and label != policy):
                self._end_after(left, 0.0)
            elif version < asked:
                self._end_after(left, SUPERSEDED_TTL_S)

    def save(self, path: Path) -> None:
        """Write down all there is, for the gateway that comes next. Nothing but a warning where that fails."""
        saved = [one for left in self._batches for one in _saved(left)]
        try:
            path.write_bytes(msgspec.msgpack.encode(saved))
        except OSError as error:
            log.warning("requests_save_failed", error=str(error), requests=len(saved))
            path.unlink(missing_ok=True)

    def load(self, path: Path, timeline: int) -> None:
        """Go on with what a gateway before this one has left, on a timeline; once."""
        try:
            age_s, data = time.time() - path.stat().st_mtime, path.read_bytes()
            path.unlink()
            saved = msgspec.msgpack.decode(data, type=list[_SavedRequest]) if age_s < ORPHAN_TTL_S else []
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("requests_load_failed", error=str(error))
            return
        batches: dict[bytes, list[_SavedRequest]] = {}
        for one in sorted(saved, key=_version):  # the newest is wanted last
            if _version(one).timeline == timeline:
                batches.setdefault(msgspec.json.encode(one.batch), []).append(one)
        for of_batch in batches.values():
            batch, asked = of_batch[0].batch, [self._begin(one) for one in of_batch]
            running = sum(not one.task.done() for one in asked)
            self._members.want(batch.policy, running, batch.recovery)
            self.keep(batch, asked)
            tokens = sum(len(one.job.token_ids) for one in asked)
            log.info("batch_resumed", policy=batch.policy.label, tokens=tokens, running=running)

    def _begin(self, one: _SavedRequest) -> BatchRequest:
        prompt = array("I", one.prompt_token_ids)
        group = group_of(prompt)
        job = job_of(one.batch, prompt, group, one.seed, prompt.itemsize * len(prompt))
        job.token_ids, job.logprobs, job.handed_over = one.token_ids, one.logprobs, one.handed_over
        key = key_of(one.batch, msgspec.json.encode(one.batch.sampling), group, one.seed)
        loop = asyncio.get_running_loop()
        if one.finish_reason:
            task: asyncio.Future[Finished] = loop.create_future()
            task.set_result(_finished(job, one))
            return BatchRequest(key, job, task, one.delivered)
        if job.can_continue():
            job.first_token_at_s = loop.time()
        else:
            job.discarded = job.start_over()
            self._ledger.discarded += job.discarded
        return begin(self._completer, key, job)

    def _end_after(self, left: _OrphanedBatch, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        at_s = loop.time() + seconds
        if left.ends is not None:
            at_s = min(at_s, left.ends.when())
            left.ends.cancel()
        left.ends = loop.call_at(at_s, self._end, left)

    def _forget(self, left: _OrphanedBatch) -> None:
        if left.ends is not None:
            left.ends.cancel()
        self._batches.remove(left)

    def _end(self, left: _OrphanedBatch) -> None:
        """Nobody came: what was made is told as lost by the next batch."""
        requests = list(left.requests.values())
        left.requests.clear()
        self._forget(left)
        tokens = sum(len(one.job.token_ids) for one in requests if not one.delivered)
        self._ledger.discarded += tokens
        self._ledger.unreported_discards += tokens
        if tokens:
            log.warning("batch_expired", policy=left.batch.policy.label, tokens=tokens)
        self._finish(left, set(requests))
        ending = asyncio.ensure_future(_end_all(requests))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def _done(self, left: _OrphanedBatch, asked: BatchRequest, _: asyncio.Future[Finished]) -> None:
        self._finish(left, {asked})

    def _finish(self, left: _OrphanedBatch, requests: set[BatchRequest]) -> None:
        """These are done, or somebody else's: they are counted no more."""
        if counted := left.open & requests:
            left.open -= counted
            self._members.finish(left.batch.policy.label, len(counted))


async def cancel(requests: list[BatchRequest]) -> None:
    """End those that are under way, some at a time: first those that wait, or they would get what becomes free."""
    left = [one.task for one in reversed(requests) if not one.task.done()]
    for first in range(0, len(left), CHUNK_REQUESTS):
        for task in left[first : first + CHUNK_REQUESTS]:
            task.cancel()
        await asyncio.sleep(0)
    for task in left:  # all at once would be a long piece of work by itself
        if not task.done():
            await asyncio.wait([task])


async def _end_all(requests: list[BatchRequest]) -> None:
    await cancel(requests)
    for one in requests:  # the frames of cancelled tasks hold each other, and garbage is looked for rarely
        del one.job.body["prompt"][:]


def _saved(left: _OrphanedBatch) -> Iterator[_SavedRequest]:
    batch = replace(left.batch, requests=[])
    for one in left.requests.values():
        job, failed = one.job, one.task.done() and (one.task.cancelled() or one.task.exception() is not None)
        if not failed:
            made = _SavedRequest(
                batch,
                list(job.body["prompt"]),
                job.body["seed"],
                job.token_ids,
                job.logprobs,
                job.handed_over,
                delivered=one.delivered,
            )
            got = one.task.result() if one.task.done() else None
            yield made if got is None else replace(made, finish_reason=got.finish_reason, node=got.node)


def _version(one: _SavedRequest) -> PolicyVersion:
    return labelled_version(one.batch.policy.label)


def _finished(job: Job, one: _SavedRequest) -> Finished:
    return Finished(
        token_ids=job.token_ids,
        logprobs=job.logprobs,
        finish_reason=one.finish_reason,
        stop_reason=None,
        text=None,
        prompt_token_ids=job.prompt_token_ids,
        policy=job.policy,
        node=one.node,
        handovers=0,
        first_token_s=0.0,
        took_s=0.0,
    )
