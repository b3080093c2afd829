"""One engine of a rollout machine: kept up, and a member of the gateway with a word of its own.

Whatever becomes of it, its siblings go on: it is started again by itself, and given up by itself.
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

from policies.model.spec import RunSpec
from policies.serving.fitness import AGAIN_S, STARTS_MAX, Fitness, was_worth_its_start
from policies.serving.wire import HOLD_S, Announce, EngineWord, PolicyRef, PolicyStages
from tasks.machine.node_env import NodeEnv
from tasks.rollout.base_here import BaseHere
from tasks.rollout.gateway_link import GatewayLink, GatewayUnreachable
from tasks.rollout.policy_folders import PolicyFolders
from tasks.rollout.vllm import server as vllm_server
from tasks.rollout.vllm.server import Server, ServerFailed, Unfit

log = structlog.get_logger()

RESTART_WAIT_S = 0.5  # doubled for each such start
RETRY_S = 0.5  # before the gateway is tried again
ENGINE_POLL_S = 1.0
WHY_CHARS_MAX = 500  # of what is announced
BEGUN_S = time.monotonic()  # but for Python's own start


class GaveUp(Exception):
    """vLLM does not come up here, or is not fit for the run."""


@dataclass(frozen=True, slots=True)
class Place:
    """An engine's place on its machine. `env` is the machine's, but that `node` is the member's name."""

    env: NodeEnv
    gpus: str = ""  # as VISIBLE has them; empty: all that it finds
    engines: int = 1  # of the machine


