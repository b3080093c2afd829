"""Run the agents of a generate call concurrently and return the sessions that the gateway recorded.

It replaces the gateway client in `tasks.completions.rollout_source`: it takes a batch of sessions and returns all
of them. That module decides which sessions are requested, stored, started ahead and replayed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, cast

import structlog

from grpo_orch.checkpoint.records.rollouts import Rollout, Session
from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.policies.model.spec import OnBadReward
from grpo_orch.policies.serving.wire import Batch, Completion, OpenSession, Trace
from grpo_orch.tasks.agents.host import AgentResult
from grpo_orch.tasks.agents.processes import AgentHost, AgentStartError
from grpo_orch.tasks.agents.session_client import Forwarder, OpenedSession, SessionClient, SessionLost
from grpo_orch.tasks.completions.gateway_client import Generated, GenerationFailed
from grpo_orch.tasks.completions.rollout_source import CHECK_INTERVAL_S, Call, RolloutSource, SessionRequest
from grpo_orch.tasks.rewards.user_calls import BadReward
from grpo_orch.tasks.storing.heartbeat import Heartbeat

log = structlog.get_logger()

SESSIONS_AT_ONCE = 256
TRIES = 3  # attempts at a session that the gateway loses
OUTPUT_CHARS = 2000  # logged from the end of a failed agent's output
THREAD_ENDED = "the thread that runs agents has ended"
CLOCK_S = 0.5  # interval between checks of the time an agent has used


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one session: seconds spent outside the model, turns, and tokens of all turns."""

    time_s: float
    turns: int
    tokens: int


