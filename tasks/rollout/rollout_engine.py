"""Run one engine of a rollout machine: restart vLLM when it ends, and announce the engine to the gateway.

Engines of a machine are restarted and given up independently of each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import structlog

from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.serving.fitness import STARTS_MAX, UNFIT_RETRY_S, Fitness, was_worth_its_start
from grpo_orch.policies.serving.wire import HOLD_S, Announce, EngineStats, PolicyRef, PolicyStages
from grpo_orch.tasks.machine.node_env import NodeEnv
from grpo_orch.tasks.rollout.engine_files import EngineFiles
from grpo_orch.tasks.rollout.gateway_link import GatewayLink, GatewayUnreachable
from grpo_orch.tasks.rollout.policy_folders import PolicyFolders
from grpo_orch.tasks.rollout.vllm import server as vllm_server
from grpo_orch.tasks.rollout.vllm.server import Server, ServerFailed, Unfit

log = structlog.get_logger()

RETRY_S = 0.5  # before the next request to the gateway
REASON_CHARS_MAX = 500  # of an announced error
PROCESS_STARTED_S = time.monotonic()  # not counting Python's own start


@dataclass(frozen=True, slots=True)
class Timing:
    """Intervals and limits of a rollout machine's agent.

    Attributes:
        restart_wait_s: before vLLM is restarted; doubled for each consecutive failed start.
        poll_s: between two looks at vLLM's statistics.
        stage_s: between two reports of the machine's stage.
        retry_s: before the store, or an engine that failed with a policy, is tried again.
        again_s: before an engine that is unfit for a policy tries it again.
        late_s: engines read the same file at the same time; one that loads this much longer than the others is
            ended, since it delays their next policy.
    """

    restart_wait_s: float = 0.5
    poll_s: float = 1.0
    stage_s: float = HOLD_S
    retry_s: float = 0.5
    again_s: float = UNFIT_RETRY_S
    late_s: float = 60.0


TIMING = Timing()


class EngineAbandoned(Exception):
    """vLLM does not start on this machine, or is unfit for the run."""


@dataclass(frozen=True, slots=True)
class EngineSlot:
    """An engine's share of its machine. `env` is the machine's environment with the member's name as `node`."""

    env: NodeEnv
    gpus: str = ""  # in the format of VISIBLE; empty for all
    engines: int = 1  # of the machine


