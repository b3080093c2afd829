"""What nobody takes any more, request by request: counted as open exactly while it is."""

from __future__ import annotations

import asyncio
from array import array

import pytest

from orchestrator.gateway.job import Finished, Job
from orchestrator.gateway.routing.dispatch import Completer, Ledger
from orchestrator.gateway.routing.members import Members
from orchestrator.gateway.surface.kept import Asked, Kept, job_of, key_of
from policies.serving.wire import Batch, PolicyRef

BATCH = Batch(PolicyRef("0-0", "p"), {}, [], 60.0)


class Completes(Completer):
    """Completes all jobs at once, when it is told."""

    def __init__(self) -> None:
        self.may = asyncio.Event()

    async def complete(self, job: Job) -> Finished:
        await self.may.wait()
        return Finished([], [], "stop", None, None, None, job.policy, "a", 0, 0.0, 0.0)


def asked(completer: Completer, seed: int = 0) -> Asked:
    job = job_of(BATCH, array("I", [1]), 1, seed, 4)
    return Asked(key_of(BATCH, b"{}", 1, seed), job, asyncio.ensure_future(completer.complete(job)))


@pytest.mark.parametrize("taken", [True, False])
async def test_request_that_ends_as_it_is_taken_or_given_up_is_not_open_for_ever(taken: bool) -> None:
    """Its task is done, and whoever waits for that has not heard of it yet."""
    members, completer = Members("secret"), Completes()
    kept = Kept(members, completer, Ledger())
    one = asked(completer)
    members.want(BATCH.policy, 1)
    await asyncio.sleep(0)  # it waits
    kept.keep(BATCH, [one])

    async def comes() -> None:
        await completer.may.wait()
        assert one.task.done()
        if taken:
            assert kept.take(one.key) is one
        else:
            kept._end(kept._left[0])

    coming = asyncio.ensure_future(comes())
    await asyncio.sleep(0)
    completer.may.set()
    await coming
    await asyncio.wait([one.task])
    assert members._demand._open == {}
