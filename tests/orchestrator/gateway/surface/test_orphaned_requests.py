"""What nobody takes any more, request by request: counted as open exactly while it is."""

from __future__ import annotations

import asyncio
import gc
from array import array
from dataclasses import replace
from pathlib import Path

import msgspec

from grpo_orch.orchestrator.gateway.job import Finished, Job, RequestRefused
from grpo_orch.orchestrator.gateway.routing.dispatch import Completer, Ledger
from grpo_orch.orchestrator.gateway.routing.gateway_members import Members
from grpo_orch.orchestrator.gateway.surface.admission import Prompt
from grpo_orch.orchestrator.gateway.surface.batch import BatchRun
from grpo_orch.orchestrator.gateway.surface.orphaned_requests import (
    BatchRequest,
    OrphanedRequests,
    group_of,
    job_of,
    key_of,
)
from grpo_orch.policies.serving.wire import Batch, PolicyRef, Sample

BATCH = Batch(PolicyRef("0-0", "p"), {}, [], 60.0)


class Completes(Completer):
    """Completes all jobs at once, when it is told."""

    def __init__(self) -> None:
        self.may = asyncio.Event()

    async def complete(self, job: Job) -> Finished:
        await self.may.wait()
        return Finished(job, "stop", None, "a")


def asked(kept: OrphanedRequests, batch: Batch = BATCH) -> BatchRequest:
    prompt = array("I", [1])
    job = job_of(batch, prompt, group_of(prompt), 0, 4)
    key = key_of(batch, msgspec.json.encode(batch.sampling), group_of(prompt), 0)
    return kept.begin(batch, key, job)


async def test_twice_saved_requests_keep_sampling_and_newest_policy(
    tmp_path: Path,
) -> None:
    """A step and an evaluation are of one policy, and the second gateway ends before anybody asks it."""
    file, completer = tmp_path / "left", Completes()
    newer = replace(BATCH, policy=PolicyRef("0-1", "p"))
    batches = [newer, replace(BATCH, sampling={"max_tokens": 8}), replace(BATCH, sampling={"max_tokens": 9})]
    completer.may.set()
    kept = OrphanedRequests(Members("secret"), completer, Ledger())
    for batch in batches:
        one = asked(kept, batch)
        await one.task
        kept.keep(batch, [one])
    for _ in range(2):
        kept.save(file)
        kept = OrphanedRequests(members := Members("secret"), completer, Ledger())
        kept.load(file, 0)
        assert members.wanted == newer.policy
    for batch in batches:
        found = kept.take(asked(kept, batch).key)
        assert found is not None
        assert found.job.body.get("max_tokens") == batch.sampling.get("max_tokens")


class Fails(Completes):
    async def complete(self, job: Job) -> Finished:
        await super().complete(job)
        raise RequestRefused("too long")


async def test_failure_of_abandoned_request_is_not_logged_as_fault() -> None:
    said: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: said.append(told["message"]))
    members, completer = Members("secret"), Fails()
    kept = OrphanedRequests(members, completer, Ledger())
    prompt = Prompt(array("I", [1]), [Sample(0, 0)])
    chunks = BatchRun(BATCH, [prompt], members, Ledger(), kept).chunks()
    await anext(chunks)

    async def leaves() -> None:
        await completer.may.wait()
        await chunks.aclose()

    leaving = asyncio.ensure_future(leaves())
    await asyncio.sleep(0)
    completer.may.set()
    await leaving
    kept.expire_superseded("1-0")
    while kept.batches:
        await asyncio.sleep(0)
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
    gc.collect()
    assert said == []
    assert members.demand.open_policies == {}
