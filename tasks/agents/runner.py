"""Runs the agents of a generate call, each as fast as its own turns, and returns what the gateway recorded.

For `tasks.completions.rollout_source` it stands where the gateway's client does: a batch of sessions in, all of
them out. What is asked for, journalled, begun ahead and replayed is decided there.
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

from checkpoint.records.rollouts import Rollout, Session
from checkpoint.store.errors import StoreError
from policies.model.spec import OnBadReward
from policies.serving.sessions import OpenSession, Trace
from policies.serving.wire import Batch, Completion
from tasks.agents.gateway import Forwarder, Gateway, OpenedSession, SessionLost
from tasks.agents.host import Ended
from tasks.agents.processes import AgentHost, NoAgent
from tasks.completions.gateway_client import Generated, GenerationFailed, NobodyServes
from tasks.completions.rollout_source import LOOK_S, Call, RolloutSource, SessionRequest
from tasks.rewards.guard import BadReward
from tasks.storing.heartbeat import Heartbeat

log = structlog.get_logger()

SESSIONS_AT_ONCE = 256
TRIES = 3  # of a session that the gateway does not know any more
OUTPUT_CHARS = 2000  # of a failed agent's output, in the log
THREAD_ENDED = "the thread that runs agents has ended"
CLOCK_S = 0.5  # between two looks at the time of an agent that waits for the model


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one session: seconds without those in which it waits for the model, turns, and tokens of all turns."""

    time_s: float
    turns: int
    tokens: int


class AgentRunner:
    """Completes batches of SessionRequest.

    Args:
        gateway: the run's.
        host: runs the agents.
        limits: of each session.
        heartbeat: told whether the trainer waits or generates.
        may_go_on: raises Fenced or LeaveNow if the trainer is to end.
    """

    def __init__(
        self,
        gateway: Gateway,
        host: AgentHost,
        limits: Limits,
        heartbeat: Heartbeat,
        may_go_on: Callable[[], None],
    ) -> None:
        self._gateway, self._host, self._limits = gateway, host, limits
        self._heartbeat, self._may_go_on = heartbeat, may_go_on
        self._forwarder = Forwarder(gateway)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agents", daemon=True)
        self._at_once = asyncio.Semaphore(SESSIONS_AT_ONCE)
        self._has_started = False
        self._reported: set[str] = set()  # why agents have failed

    def start(self) -> None:
        """Import the agent, and listen for agents. Raises NoAgent, OSError."""
        self._host.start()
        if not self._has_started:
            self._thread.start()
            self._submit(self._forwarder.start()).result()
            self._has_started = True

    def close(self) -> None:
        """End every agent, and stop listening."""
        if self._thread.is_alive():
            self._submit(self._close()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._host.close()

    def complete(self, batch: Batch) -> Generated:
        """Return once every session of the batch has ended, with Sessions as its completions.

        Raises GenerationFailed, Fenced, LeaveNow, StoreError.
        """
        return self._complete(batch, lambda _: None, self._heartbeat.say, self._may_go_on)

    def complete_aside(
        self, batch: Batch, arrived: Callable[[Completion], None], say: Callable[[str], None]
    ) -> Generated:
        """The same in a thread. Raises GenerationFailed, Fenced, StoreError."""
        return self._complete(batch, arrived, say, self._heartbeat.check)

    def go_on(self, _batch: Batch, nobody: NobodyServes) -> None:
        """Raises `nobody`: the trainer's own model makes no sessions."""
        raise nobody

    def forget(self, sessions: Iterable[Session]) -> None:
        """Have the gateway drop sessions, some time. Nothing depends on it."""
        self._submit(self._forget([session.session for session in sessions]))

    def _complete(
        self,
        batch: Batch,
        arrived: Callable[[Completion], None],
        say: Callable[[str], None],
        check: Callable[[], None],
    ) -> Generated:
        ended: SimpleQueue[Session] = SimpleQueue()
        every: list[Session] = []
        away_s, looked_s = 0.0, (began_s := time.monotonic())
        job = self._submit(self._sessions(batch, ended))
        try:
            while True:
                is_done = bool(wait([job], LOOK_S).done)
                with contextlib.suppress(Empty):
                    while True:
                        every.append(ended.get_nowait())
                        arrived(cast(Completion, every[-1]))
                if is_done:
                    job.result()
                    break
                check()
                before_s, looked_s = looked_s, time.monotonic()
                away_s += looked_s - before_s if self._gateway.is_away else 0.0
                say("waiting" if self._gateway.is_away else "generating")
                self._check_progress(batch, began_s)
        except BaseException:
            job.cancel()
            raise
        every.sort(key=lambda session: session.index)
        # RolloutSource looks at no more of a completion than a Session has, too.
        return Generated(cast("list[Completion]", every), sum(one.discarded for one in every), away_s)

    def _check_progress(self, batch: Batch, began_s: float) -> None:
        """Raise GenerationFailed where nothing moves."""
        if not self._thread.is_alive():
            raise GenerationFailed(THREAD_ENDED)
        if (idle_s := self._gateway.idle_s(began_s)) > batch.deadline_s:
            allowed = f"`rollout.deadline_s` allows {batch.deadline_s:.0f}"
            raise GenerationFailed(f"the gateway has answered no agent for {idle_s:.0f} s; {allowed}")

    async def _sessions(self, batch: Batch, ended: SimpleQueue[Session]) -> None:
        """Run every session of a batch, at once as far as SESSIONS_AT_ONCE allows."""

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
        """Run one session, again where the gateway has lost it: what it answered before, it answers again."""
        limits = self._limits
        wanted = OpenSession(
            batch.policy, request.seed, batch.sampling, batch.recovery, limits.turns, limits.tokens
        )
        for _ in range(TRIES):
            await self._gateway.open(request.session, wanted)
            async with self._forwarder.session(request.session) as opened:
                ended, is_late = await self._agent(request, opened)
            try:
                trace = None if opened.lost.is_set() else await self._gateway.trace(request.session)
            except SessionLost:
                trace = None
            if trace is None:
                log.warning("session_lost", session=request.session)  # what it has made is made again
                continue
            if trace.policy != batch.policy.label:
                wrong = f"session {request.session} is of policy {trace.policy}, not {batch.policy.label}"
                raise GenerationFailed(wrong)
            failed = f"{ended.why} (beyond its limit: {trace.limit})" if ended.why and trace.limit else ended.why
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

    async def _agent(self, request: SessionRequest, opened: OpenedSession) -> tuple[Ended, bool]:
        """Run a session's agent; return how it ended, and whether its time was over."""
        stop = asyncio.Event()
        clock = asyncio.ensure_future(self._clock(opened, stop))
        try:
            ended = await self._host.run(
                opened.base_url, opened.key, request.row, request.seed, stop, opened.begin
            )
        except NoAgent as error:
            raise GenerationFailed(f"trainer.agent: {error}") from error
        finally:
            clock.cancel()
        is_late = stop.is_set() and not opened.lost.is_set()
        if is_late:
            why = f"it took longer than {self._limits.time_s:g} s of its own (trainer.agent.time_s)"
            ended = Ended(None, why, ended.output)
        return ended, is_late

    def _report(self, session: str, why: str, output: str) -> None:
        """Name a failure, and with the first of its kind what the agent has written."""
        more = {} if why in self._reported else {"output": output[-OUTPUT_CHARS:]}
        self._reported.add(why)
        log.warning("agent_failed", session=session, why=why, **more)

    async def _clock(self, opened: OpenedSession, stop: asyncio.Event) -> None:
        """Set `stop` once the session has used its time, or is lost."""
        while not opened.lost.is_set() and (left_s := self._limits.time_s - opened.own_s) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(opened.lost.wait(), CLOCK_S if opened.is_waiting else min(left_s, CLOCK_S))
        stop.set()

    async def _forget(self, sessions: list[str]) -> None:
        for session in sessions:
            with contextlib.suppress(StoreError):
                await self._gateway.forget(session)

    async def _close(self) -> None:
        own = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not own]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._forwarder.close()
        await self._gateway.close()

    def _submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        if not self._thread.is_alive():
            work.close()
            raise GenerationFailed(THREAD_ENDED)
        return asyncio.run_coroutine_threadsafe(work, self._loop)