class RolloutEngine:
    """Keeps vLLM running in one slot of a machine.

    Args:
        on_wanted: called with the policy that the gateway wants.
        on_server: called when a new server is up.
        timing: the machine's.

    Attributes:
        may_be_bare: vLLM may start without weights.
    """

    def __init__(
        self,
        slot: EngineSlot,
        http: aiohttp.ClientSession,
        gateway: GatewayLink,
        files: EngineFiles,
        folders: PolicyFolders,
        on_wanted: Callable[[PolicyRef | None], None],
        on_server: Callable[[], None],
        timing: Timing = TIMING,
    ) -> None:
        self._slot = slot
        self._http = http
        self._gateway = gateway
        self._files = files
        self._folders = folders
        self._on_wanted = on_wanted
        self._on_server = on_server
        self._timing = timing
        self.server: Server | None = None
        self.policy: str | None = None  # held by the server
        self.is_given_up = False
        self._had_policy = False  # the server was given a policy
        self._worked_s = 0.0  # time in which the server generated tokens
        self.may_be_bare = True
        self.is_bare = False  # the server started without weights and still has none
        self._fitness = Fitness()
        self._failed_at_s = -math.inf
        self._is_leaving = False
        self._stats: EngineStats | None = None
        self._stages = PolicyStages("")  # of the policy it holds
        self._has_joined = False
        self._changed = asyncio.Event()  # the next announcement differs from the last one

    @property
    def name(self) -> str:
        """The member's name."""
        return self._slot.env.node

    async def run(self) -> None:
        """Work until cancelled, then leave the gateway and stop vLLM. Raises EngineAbandoned, in a group."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._serve())
                group.create_task(self._announce())
                group.create_task(self._poll_stats())
        finally:
            if self.server is not None:
                await self._gateway.leave(self.name, self.server.boot_id)
                await self.server.stop()

    def leave(self) -> None:
        """Drain the engine because its machine will be preempted, and leave the gateway after its requests."""
        self._is_leaving = True
        self._changed.set()

    async def _serve(self) -> None:
        """Keep a server running. Each start is a new boot, with base weights or without weights."""
        failures = ends = 0
        while True:
            spec, bare = await self._files.prepare(may_be_bare=self.may_be_bare)
            try:
                server = await self._start(spec, bare=bare)
            except Unfit as error:
                self._files.mark_failed(self.name)
                if bare:  # the missing weights may be the cause
                    self.may_be_bare = False
                    log.warning("vllm_restarts_with_weights", engine=self.name, reason=str(error))
                    continue
                hint = "set rollout.recovery: exact in run.yaml"
                log.error("vllm_unfit", engine=self.name, reason=str(error), hint=hint)
                raise EngineAbandoned(str(error)) from error
            except ServerFailed as error:
                failures += 1
                self._files.mark_failed(self.name)
                self.may_be_bare = False  # the next start gets all that it may need
                await self._wait_or_give_up(failures, str(error))
                continue
            log.info("vllm_up", engine=self.name, boot_id=server.boot_id, address=server.address)
            self.server = server
            self.is_bare, self._had_policy, self._worked_s = bare, False, 0.0
            self._changed.set()
            self._on_server()
            code = await server.ended()
            log.warning("vllm_ended", engine=self.name, boot_id=server.boot_id, exit_code=code)
            failure = self._describe_failure(server)
            self.server = self.policy = None
            self._changed.set()
            await self._gateway.leave(self.name, server.boot_id)
            await server.stop()
            ends, failures = ends + 1, failures + 1 if failure else 0
            self.may_be_bare &= self._had_policy  # else the next start gets all that it may need
            if not self._had_policy or ends > 1:  # a single end at work may be the machine's fault
                self._files.mark_failed(self.name)
            if failure:
                await self._wait_or_give_up(failures, f"vLLM ended with exit code {code} {failure}")

    def _describe_failure(self, server: Server) -> str:
        """Describe when a server ended, if its start was not worthwhile; else return an empty text.

        The text is also empty if a policy may be the cause, since failures of policies are counted separately.
        """
        start_s = server.start_s + server.trial_s
        if server is not self.server:
            return ""
        if not self._had_policy:
            return "before it was given a policy"
        if self.policy is None or was_worth_its_start(start_s, self._worked_s):
            return ""
        return f"after {self._worked_s:.0f} s of work and {start_s:.0f} s of starting"

    async def _wait_or_give_up(self, failures: int, why: str) -> None:
        """Wait before the next start. Raises EngineAbandoned after STARTS_MAX consecutive failures."""
        log.error("vllm_failed", engine=self.name, start=failures, of=STARTS_MAX, reason=why)
        if failures == STARTS_MAX:
            raise EngineAbandoned(why)
        await asyncio.sleep(self._timing.restart_wait_s * 2**failures)

    async def _start(self, spec: RunSpec, *, bare: bool) -> Server:
        """Start vLLM. Raises ServerFailed, Unfit."""
        limit_s = self._files.start_limit_s
        try:
            async with asyncio.timeout(limit_s):
                return await vllm_server.start(spec, self._slot.env, self._http, bare=bare, gpus=self._slot.gpus)
        except TimeoutError:
            raise ServerFailed(f"vLLM did not start within {limit_s:.0f} s") from None

    async def _announce(self) -> None:
        """Announce the engine's state to the gateway, at every change and as a heartbeat."""
        while True:
            self._changed.clear()
            if self.server is None:
                await self._report_stage()
                continue
            announcement = self._announcement(self.server)
            try:
                if self._is_leaving:
                    await self._gateway.drain(self.name)
                reply = await self._gateway.announce(self.name, announcement, self._changed)
            except GatewayUnreachable as error:
                log.warning("gateway_unreachable", engine=self.name, reason=str(error))
                await asyncio.sleep(RETRY_S)
                continue
            if reply is None:  # the state has changed meanwhile
                continue
            if reply.drain and self.server is not None and announcement.boot_id == self.server.boot_id:
                log.info("left_gateway", engine=self.name, boot_id=announcement.boot_id)
                await self._gateway.leave(self.name, announcement.boot_id)
                return
            self._on_wanted(reply.policy)

    async def _report_stage(self) -> None:
        """Report the machine's progress while there is no server, and get the wanted policy."""
        try:
            self._on_wanted(await self._gateway.report_stage(self._files.stage))
        except GatewayUnreachable as error:
            log.debug("gateway_unreachable", reason=str(error))  # the gateway may start after its nodes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timing.stage_s):
                await self._changed.wait()

    async def _poll_stats(self) -> None:
        """Fetch vLLM's statistics every `poll_s` for the next announcement.

        Announces immediately when requests begin or cease to wait in the engine.
        """
        has_failed = False
        while True:
            await asyncio.sleep(self._timing.poll_s)
            server = self.server
            try:
                stats = None if server is None else await server.fetch_stats()
            except ServerFailed as error:
                if not has_failed and server is self.server:
                    log.warning("engine_stats_failed", engine=self.name, reason=str(error))
                stats, has_failed = None, True
            else:
                has_failed = False
            if server is not self.server:
                stats = None
            before, self._stats = self._stats, stats
            has_worked = before is not None and stats is not None and stats.tokens > before.tokens
            if has_worked and self.policy is not None:
                self._worked_s += self._timing.poll_s
            if (before is not None and before.waiting > 0) != (stats is not None and stats.waiting > 0):
                self._changed.set()

    def _announcement(self, server: Server) -> Announce:
        return Announce(
            boot_id=server.boot_id,
            address=server.address,
            policy=self.policy,
            max_requests=server.limits.max_requests,
            draining=self._is_leaving,
            unfit=self._fitness.unfit,
            kv_tokens=server.limits.kv_tokens,
            engine=self._stats,
            stages=self._stages if self._stages.policy == self.policy else None,
            engines=self._slot.engines,
            stage=self._folders.fetching,
        )

    # Called by the machine's agent, which fetches and loads policies:

    def should_try(self, wanted: PolicyRef) -> bool:
        """Return whether to try this policy now."""
        if time.monotonic() - self._failed_at_s >= self._timing.again_s:
            self._fitness = self._fitness.after_time()
        return self._fitness.should_try(attempt_key(wanted))

    def begin_load(self) -> None:
        """Record that the server is loading a policy, and holds none until it has."""
        self.policy, self._had_policy = None, True
        self._changed.set()

    def set_policy(self, wanted: PolicyRef, stages: PolicyStages | None = None) -> None:
        """Record that the server holds the wanted policy; with `stages`, that it has just loaded it."""
        if stages is None and self._fitness == Fitness():
            return
        self.policy, self._fitness, self.is_bare = wanted.label, Fitness(), False
        if stages is not None:
            self._stages = stages
            self._files.mark_serving(self.name)
            self._log_join(stages)
        self._changed.set()

    def record_failure(self, wanted: PolicyRef, reason: str, *, is_temporary: bool) -> None:
        """Record a failed attempt with a policy. After several ones the engine announces that it is unfit."""
        line = " ".join(f"policy {wanted.label}: {reason}".split())[:REASON_CHARS_MAX]
        reason = "".join(character if character.isprintable() else "?" for character in line)
        self._fitness = self._fitness.after_failure(attempt_key(wanted), reason, is_temporary=is_temporary)
        self._failed_at_s = time.monotonic()
        is_unfit = bool(self._fitness.unfit)
        log.error("policy_failed", engine=self.name, reason=reason, failed=self._fitness.failed, unfit=is_unfit)
        self._changed.set()

    async def end(self, server: Server, *, with_weights: bool = False) -> None:
        """Stop a server so that it is restarted. All later servers start with weights if `with_weights`."""
        if server is self.server:
            self.server = self.policy = None
        if with_weights:
            self.may_be_bare = self.is_bare = False
        await server.stop()
        self._files.mark_failed(self.name)

    def _log_join(self, policy: PolicyStages) -> None:
        """Log the time until this engine first served, by part.

        `fetch` overlaps with `vllm` and `trial`; `load` comes after them.
        """
        if not self._has_joined and self.server is not None:
            self._has_joined = True
            parts_s = {
                "compiled": self._files.compiled_s,
                "vllm": self.server.start_s,
                "trial": self.server.trial_s,
                "fetch": policy.fetch_s,
                "load": policy.load_s,
                "all": time.monotonic() - PROCESS_STARTED_S,
            }
            rounded_s = {part: round(took_s, 3) for part, took_s in parts_s.items()}
            log.info("joined", engine=self.name, bytes=policy.fetched_bytes, **rounded_s)


def attempt_key(wanted: PolicyRef) -> str:
    """Return the key to count attempts by. A policy that is published again counts as another one."""
    return f"{wanted.prefix} {wanted.label}"
