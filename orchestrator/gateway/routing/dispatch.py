"""Move a job from member to member until it is complete.

A job whose node is lost continues on another node from the tokens that have arrived, or starts over with its seed;
both give the completion that the first node would have made. While the fleet is empty, jobs wait.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from grpo_orch.orchestrator.gateway.job import Finished, Job, RequestRefused, WeightsRefused
from grpo_orch.orchestrator.gateway.nodes.upstream import Attempt, HandoverReason, NodeFailed
from grpo_orch.orchestrator.gateway.routing.gateway_members import Members
from grpo_orch.orchestrator.gateway.routing.places import Place
from grpo_orch.policies.serving.membership import Load
from grpo_orch.policies.serving.wire import Handover

RETRY_S = 0.05  # after the second attempt in a row without a token; doubled after each further one
RETRY_MAX_S = 1.0
# The member has been marked already, or is not at fault.
_NOT_SUSPECT = frozenset(
    {HandoverReason.TERM_ENDED, HandoverReason.SILENT, HandoverReason.DRAINED, HandoverReason.REBALANCED}
)


@dataclass(slots=True)
class Ledger:
    """Counts since the gateway's start. Every token that arrives is in the end delivered or discarded.

    `saved` tokens were kept over a handover, each counted once; `replayed` tokens were recomputed as a prompt for
    it. `unreported_discards` belong to batches whose trainer disconnected; the next batch reports them.
    """

    delivered: int = 0
    discarded: int = 0
    unreported_discards: int = 0
    saved: int = 0
    replayed: int = 0
    finished: int = 0  # requests
    refused: int = 0  # requests
    handovers_by_reason: Counter[str] = field(default_factory=Counter)

    @property
    def handovers(self) -> int:
        """Number of times a job left a member unfinished."""
        return self.handovers_by_reason.total()


class Completer:
    """Completes jobs on the members.

    Args:
        members: the gateway's.
        ledger: the counts; the caller counts `delivered`.
        observe: called with each completion.
    """

    def __init__(self, members: Members, ledger: Ledger, observe: Callable[[Finished], None]) -> None:
        self._members = members
        self._ledger = ledger
        self._observe = observe

    async def complete(self, job: Job) -> Finished:
        """Complete the job, moving between members and waiting while there are none.

        Raises RequestRefused, QueueFull. Cancelling abandons the job and frees its place; the
        caller then counts its tokens as discarded.
        """
        requested_s = asyncio.get_running_loop().time()
        avoid, consecutive_failures = frozenset[str](), 0
        refused: RequestRefused | None = None
        while True:
            if refused is not None and not await self._members.places.wait_for_other_member(job):
                self._ledger.refused += 1
                raise refused
            refused = None
            place = await self._acquire_place(job, avoid)
            attempt = Attempt(job, place.link, partial(self._members.places.note_first_token, place))
            try:
                finished = await attempt.run()
            except NodeFailed as error:
                is_progress = attempt.tokens or error.reason is HandoverReason.REBALANCED
                consecutive_failures = 0 if is_progress else consecutive_failures + 1
                self._record_handover(job, attempt, error)
                avoid = frozenset({place.link.node})
            except RequestRefused as error:
                if attempt.is_continuation:  # find out whether the original request is refused as well
                    job.recovery = "exact"
                    self._start_over(job)
                    continue
                # Another node may take a longer prompt, now or once it has loaded the policy.
                is_repeated = place.link.node in job.refused_by
                job.refused_by |= {place.link.node}
                if is_repeated or isinstance(error, WeightsRefused):
                    self._ledger.refused += 1
                    raise
                refused = error
            else:
                return self._finish(finished, attempt, requested_s)
            finally:
                self._members.places.release(place)
            if consecutive_failures > 1:
                await asyncio.sleep(min(RETRY_MAX_S, RETRY_S * 2 ** (consecutive_failures - 2)))

    def restore(self, job: Job, token_ids: list[int], logprobs: list[float]) -> None:
        """Give a new job the tokens that an earlier gateway received, from which it continues if it can."""
        job.token_ids, job.logprobs = token_ids, logprobs
        if job.can_continue():
            job.first_token_at_s = asyncio.get_running_loop().time()
        else:
            self._start_over(job)

    async def _acquire_place(self, job: Job, avoid: frozenset[str]) -> Place:
        # The next member recomputes what the last one computed.
        replayed = 0 if job.first_token_at_s is None else job.prompt_tokens + len(job.token_ids)
        place = await self._members.places.acquire(job, self._load(job, replayed), avoid)
        self._ledger.replayed += replayed
        return place

    def _load(self, job: Job, replayed: int) -> Load:
        expected = self._members.expected_tokens or job.max_tokens
        output_tokens = max(len(job.token_ids), min(job.max_tokens, int(expected)))
        return Load(job.group, job.prompt_tokens + output_tokens, replayed, job.is_turn)

    def _record_handover(self, job: Job, attempt: Attempt, error: NodeFailed) -> None:
        """Count a job that left a member unfinished, and mark the member if it is at fault."""
        node = attempt.link.node
        job.last_failure = f"{node}: {error}"
        attempt_tokens = attempt.tokens  # read before starting over drops them
        self._ledger.handovers_by_reason[error.reason] += 1
        if error.reason is HandoverReason.CLOSED:  # an agent may keep announcing a dead server
            self._members.mark_unresponsive(attempt.link, str(error))
        elif error.reason not in _NOT_SUSPECT and not self._members.is_changing_policy(node, job.policy):
            self._members.suspect(attempt.link, str(error))
        if job.can_continue():
            job.saved += attempt_tokens
            self._ledger.saved += attempt_tokens
        elif job.token_ids:
            self._start_over(job)
        if attempt_tokens:
            job.handed_over.append(Handover(node, len(job.token_ids)))

    def _start_over(self, job: Job) -> None:
        lost = job.start_over()
        job.discarded += lost
        self._ledger.discarded += lost
        self._ledger.saved -= job.saved
        job.saved = 0

    def _finish(self, finished: Finished, attempt: Attempt, requested_s: float) -> Finished:
        job = finished.job
        self._members.learn_length(len(job.token_ids))
        self._ledger.finished += 1
        first_token_s = max(0.0, (job.first_token_at_s or attempt.last_event_s) - requested_s)
        finished = replace(finished, first_token_s=first_token_s, took_s=attempt.last_event_s - requested_s)
        self._observe(finished)
        return finished