def _is_cut(trace: Trace, tokens_max: int) -> bool:
    """Whether the session went beyond its turns or tokens, or its last tokens were cut there. An answer may also
    be cut by its own `max_tokens`, which is the agent's to set."""
    made = sum(sum(branch.mask) for branch in trace.branches)
    cut = any(turn.finish_reason == "length" for branch in trace.branches for turn in branch.turns)
    return bool(trace.limit) or (made >= tokens_max and cut)


class AgentSource(RolloutSource):
    """Where a step's sessions come from: the rollout journal where it has them, else agents that are run.

    Args:
        runner: is the `gateway` of RolloutSource, too.
        rule: what is done about agents that fail.
    """

    def __init__(self, runner: AgentRunner, rule: OnBadReward, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._runner, self._rule = runner, rule

    def _judge(self, rollout: Rollout, _call: Call) -> None:
        """Raise BadReward for a session whose agent failed where the rule is `fail`."""
        for session in rollout.sessions:
            if session.failed and self._rule == "fail":
                raise BadReward(f"trainer.agent: {session.failed}; session {session.session}")

    def _store_rollout(self, rollout: Rollout) -> None:
        super()._store_rollout(rollout)
        self._runner.forget(rollout.sessions)

    def complete(self, *args: Any, **kwargs: Any) -> Rollout:
        """The same. The gateway drops the sessions also of a call that was stored by a trainer that died then."""
        rollout = super().complete(*args, **kwargs)
        self._runner.forget(rollout.sessions)
        return rollout