class AgentRunner:
    """Completes batches of SessionRequest.

    Args:
        gateway: client of the run's gateway.
        host: runs the agents.
        limits: limits of each session.
        heartbeat: reports whether the trainer waits or generates.
        check_stop: raises Fenced or LeaveNow if the trainer must exit.

    Attributes:
        loop: the event loop of its thread.
    """

    def __init__(
        self,
        gateway: SessionClient,
        host: AgentHost,
        limits: Limits,
        heartbeat: Heartbeat,
        check_stop: Callable[[], None],
    ) -> None:
        self._gateway, self._host, self._limits = gateway, host, limits
        self._heartbeat, self._check_stop = heartbeat, check_stop
        self._forwarder = Forwarder(gateway)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="agents", daemon=True)
        self._at_once = asyncio.Semaphore(SESSIONS_AT_ONCE)
        self._has_started = False
        self._reported: set[str] = set()  # failures whose output has been logged

    def start(self) -> None:
        """Import the agent and listen for its requests. Raises AgentStartError, OSError."""
        self._host.start()
        if not self._has_started:
            self._thread.start()
            self._submit(self._forwarder.start()).result()
            self._has_started = True

    def close(self) -> None:
        """Stop every agent and the forwarder."""
        if self._thread.is_alive():
            self._submit(self._close()).result()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
        self._host.close()

    def complete(self, batch: Batch) -> Generated:
        """Run every session of the batch and return Sessions as its completions.

        Raises GenerationFailed, Fenced, LeaveNow, StoreError.
        """
        return self._complete(batch, lambda _: None, self._heartbeat.update, self._check_stop)

    def complete_in_background(
        self, batch: Batch, on_completion: Callable[[Completion], None], report_activity: Callable[[str], None]
    ) -> Generated:
        """Like `complete`, for calls from another thread. Raises GenerationFailed, Fenced, StoreError."""
        return self._complete(batch, on_completion, report_activity, self._heartbeat.check)

    def forget(self, sessions: Iterable[Session]) -> None:
        """Have the gateway drop sessions, in the background and without a guarantee."""
        self._submit(self._forget([session.session for session in sessions]))

    def _complete(
        self,
        batch: Batch,
        arrived: Callable[[Completion], None],
        say: Callable[[str], None],
        check: Callable[[], None],
    ) -> Generated:
        ended: SimpleQueue[Session] = SimpleQueue()
        sessions: list[Session] = []
        began_s = time.monotonic()
        away_s, checked_s = 0.0, began_s
        job = self._submit(self._sessions(batch, ended))
        try:
            while True:
                is_done = bool(wait([job], CHECK_INTERVAL_S).done)
                with contextlib.suppress(Empty):
                    while True:
                        sessions.append(ended.get_nowait())
                        arrived(cast(Completion, sessions[-1]))
                if is_done:
                    job.result()
                    break
                check()
                previous_s, checked_s = checked_s, time.monotonic()
                away_s += checked_s - previous_s if self._gateway.is_away else 0.0
                say("waiting" if self._gateway.is_away else "generating")
                self._check_progress(batch, began_s)
        except BaseException:
            job.cancel()
            raise
        sessions.sort(key=lambda session: session.index)
        # RolloutSource reads only those fields of a completion that a Session also has.
        discarded = sum(session.discarded for session in sessions)
        return Generated(cast("list[Completion]", sessions), discarded, away_s)

    def _check_progress(self, batch: Batch, began_s: float) -> None:
        """Raise GenerationFailed if the thread has ended or the gateway has not responded within the deadline."""
        if not self._thread.is_alive():
            raise GenerationFailed(THREAD_ENDED)
        if (idle_s := self._gateway.idle_s(began_s)) > batch.deadline_s:
            allowed = f"`rollout.deadline_s` allows {batch.deadline_s:.0f}"
            raise GenerationFailed(f"the gateway has answered no agent for {idle_s:.0f} s; {allowed}")

    async def _sessions(self, batch: Batch, ended: SimpleQueue[Session]) -> None:
        """Run all sessions of a batch, up to SESSIONS_AT_ONCE concurrently."""

        async def run(request: SessionRequest) -> None:
            async with self._at_once:
                ended.put(await self._session(batch, request))

        tasks = [asyncio.ensure_future(run(cast(SessionRequest, request))) for request in batch.requests]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _session(self, batch: Batch, request: SessionRequest) -> Session:
        """Run one session; rerun it if the gateway lost it. The gateway generates the same responses again."""
        limits = self._limits
        settings = OpenSession(
            batch.policy, request.seed, batch.sampling, batch.recovery, limits.turns, limits.tokens
        )
        for _ in range(TRIES):
            opening = await self._gateway.open(request.session, settings)
            async with self._forwarder.session(request.session, opening) as opened:
                ended, is_late = await self._run_agent(request, opened)
            try:
                trace = None if opened.lost.is_set() else await self._gateway.trace(request.session, opening)
            except SessionLost:
                trace = None
            if trace is None:
                log.warning("session_lost", session=request.session)  # its turns are generated again
                continue
            if trace.policy != batch.policy.label:
                wrong = f"session {request.session} is of policy {trace.policy}, not {batch.policy.label}"
                raise GenerationFailed(wrong)
            failed = (
                f"{ended.reason} (beyond its limit: {trace.limit})"
                if ended.reason and trace.limit
                else ended.reason
            )
            if failed:
                self._report(request.session, failed, ended.output)
            return Session(
                request.index,
                request.session,
                trace.policy,
                trace.branches,
                ended.reward,
                failed,
                trace.discarded,
                is_late or _is_cut(trace, limits.tokens),
            )
        failed = f"the gateway has lost the session {TRIES} times"
        self._report(request.session, failed, ended.output)
        return Session(request.index, request.session, batch.policy.label, [], None, failed)

    async def _run_agent(self, request: SessionRequest, opened: OpenedSession) -> tuple[AgentResult, bool]:
        """Run a session's agent; return how it ended and whether it exceeded its time limit."""
        stop = asyncio.Event()
        clock = asyncio.ensure_future(self._stop_when_over(opened, stop))
        try:
            ended = await self._host.run(
                opened.base_url, opened.key, request.row, request.seed, stop, opened.begin
            )
        except AgentStartError as error:
            raise GenerationFailed(f"trainer.agent: {error}") from error
        finally:
            clock.cancel()
        is_late = stop.is_set() and not opened.lost.is_set()
        if is_late:
            why = f"it took longer than {self._limits.time_s:g} s of its own (trainer.agent.time_s)"
            ended = AgentResult(None, why, ended.output)
        return ended, is_late

    def _report(self, session: str, why: str, output: str) -> None:
        """Log a failure, with the agent's output for the first of its kind."""
        more = {} if why in self._reported else {"output": output[-OUTPUT_CHARS:]}
        self._reported.add(why)
        log.warning("agent_failed", session=session, reason=why, **more)

    async def _stop_when_over(self, opened: OpenedSession, stop: asyncio.Event) -> None:
        """Set `stop` once the session has used up its time or is lost."""
        while not opened.lost.is_set() and (left_s := self._limits.time_s - opened.agent_time_s) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(opened.lost.wait(), CLOCK_S if opened.is_waiting else min(left_s, CLOCK_S))
        stop.set()

    async def _forget(self, sessions: list[str]) -> None:
        for session in sessions:
            with contextlib.suppress(StoreError):
                await self._gateway.forget(session)

    async def _close(self) -> None:
        current = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._forwarder.close()
        await self._gateway.close()

    def _submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        if not self._thread.is_alive():
            work.close()
            raise GenerationFailed(THREAD_ENDED)
        return asyncio.run_coroutine_threadsafe(work, self.loop)


def _is_cut(trace: Trace, tokens_max: int) -> bool:
    """Return whether the session exceeded its turns or tokens, or its last turn was cut at the token limit.

    A turn cut by its own `max_tokens`, which the agent sets, does not count.
    """
    tokens = sum(sum(branch.mask) for branch in trace.branches)
    has_cut_turn = any(turn.finish_reason == "length" for branch in trace.branches for turn in branch.turns)
    return bool(trace.limit) or (tokens >= tokens_max and has_cut_turn)


class AgentSource(RolloutSource):
    """Supplies a step's sessions: from the store if it has them, else by running agents.

    Args:
        runner: also serves as the `gateway` of RolloutSource.
        rule: how to handle failed agents.
    """

    def __init__(self, runner: AgentRunner, rule: OnBadReward, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._runner, self._rule = runner, rule

    def _judge(self, rollout: Rollout, _call: Call) -> None:
        """Raise BadReward for a session whose agent failed if the rule is `fail`."""
        for session in rollout.sessions:
            if session.failed and self._rule == "fail":
                raise BadReward(f"trainer.agent: {session.failed}; session {session.session}")

    def complete(self, *args: Any, **kwargs: Any) -> Rollout:
        """Complete a call, then have the gateway drop its sessions.

        This covers calls that were stored by a trainer which died before dropping them.
        """
        rollout = super().complete(*args, **kwargs)
        self._runner.forget(rollout.sessions)
        return rollout
