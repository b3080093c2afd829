"""A rollout machine's agent at work: its engines up, and the policy in them the wanted one.

Loops share one state: one for each engine (`tasks.rollout.rollout_engine`) starts vLLM again whenever it ends and
tells the gateway what that engine is, and one fetches the wanted policy, once for the machine, and has the engines
load it. A policy is announced only after its files' digests were verified, its tensors are the model's, and vLLM
computes with it what the trainer does; vLLM is told of no others, because one bad file kills its engine. While
vLLM starts, the policy that it will be told to load is fetched; where a policy overwrites all that the engine
holds, it starts without the base model's weights. On a preemption notice each engine leaves the gateway once its
requests are done, and the machine waits for its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import aiohttp
import structlog

from checkpoint.store.errors import Corrupt, NotFound, StoreError
from checkpoint.store.run_store import Store
from policies.model.node_contract import NOTICE
from policies.model.spec import RunSpec
from policies.model.vocabulary import member_of
from policies.serving.fitness import AGAIN_S
from policies.serving.wire import PolicyRef, PolicyStages
from tasks.machine.node_env import NodeEnv
from tasks.rollout.base_here import BaseHere
from tasks.rollout.gateway_link import GatewayLink
from tasks.rollout.policy_folders import DiskFailed, Overtaken, PolicyFolders
from tasks.rollout.policy_loader import PolicyLoader, Ready
from tasks.rollout.rollout_engine import GaveUp, Place, RolloutEngine
from tasks.rollout.vllm.server import PolicyRefused, Server, ServerFailed

log = structlog.get_logger()

RETRY_S = 0.5  # before the store is tried again, or an engine that failed with a policy
NOTICE_POLL_S = 0.25
# An engine that hangs in a load keeps the next policy from its siblings. They read the same file at the same time.
LATE_S = 60.0


class Agent:
    """One machine's agent.

    Args:
        shares: the GPUs of each of its engines, see `policies.model.gpus.divided`.
    """

    def __init__(
        self,
        env: NodeEnv,
        spec: RunSpec,
        store: Store,
        http: aiohttp.ClientSession,
        shares: Sequence[str] = ("",),
    ) -> None:
        self._env = env
        self._gateway = GatewayLink(store, env, http)
        self._folders = PolicyFolders(store, Path(env.workdir) / "policies")
        self._loader = PolicyLoader(self._folders)
        self._base = BaseHere(env, spec, store)
        self._wanted: PolicyRef | None = None
        self._stages = PolicyStages("")  # of what was fetched last
        self._work = asyncio.Event()  # a server or a wanted policy is new
        members = [member_of(env.node, engine, len(shares)) for engine in range(len(shares))]
        self._engines = [
            RolloutEngine(
                Place(replace(env, node=member), gpus, len(shares)),
                http,
                self._gateway.of(member),
                self._base,
                self._folders,
                self._want,
                self._work.set,
            )
            for member, gpus in zip(members, shares, strict=True)
        ]

    async def run(self) -> None:
        """Work until cancelled, then leave the gateway and stop every vLLM. Raises GaveUp, in a group."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._load_wanted())
                group.create_task(self._watch_for_notice())
                group.create_task(self._base.keep())
                for engine in self._engines:
                    group.create_task(self._keep(engine))
        finally:
            self._base.close()

    async def _keep(self, engine: RolloutEngine) -> None:
        """Run an engine. One that gives up leaves the others at work, until these are fewer than half of all."""
        try:
            await engine.run()
        except* GaveUp as why:
            engine.given_up = True
            left = sum(not one.given_up for one in self._engines)
            if 2 * left < len(self._engines):
                raise
            log.error("engine_given_up", engine=engine.name, why=str(why.exceptions[0]), left=left)

    def _want(self, policy: PolicyRef | None) -> None:
        if policy is not None and policy != self._wanted:
            self._wanted = policy
            self._work.set()

    async def _load_wanted(self) -> None:
        """Load the wanted policy whenever an engine does not hold it, as long as trying may help."""
        while True:
            await self._work.wait()
            self._work.clear()
            wanted = self._wanted
            if wanted is None:
                continue
            for engine in self._engines:
                if engine.policy == wanted.label:
                    engine.holds(wanted)
            lack = [one for one in self._engines if one.server is not None and one.policy != wanted.label]
            if all(one.server is None for one in self._engines) and wanted.label != self._stages.policy:
                lack = self._engines  # they will
            able = [one for one in lack if one.tries(wanted)]
            if able:
                await self._bring(wanted, self._alike(able))
            elif lack:
                await self._wait_for_work(AGAIN_S)

    def _alike(self, engines: Sequence[RolloutEngine]) -> list[RolloutEngine]:
        """As many of them as can be given a policy in one way: by changes to the same one, or whole."""
        groups = defaultdict[str | None, list[RolloutEngine]](list)
        for one in engines:
            groups[one.policy if self._loader.takes_changes(one.server) else None].append(one)
        return max(groups.values(), key=len)

    async def _bring(self, wanted: PolicyRef, engines: Sequence[RolloutEngine]) -> None:
        """Fetch a policy and have these engines load it, those of them that are up."""
        try:
            ready = await self._fetch(wanted, engines)
            await self._load(wanted, ready, engines)
        except Overtaken:
            self._work.set()
        except (Corrupt, NotFound, DiskFailed, OSError) as error:
            await self._failed(engines, wanted, str(error), passes=True)
        except StoreError as error:
            log.error("policy_not_fetched", policy=wanted.label, why=str(error))
            await self._wait_for_work(RETRY_S)
        except PolicyRefused as error:
            await self._failed(engines, wanted, str(error), passes=False)

    async def _fetch(self, wanted: PolicyRef, engines: Sequence[RolloutEngine]) -> Ready:
        begun_s, servers = time.monotonic(), [one.server for one in engines if one.server is not None]
        holds = engines[0].policy if servers else None
        ready = await self._loader.fetch(servers, wanted, holds, lambda: self._wanted is wanted)
        if self._stages.policy != wanted.label:  # else it was there already
            self._stages = PolicyStages(wanted.label, time.monotonic() - begun_s, self._folders.fetched_bytes)
        return ready

    async def _load(self, wanted: PolicyRef, ready: Ready, engines: Sequence[RolloutEngine]) -> None:
        """Have all of them load it at the same time; none waits for another to serve."""
        begun_s, up = time.monotonic(), [(one, one.server) for one in engines if one.server is not None]
        limits = [asyncio.timeout(None) for _ in up]
        async with asyncio.TaskGroup() as group:
            tries = [
                group.create_task(self._give(one, server, wanted, ready, limit))
                for (one, server), limit in zip(up, limits, strict=True)
            ]
            left = set(tries)
            while left and not any(one.done() and one.result() for one in tries):
                _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            if left:
                await asyncio.wait(left, timeout=LATE_S + time.monotonic() - begun_s)
            for one, limit in zip(tries, limits, strict=True):
                if not one.done():
                    with contextlib.suppress(RuntimeError):  # its load has failed, and it ends its vLLM
                        limit.reschedule(asyncio.get_running_loop().time())
        done = [server for one in tries if (server := one.result()) is not None]
        if done:
            await self._loader.loaded(ready, done)
        if len(done) == len(tries):
            self._work.set()
        else:
            await self._wait_for_work(RETRY_S)

    async def _give(
        self, engine: RolloutEngine, server: Server, wanted: PolicyRef, ready: Ready, limit: asyncio.Timeout
    ) -> Server | None:
        """Have an engine load a policy. Returns its server if that holds it now."""
        try:
            async with limit:
                return await self._given(engine, server, wanted, ready)
        except OSError as error:  # TimeoutError too
            if isinstance(error, TimeoutError) and limit.expired():
                await engine.end(server)
                error = TimeoutError("it did not load what its siblings have loaded long since")
            engine.failed(wanted, str(error), passes=True)
        except (PolicyRefused, ServerFailed) as error:
            if engine.empty:
                log.warning("vllm_starts_again_with_weights", engine=engine.name, why=str(error))
                await engine.end(server, with_weights=True)
                return None
            if not isinstance(error, PolicyRefused) or error.touched:
                await engine.end(server)  # what it holds now is unknown
            engine.failed(wanted, str(error), passes=False)
        return None

    async def _given(
        self, engine: RolloutEngine, server: Server, wanted: PolicyRef, ready: Ready
    ) -> Server | None:
        canary = ready.canary
        if ready.folder is not None:
            canary = await asyncio.to_thread(partial(self._base.check.passed, ready.folder, bare=engine.empty))
        if server is not engine.server or wanted != self._wanted or ready.base not in ("", engine.policy):
            return None  # overtaken while it was fetched
        engine.begins()
        begun_s = time.monotonic()
        await self._loader.load(server, ready, canary)
        if server is not engine.server:
            return None
        engine.holds(wanted, replace(self._stages, load_s=time.monotonic() - begun_s))
        proved = canary is not None
        log.info("policy_loaded", engine=engine.name, policy=wanted.label, boot_id=server.boot_id, proved=proved)
        return server

    async def _failed(
        self, engines: Sequence[RolloutEngine], wanted: PolicyRef, why: str, *, passes: bool
    ) -> None:
        for one in engines:
            one.failed(wanted, why, passes=passes)
        await self._wait_for_work(RETRY_S)

    async def _wait_for_work(self, at_most_s: float) -> None:
        """Return when there is something new to do or the time is over, with work set."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                await self._work.wait()
        self._work.set()

    async def _watch_for_notice(self) -> None:
        """Wait for the notice that this machine will be taken back: a file that `tasks.machine` writes."""
        notice = Path(self._env.workdir) / NOTICE
        while not notice.exists():
            await asyncio.sleep(NOTICE_POLL_S)
        log.warning("preemption_notice")
        for engine in self._engines:
            engine.leave()
