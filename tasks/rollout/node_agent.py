"""A rollout node's agent at work: it keeps vLLM up, and the policy in it the wanted one.

Loops share one state: one starts vLLM again whenever it ends, one tells the gateway what the node is and learns
which policy is wanted, one fetches and loads that. A policy is announced only after its files' digests were
verified, its tensors are the model's, and vLLM computes with it what the trainer does; vLLM is told of no others,
because one bad file kills its engine. While vLLM starts, the policy that it will be told to load is fetched; where
a policy overwrites all that the engine holds, it starts without the base model's weights. On a preemption notice
the node leaves the gateway once its requests are done, and waits for its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import aiohttp
import structlog

from checkpoint.store.errors import Corrupt, NotFound, StoreError
from checkpoint.store.run_store import Store
from policies.model.node_contract import NOTICE
from policies.model.spec import RunSpec
from policies.serving.fitness import AGAIN_S, Fitness
from policies.serving.joining import ENGINE, Stage
from policies.serving.wire import HOLD_S, Announce, EngineWord, PolicyRef, PolicyStages
from tasks.machine.node_env import NodeEnv
from tasks.models.base import BaseModel, Source, with_model
from tasks.peers.peers import Peers
from tasks.rollout import vllm_flags, vllm_server
from tasks.rollout.compiled.caches import CompileCaches
from tasks.rollout.gateway_link import GatewayLink, GatewayUnreachable, meet
from tasks.rollout.patching.loader import PolicyLoader, Ready
from tasks.rollout.policy_check import PolicyCheck
from tasks.rollout.policy_folders import DiskFailed, Overtaken, PolicyFolders
from tasks.rollout.vllm_flags import base_bytes
from tasks.rollout.vllm_server import PolicyRefused, Server, ServerFailed, Unfit

log = structlog.get_logger()

STARTS_MAX = 3  # in a row that did not come up: then the node ends, and the controller decides
RESTART_WAIT_S = 0.5  # doubled for each such start
RETRY_S = 0.5  # before the gateway or the store is tried again
NOTICE_POLL_S = 0.25
ENGINE_POLL_S = 1.0
COMPILED = ".cache/grpo-orch/compiled"  # below the home folder, as vLLM's own caches are
WHY_CHARS_MAX = 500  # of what is announced
BEGUN_S = time.monotonic()  # but for Python's own start


class GaveUp(Exception):
    """vLLM does not come up here, or is not fit for the run."""


class Agent:
    """One node's agent."""

    def __init__(
        self, env: NodeEnv, spec: RunSpec, store: Store, http: aiohttp.ClientSession, peers: Peers | None = None
    ) -> None:
        self._env = env
        self._spec = spec
        self._store = store
        self._http = http
        self._gateway = GatewayLink(store, env, http)
        self._peers = peers
        self._folders = PolicyFolders(store, Path(env.workdir) / "policies", peers)
        self._loader = PolicyLoader(self._folders)
        self._check = PolicyCheck(spec)
        self._base = self._base_of(source) if (source := vllm_flags.source(spec)) is not None else None
        self._compiled = CompileCaches(store, spec, Path.home() / COMPILED, env.token)
        self._fitness = Fitness()
        self._bare = True  # whether vLLM may start without weights
        self._empty = False  # whether it did, and still has none
        self._server: Server | None = None
        self._policy: str | None = None  # what the server holds
        self._wanted: PolicyRef | None = None
        self._leaving = False
        self._stage = Stage(ENGINE)  # until there is a server
        self._engine: EngineWord | None = None
        self._stages = PolicyStages("")  # of what was fetched last
        self._join_s: dict[str, float] = {}
        self._joined = asyncio.Event()
        self._changed = asyncio.Event()  # what is announced is no longer what is
        self._work = asyncio.Event()  # a server or a wanted policy is new

    def _base_of(self, source: Source) -> BaseModel:
        env = {**os.environ, **self._spec.rollout.env}
        limit_s = self._spec.policies.boot_timeout_s
        return BaseModel(self._store, source, Path(self._env.workdir), env, limit_s, self._say, self._peers)

    async def run(self) -> None:
        """Work until cancelled, then leave the gateway and stop vLLM. Raises GaveUp."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(meet(self._peers, self._gateway))
                group.create_task(self._serve())
                group.create_task(self._announce())
                group.create_task(self._load_wanted())
                group.create_task(self._listen_to_engine())
                group.create_task(self._watch_for_notice())
                group.create_task(self._compiled.keep(self._joined))
        finally:
            if self._base is not None:
                self._base.close()
            if self._server is not None:
                await self._gateway.leave(self._server.boot_id)
                await self._server.stop()

    async def _serve(self) -> None:
        """Keep a server up. Each one is a new boot, on base weights or none."""
        failed = 0
        while True:
            bare = await self._prepare()
            try:
                spec = await asyncio.to_thread(self._compiled.bring, self._spec)
                server = await vllm_server.start(spec, self._env, self._http, bare=bare)
            except Unfit as error:
                self._compiled.doubt()
                if bare:  # which may be what it was found out on
                    self._bare = False
                    log.warning("vllm_starts_again_with_weights", why=str(error))
                    continue
                log.error("vllm_unfit", why=str(error), hint="set rollout.recovery: exact in run.yaml")
                raise GaveUp(str(error)) from error
            except ServerFailed as error:
                self._compiled.doubt()
                self._bare = False  # the next start has all that it may need
                failed += 1
                log.error("vllm_did_not_start", start=failed, of=STARTS_MAX, why=str(error))
                if failed == STARTS_MAX:
                    raise GaveUp(str(error)) from error
                await asyncio.sleep(RESTART_WAIT_S * 2**failed)
                continue
            failed = 0
            log.info("vllm_up", boot_id=server.boot_id, address=server.address)
            self._server = server
            self._empty = bare
            self._announce_again()
            self._work.set()
            code = await server.ended()
            log.warning("vllm_ended", boot_id=server.boot_id, exit_code=code)
            self._server = self._policy = None
            self._announce_again()
            await self._gateway.leave(server.boot_id)
            await server.stop()

    async def _prepare(self) -> bool:
        """Have what vLLM needs of the base model on this machine. Returns whether it starts without weights."""
        if self._base is not None:
            self._has_base(await asyncio.to_thread(self._base.outline))
        bare = self._bare and await asyncio.to_thread(self._check.covers_engine)
        if self._base is not None and not bare:
            self._has_base(await asyncio.to_thread(self._base.whole))
        self._stage = Stage(ENGINE, 0, 0 if bare else await asyncio.to_thread(base_bytes, self._spec))
        return bare

    def _has_base(self, folder: Path | None) -> None:
        spec = with_model(self._spec, folder)
        if spec != self._spec:
            self._spec, self._check = spec, PolicyCheck(spec)

    def _say(self, stage: Stage) -> None:
        self._stage = stage

    async def _announce(self) -> None:
        """Tell the gateway what this node is, at every change and as a heartbeat."""
        while True:
            self._changed.clear()
            if self._server is None:
                await self._ask_ahead()
                continue
            said = self._announcement(self._server)
            try:
                if self._leaving:
                    await self._gateway.drain()
                reply = await self._gateway.announce(said, self._changed)
            except GatewayUnreachable as error:
                log.warning("gateway_unreachable", why=str(error))
                await asyncio.sleep(RETRY_S)
                continue
            if reply is None:  # something changed meanwhile
                continue
            if reply.drain and self._server is not None and said.boot_id == self._server.boot_id:
                log.info("left_the_gateway", boot_id=said.boot_id)
                await self._gateway.leave(said.boot_id)
                return
            self._want(reply.policy)

    async def _ask_ahead(self) -> None:
        """While there is no server, say what this node is at, and ask which policy is wanted."""
        try:
            self._want(await self._gateway.ask_wanted(self._stage))
        except GatewayUnreachable as error:
            log.debug("gateway_unreachable", why=str(error))  # it may come up after its nodes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HOLD_S):
                await self._changed.wait()

    def _want(self, policy: PolicyRef | None) -> None:
        if policy is not None and policy != self._wanted:
            self._wanted = policy
            self._work.set()

    async def _load_wanted(self) -> None:
        """Load the wanted policy whenever the server does not hold it, as long as trying may help."""
        while True:
            await self._work.wait()
            self._work.clear()
            server, wanted = self._server, self._wanted
            if wanted is None or (server is None and wanted.label == self._stages.policy):
                continue
            if wanted.label == self._policy:
                self._fitness = Fitness()
                self._announce_again()
                continue
            if not self._fitness.tries(_name(wanted)):
                await self._wait_for_work(AGAIN_S)
                self._fitness = self._fitness.after_time()
                continue
            try:
                ready = await self._fetch(wanted)
                if (server := self._server) is not None:
                    await self._load(server, wanted, ready)
            except Overtaken:
                self._work.set()
            except (Corrupt, NotFound, DiskFailed, OSError) as error:
                await self._failed(wanted, str(error), passes=True)
            except StoreError as error:
                log.error("policy_not_fetched", policy=wanted.label, why=str(error))
                await self._wait_for_work(RETRY_S)
            except (PolicyRefused, ServerFailed) as error:
                assert server is not None
                if self._empty:
                    self._bare = self._empty = False
                    log.warning("vllm_starts_again_with_weights", policy=wanted.label, why=str(error))
                    await self._end(server)
                    continue
                if not isinstance(error, PolicyRefused) or error.touched:
                    await self._end(server)  # what it holds now is unknown
                await self._failed(wanted, str(error), passes=False)

    async def _end(self, server: Server) -> None:
        """Stop a server, so that `_serve` starts another."""
        if server is self._server:
            self._server = self._policy = None
        await server.stop()
        self._compiled.doubt()

    async def _fetch(self, wanted: PolicyRef) -> Ready:
        begun_s = time.monotonic()
        ready = await self._loader.fetch(self._server, wanted, self._policy, partial(self._wants, wanted))
        if self._stages.policy != wanted.label:  # else it was there already
            self._stages = PolicyStages(wanted.label, time.monotonic() - begun_s, self._folders.fetched_bytes)
        return ready

    async def _failed(self, wanted: PolicyRef, why: str, *, passes: bool) -> None:
        """A try with a policy failed: try again, or say that the node is unfit."""
        line = " ".join(f"policy {wanted.label}: {why}".split())[:WHY_CHARS_MAX]
        why = "".join(one if one.isprintable() else "?" for one in line)
        self._fitness = self._fitness.after_failure(_name(wanted), why, passes=passes)
        log.error("policy_failed", why=why, failed=self._fitness.failed, unfit=bool(self._fitness.unfit))
        self._announce_again()
        await self._wait_for_work(RETRY_S)

    async def _wait_for_work(self, at_most_s: float) -> None:
        """Return when there is something new to do or the time is over, with work set."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                await self._work.wait()
        self._work.set()

    async def _load(self, server: Server, wanted: PolicyRef, ready: Ready) -> None:
        canary = ready.canary
        if ready.folder is not None:
            canary = await asyncio.to_thread(partial(self._check.passed, ready.folder, bare=self._empty))
        if server is not self._server or wanted != self._wanted or ready.base not in ("", self._policy):
            self._work.set()  # overtaken while it was fetched
            return
        self._policy = None
        self._announce_again()
        begun_s = time.monotonic()
        await self._loader.load(server, ready, canary)
        if server is self._server:
            self._policy, self._fitness, self._empty = wanted.label, Fitness(), False
            self._stages = replace(self._stages, load_s=time.monotonic() - begun_s)
            self._note_joined(server)
            self._announce_again()
            log.info("policy_loaded", policy=wanted.label, boot_id=server.boot_id, proved=canary is not None)

    def _note_joined(self, server: Server) -> None:
        """What it took until this node could serve for the first time, by part. The policy is fetched beside
        `vllm` and `trial`, and loaded after them."""
        if not self._join_s:
            policy, begun = self._stages, {"compiled": self._compiled.took_s, "vllm": server.start_s}
            taken = {**begun, "trial": server.trial_s, "fetch": policy.fetch_s, "load": policy.load_s}
            taken["all"] = time.monotonic() - BEGUN_S
            self._join_s = {part: round(took_s, 3) for part, took_s in taken.items()}
            log.info("joined", bytes=policy.fetched_bytes, **self._join_s)
            self._joined.set()

    async def _listen_to_engine(self) -> None:
        """Ask the engine every ENGINE_POLL_S for its numbers, which the next announcement carries; that it has
        become full, or is so no more, is announced at once."""
        silent = False
        while True:
            await asyncio.sleep(ENGINE_POLL_S)
            server = self._server
            try:
                said = None if server is None else await server.ask_engine()
            except ServerFailed as error:
                if not silent and server is self._server:
                    log.warning("engine_does_not_say", why=str(error))
                said, silent = None, True
            else:
                silent = False
            if server is not self._server:
                said = None
            before, self._engine = self._engine, said
            if (before is not None and before.waiting > 0) != (said is not None and said.waiting > 0):
                self._announce_again()

    async def _watch_for_notice(self) -> None:
        """Wait for the notice that this machine will be taken back: a file that `tasks.machine` writes."""
        notice = Path(self._env.workdir) / NOTICE
        while not notice.exists():
            await asyncio.sleep(NOTICE_POLL_S)
        log.warning("preemption_notice")
        self._leaving = True
        self._announce_again()

    def _wants(self, policy: PolicyRef) -> bool:
        return self._wanted is policy

    def _announcement(self, server: Server) -> Announce:
        return Announce(
            boot_id=server.boot_id,
            address=server.address,
            policy=self._policy,
            max_requests=server.limits.max_requests,
            draining=self._leaving,
            unfit=self._fitness.unfit,
            kv_tokens=server.limits.kv_tokens,
            engine=self._engine,
            stages=self._stages if self._stages.policy == self._policy else None,
            join_s=self._join_s,
            stage=self._folders.coming,
        )

    def _announce_again(self) -> None:
        self._changed.set()


def _name(wanted: PolicyRef) -> str:
    """By which tries are counted: a policy that was published anew is another one, whatever its content."""
    return f"{wanted.prefix} {wanted.label}"