class RolloutEngine:
    """One engine after the other in one place.

    Args:
        wants: hears which policy the gateway wants.
        news: hears that there is another server, or none.
    """

    def __init__(
        self,
        place: Place,
        http: aiohttp.ClientSession,
        gateway: GatewayLink,
        base: BaseHere,
        folders: PolicyFolders,
        wants: Callable[[PolicyRef | None], None],
        news: Callable[[], None],
    ) -> None:
        self._place = place
        self._http = http
        self._gateway = gateway
        self._base = base
        self._folders = folders
        self._wants = wants
        self._news = news
        self.server: Server | None = None
        self.policy: str | None = None  # what the server holds
        self.given_up = False
        self._given = False  # whether the server was given a policy
        self._worked_s = 0.0  # in which it made tokens of one
        self._bare = True  # whether vLLM may start without weights
        self.empty = False  # whether it did, and still has none
        self._fitness = Fitness()
        self._failed_at_s = -math.inf
        self._leaving = False
        self._word: EngineWord | None = None
        self._stages = PolicyStages("")  # of what it holds
        self._join_s: dict[str, float] = {}
        self._changed = asyncio.Event()  # what is announced is no longer what is

    @property
    def name(self) -> str:
        """The member's."""
        return self._place.env.node

    async def run(self) -> None:
        """Work until cancelled, then leave the gateway and stop vLLM. Raises GaveUp, in a group."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._serve())
                group.create_task(self._announce())
                group.create_task(self._listen())
        finally:
            if self.server is not None:
                await self._gateway.leave(self.server.boot_id)
                await self.server.stop()

    def leave(self) -> None:
        """Its machine will be taken: it drains, and leaves once its requests are done."""
        self._leaving = True
        self._changed.set()

    async def _serve(self) -> None:
        """Keep a server up. Each one is a new boot, on base weights or none."""
        failed = ended = 0
        while True:
            spec, bare = await self._base.prepare(may_be_bare=self._bare)
            try:
                server = await self._start(spec, bare=bare)
            except Unfit as error:
                self._base.doubt(self.name)
                if bare:  # which may be what it was found out on
                    self._bare = False
                    log.warning("vllm_starts_again_with_weights", engine=self.name, why=str(error))
                    continue
                hint = "set rollout.recovery: exact in run.yaml"
                log.error("vllm_unfit", engine=self.name, why=str(error), hint=hint)
                raise GaveUp(str(error)) from error
            except ServerFailed as error:
                failed += 1
                self._base.doubt(self.name)
                self._bare = False  # the next start has all that it may need
                await self._wait_or_give_up(failed, str(error))
                continue
            log.info("vllm_up", engine=self.name, boot_id=server.boot_id, address=server.address)
            self.server = server
            self.empty, self._given, self._worked_s = bare, False, 0.0
            self._changed.set()
            self._news()
            code = await server.ended()
            log.warning("vllm_ended", engine=self.name, boot_id=server.boot_id, exit_code=code)
            why = self._in_vain(server)
            self.server = self.policy = None
            self._changed.set()
            await self._gateway.leave(server.boot_id)
            await server.stop()
            ended, failed = ended + 1, failed + 1 if why else 0
            self._bare &= self._given  # else the next start has all that it may need
            if not self._given or ended > 1:  # once may be the machine's doing; compiled code may fail at work
                self._base.doubt(self.name)
            if why:
                await self._wait_or_give_up(failed, f"vLLM ended with exit code {code} {why}")

    def _in_vain(self, server: Server) -> str:
        """When a server ended that has come to nothing; empty for one that has not, and where a policy may be to
        blame: its tries are counted by themselves."""
        start_s = server.start_s + server.trial_s
        if server is not self.server:
            return ""
        if not self._given:
            return "before it was given a policy"
        if self.policy is None or was_worth_its_start(start_s, self._worked_s):
            return ""
        return f"after {self._worked_s:.0f} s of work, for which it took {start_s:.0f} s to start"

    async def _wait_or_give_up(self, failed: int, why: str) -> None:
        """Wait before the next start, after so many in a row that came to nothing. Raises GaveUp."""
        log.error("vllm_came_to_nothing", engine=self.name, start=failed, of=STARTS_MAX, why=why)
        if failed == STARTS_MAX:
            raise GaveUp(why)
        await asyncio.sleep(RESTART_WAIT_S * 2**failed)

    async def _start(self, spec: RunSpec, *, bare: bool) -> Server:
        """Start vLLM. Raises ServerFailed, Unfit."""
        at_most_s = self._base.start_limit_s
        try:
            async with asyncio.timeout(at_most_s):
                return await vllm_server.start(spec, self._place.env, self._http, bare=bare, gpus=self._place.gpus)
        except TimeoutError:
            raise ServerFailed(f"vLLM was not up within {at_most_s:.0f} s") from None

    async def _announce(self) -> None:
        """Tell the gateway what this engine is, at every change and as a heartbeat."""
        while True:
            self._changed.clear()
            if self.server is None:
                await self._ask_ahead()
                continue
            said = self._announcement(self.server)
            try:
                if self._leaving:
                    await self._gateway.drain()
                reply = await self._gateway.announce(said, self._changed)
            except GatewayUnreachable as error:
                log.warning("gateway_unreachable", engine=self.name, why=str(error))
                await asyncio.sleep(RETRY_S)
                continue
            if reply is None:  # something changed meanwhile
                continue
            if reply.drain and self.server is not None and said.boot_id == self.server.boot_id:
                log.info("left_the_gateway", engine=self.name, boot_id=said.boot_id)
                await self._gateway.leave(said.boot_id)
                return
            self._wants(reply.policy)

    async def _ask_ahead(self) -> None:
        """While there is no server, say what its machine is at, and ask which policy is wanted."""
        try:
            self._wants(await self._gateway.ask_wanted(self._base.stage))
        except GatewayUnreachable as error:
            log.debug("gateway_unreachable", why=str(error))  # it may come up after its nodes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HOLD_S):
                await self._changed.wait()

    async def _listen(self) -> None:
        """Ask vLLM every ENGINE_POLL_S for its numbers, which the next announcement carries; that it has become
        full, or is so no more, is announced at once."""
        silent = False
        while True:
            await asyncio.sleep(ENGINE_POLL_S)
            server = self.server
            try:
                said = None if server is None else await server.ask_engine()
            except ServerFailed as error:
                if not silent and server is self.server:
                    log.warning("engine_does_not_say", engine=self.name, why=str(error))
                said, silent = None, True
            else:
                silent = False
            if server is not self.server:
                said = None
            before, self._word = self._word, said
            if before is not None and said is not None and said.tokens > before.tokens and self.policy is not None:
                self._worked_s += ENGINE_POLL_S
            if (before is not None and before.waiting > 0) != (said is not None and said.waiting > 0):
                self._changed.set()

    def _announcement(self, server: Server) -> Announce:
        return Announce(
            boot_id=server.boot_id,
            address=server.address,
            policy=self.policy,
            max_requests=server.limits.max_requests,
            draining=self._leaving,
            unfit=self._fitness.unfit,
            kv_tokens=server.limits.kv_tokens,
            engine=self._word,
            stages=self._stages if self._stages.policy == self.policy else None,
            join_s=self._join_s,
            engines=self._place.engines,
            stage=self._folders.coming,
        )

    # Its policy, by the machine that fetches it:

    def tries(self, wanted: PolicyRef) -> bool:
        """Whether that policy is to be tried now."""
        if time.monotonic() - self._failed_at_s >= AGAIN_S:
            self._fitness = self._fitness.after_time()
        return self._fitness.tries(tried_as(wanted))

    def begins(self) -> None:
        """It begins to load another policy, and holds none until it has."""
        self.policy, self._given = None, True
        self._changed.set()

    def holds(self, wanted: PolicyRef, stages: PolicyStages | None = None) -> None:
        """The server holds what is wanted, since now if there are `stages` of how it came to."""
        if stages is None and self._fitness == Fitness():
            return
        self.policy, self._fitness, self.empty = wanted.label, Fitness(), False
        if stages is not None:
            self._stages = stages
            self._base.serves(self.name)
            self._note_joined(stages)
        self._changed.set()

    def failed(self, wanted: PolicyRef, why: str, *, passes: bool) -> None:
        """A try with a policy failed; after some it says that it is unfit."""
        line = " ".join(f"policy {wanted.label}: {why}".split())[:WHY_CHARS_MAX]
        why = "".join(one if one.isprintable() else "?" for one in line)
        self._fitness = self._fitness.after_failure(tried_as(wanted), why, passes=passes)
        self._failed_at_s = time.monotonic()
        unfit = bool(self._fitness.unfit)
        log.error("policy_failed", engine=self.name, why=why, failed=self._fitness.failed, unfit=unfit)
        self._changed.set()

    async def end(self, server: Server, *, with_weights: bool = False) -> None:
        """Stop a server, so that another is started; for good `with_weights` if so."""
        if server is self.server:
            self.server = self.policy = None
        if with_weights:
            self._bare = self.empty = False
        await server.stop()
        self._base.doubt(self.name)

    def _note_joined(self, policy: PolicyStages) -> None:
        """What it took until this engine could serve for the first time, by part. The policy is fetched beside
        `vllm` and `trial`, and loaded after them."""
        if not self._join_s and self.server is not None:
            begun = {"compiled": self._base.compiled_s, "vllm": self.server.start_s}
            taken = {**begun, "trial": self.server.trial_s, "fetch": policy.fetch_s, "load": policy.load_s}
            taken["all"] = time.monotonic() - BEGUN_S
            self._join_s = {part: round(took_s, 3) for part, took_s in taken.items()}
            log.info("joined", engine=self.name, bytes=policy.fetched_bytes, **self._join_s)


def tried_as(wanted: PolicyRef) -> str:
    """By which tries are counted: a policy that was published anew is another one, whatever its content."""
    return f"{wanted.prefix} {wanted.label}"
