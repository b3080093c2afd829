"""Agent of a rollout machine, `python -m grpo_orch.tasks.rollout.agent`.

It keeps the machine's engines running and loads the wanted policy into them.

One loop per engine (`tasks.rollout.rollout_engine`) restarts vLLM whenever it ends and announces the engine to the
gateway. Another loop fetches the wanted policy, once for the machine, and loads it into the engines. vLLM gets
only policies whose digests were verified and whose tensors match the model, since a bad file kills its engine. A
policy is announced only after vLLM has reproduced the trainer's canary. The wanted policy is fetched while vLLM
starts. If policies set all of an engine's weights, vLLM starts without those of the base model. On a preemption
notice each engine leaves the gateway once its requests are done, and the machine waits for its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO, cast

import aiohttp
import structlog

from grpo_orch.checkpoint.security import identity
from grpo_orch.checkpoint.security.redaction import guard_output
from grpo_orch.checkpoint.security.vouched import UntrustedRun
from grpo_orch.checkpoint.store.errors import Corrupt, NotFound, StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.gpus import (
    DRIVER_HINT,
    VISIBLE,
    DriverFailed,
    engine_devices,
    engine_gpus,
    gpus_of,
    visible_names,
)
from grpo_orch.policies.model.node_contract import NOTICE
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.vocabulary import Role, member_of
from grpo_orch.policies.serving.wire import PolicyRef, PolicyStages
from grpo_orch.tasks.machine.children import adopt_orphans
from grpo_orch.tasks.machine.exit_note import leave_reason
from grpo_orch.tasks.machine.launching import counted_gpus, set_up
from grpo_orch.tasks.machine.node_env import NodeEnv, read_node_env, read_run_here
from grpo_orch.tasks.machine.versions import ROLLOUT, DriverTooOld, WrongVersions, check_versions
from grpo_orch.tasks.rollout.engine_files import EngineFiles
from grpo_orch.tasks.rollout.gateway_link import GatewayLink
from grpo_orch.tasks.rollout.policy_folders import PolicyFolders, Superseded
from grpo_orch.tasks.rollout.policy_loader import PolicyLoader, Ready
from grpo_orch.tasks.rollout.rollout_engine import TIMING, EngineAbandoned, EngineSlot, RolloutEngine, Timing
from grpo_orch.tasks.rollout.vllm.server import PolicyRefused, Server, ServerFailed

log = structlog.get_logger()

NOTICE_POLL_S = 0.25


class Agent:
    """One machine's agent.

    Args:
        shares: the GPUs of each engine, see `policies.model.gpus.engine_devices`.
        gateway: the machine's client of the gateway; None: one that reads the gateway's address from the store.
        timing: intervals and limits.
    """

    def __init__(
        self,
        env: NodeEnv,
        spec: RunSpec,
        store: Store,
        http: aiohttp.ClientSession,
        shares: Sequence[str] = ("",),
        gateway: GatewayLink | None = None,
        timing: Timing = TIMING,
    ) -> None:
        self._env = env
        self._timing = timing
        gateway = gateway or GatewayLink(store, env, http)
        self._folders = PolicyFolders(store, Path(env.workdir) / "policies")
        self._loader = PolicyLoader(self._folders)
        self.files = EngineFiles(env, spec, store)
        self._wanted: PolicyRef | None = None
        self._stages = PolicyStages("")  # of the policy fetched last
        self._work = asyncio.Event()  # there is a new server or a new wanted policy
        members = [member_of(env.node, engine, len(shares)) for engine in range(len(shares))]
        self.engines = [
            RolloutEngine(
                EngineSlot(replace(env, node=member), gpus, len(shares)),
                http,
                gateway,
                self.files,
                self._folders,
                self._want,
                self._work.set,
                timing,
            )
            for member, gpus in zip(members, shares, strict=True)
        ]

    async def run(self) -> None:
        """Work until cancelled, then leave the gateway and stop every vLLM. Raises EngineAbandoned, in a group."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._load_wanted())
                group.create_task(self._watch_for_notice())
                group.create_task(self.files.store_compiled())
                for engine in self.engines:
                    group.create_task(self._run_engine(engine))
        finally:
            self.files.close()

    async def _run_engine(self, engine: RolloutEngine) -> None:
        """Run an engine. If it gives up, the others continue as long as they are at least half of all."""
        try:
            await engine.run()
        except* EngineAbandoned as errors:
            engine.is_given_up = True
            remaining = sum(not other.is_given_up for other in self.engines)
            if 2 * remaining < len(self.engines):
                raise
            why = str(errors.exceptions[0])
            log.error("engine_given_up", engine=engine.name, reason=why, remaining=remaining)

    def _want(self, policy: PolicyRef | None) -> None:
        if policy is not None and policy != self._wanted:
            self._wanted = policy
            self._work.set()

    async def _load_wanted(self) -> None:
        """Load the wanted policy whenever an engine does not hold it and an attempt may succeed."""
        while True:
            await self._work.wait()
            self._work.clear()
            wanted = self._wanted
            if wanted is None:
                continue
            for engine in self.engines:
                if engine.policy == wanted.label:
                    engine.set_policy(wanted)
            running = [engine for engine in self.engines if engine.server is not None]
            lacking = [engine for engine in running if engine.policy != wanted.label]
            if not running and wanted.label != self._stages.policy:
                lacking = self.engines  # fetch it before they are up
            ready = [engine for engine in lacking if engine.should_try(wanted)]
            if ready:
                await self._update(wanted, self._largest_group(ready))
            elif lacking:
                await self._wait_for_work(self._timing.again_s)

    def _largest_group(self, engines: Sequence[RolloutEngine]) -> list[RolloutEngine]:
        """Return the largest group that can load a policy in one way: by deltas to the same policy, or whole."""
        groups = defaultdict[str | None, list[RolloutEngine]](list)
        for engine in engines:
            groups[engine.policy if self._loader.takes_deltas(engine.server) else None].append(engine)
        return max(groups.values(), key=len)

    async def _update(self, wanted: PolicyRef, engines: Sequence[RolloutEngine]) -> None:
        """Fetch a policy, and load it into those of the engines that are up."""
        try:
            ready = await self._fetch(wanted, engines)
            await self._load(wanted, ready, engines)
        except Superseded:
            self._work.set()
        except (Corrupt, NotFound, OSError) as error:
            await self._record_failures(engines, wanted, str(error), passes=True)
        except StoreError as error:
            log.error("policy_fetch_failed", policy=wanted.label, reason=str(error))
            await self._wait_for_work(self._timing.retry_s)
        except PolicyRefused as error:
            await self._record_failures(engines, wanted, str(error), passes=False)

    async def _fetch(self, wanted: PolicyRef, engines: Sequence[RolloutEngine]) -> Ready:
        begun_s, servers = time.monotonic(), [engine.server for engine in engines if engine.server is not None]
        holds = engines[0].policy if servers else None
        ready = await self._loader.fetch(servers, wanted, holds, lambda: self._wanted is wanted)
        if self._stages.policy != wanted.label:  # else it was fetched before
            self._stages = PolicyStages(wanted.label, time.monotonic() - begun_s, self._folders.fetched_bytes)
        return ready

    async def _load(self, wanted: PolicyRef, ready: Ready, engines: Sequence[RolloutEngine]) -> None:
        """Load a policy into all these engines concurrently. Each serves it without waiting for the others."""
        begun_s = time.monotonic()
        running = [(engine, engine.server) for engine in engines if engine.server is not None]
        limits = [asyncio.timeout(None) for _ in running]
        async with asyncio.TaskGroup() as group:
            loads = [
                group.create_task(self._load_into(engine, server, wanted, ready, limit))
                for (engine, server), limit in zip(running, limits, strict=True)
            ]
            pending = set(loads)
            while pending and not any(load.done() and load.result() for load in loads):
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if pending:
                await asyncio.wait(pending, timeout=self._timing.late_s + time.monotonic() - begun_s)
            for load, limit in zip(loads, limits, strict=True):
                if not load.done():
                    with contextlib.suppress(RuntimeError):  # the load has failed and is ending its vLLM
                        limit.reschedule(asyncio.get_running_loop().time())
        done = [server for load in loads if (server := load.result()) is not None]
        if done:
            await self._loader.loaded(ready, done)
        if len(done) == len(loads):
            self._work.set()
        else:
            await self._wait_for_work(self._timing.retry_s)

    async def _load_into(
        self, engine: RolloutEngine, server: Server, wanted: PolicyRef, ready: Ready, limit: asyncio.Timeout
    ) -> Server | None:
        """Load a policy into an engine. Returns its server if that holds the policy now."""
        try:
            async with limit:
                return await self._check_and_load(engine, server, wanted, ready)
        except OSError as error:  # includes TimeoutError
            if isinstance(error, TimeoutError) and limit.expired():
                await engine.end(server)
                error = TimeoutError("it was still loading long after another engine of this machine had finished")
            engine.record_failure(wanted, str(error), is_temporary=True)
        except (PolicyRefused, ServerFailed) as error:
            if engine.is_bare:
                log.warning("vllm_restarts_with_weights", engine=engine.name, reason=str(error))
                await engine.end(server, with_weights=True)
                return None
            if not isinstance(error, PolicyRefused) or error.touched:
                await engine.end(server)  # its weights are unknown now
            engine.record_failure(wanted, str(error), is_temporary=False)
        return None

    async def _check_and_load(
        self, engine: RolloutEngine, server: Server, wanted: PolicyRef, ready: Ready
    ) -> Server | None:
        canary = ready.canary
        if ready.folder is not None:
            verify = partial(self.files.check.verify, ready.folder, bare=engine.is_bare)
            canary = await asyncio.to_thread(verify)
        if server is not engine.server or wanted != self._wanted or ready.base not in ("", engine.policy):
            return None  # superseded meanwhile
        engine.begin_load()
        begun_s = time.monotonic()
        await self._loader.load(server, ready, canary)
        if server is not engine.server:
            return None
        engine.set_policy(wanted, replace(self._stages, load_s=time.monotonic() - begun_s))
        proved = canary is not None
        log.info("policy_loaded", engine=engine.name, policy=wanted.label, boot_id=server.boot_id, proved=proved)
        return server

    async def _record_failures(
        self, engines: Sequence[RolloutEngine], wanted: PolicyRef, why: str, *, passes: bool
    ) -> None:
        for engine in engines:
            engine.record_failure(wanted, why, is_temporary=passes)
        await self._wait_for_work(self._timing.retry_s)

    async def _wait_for_work(self, timeout_s: float) -> None:
        """Wait for new work, at most `timeout_s`. Sets the event in either case."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._work.wait()
        self._work.set()

    async def _watch_for_notice(self) -> None:
        """Wait for the preemption notice, a file that `tasks.machine` writes, and drain all engines."""
        notice = Path(self._env.workdir) / NOTICE
        while not notice.exists():
            await asyncio.sleep(NOTICE_POLL_S)
        log.warning("preemption_notice")
        for engine in self.engines:
            engine.leave()


class LossyStream:
    """A log stream that drops lines instead of raising OSError, for example when the disk is full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


THREADS = 16  # for the store, files and processes


async def serve(env: NodeEnv, spec: RunSpec, store: Store, shares: Sequence[str]) -> int:
    """Run the agent with an engine for each share of the GPUs until SIGTERM. Returns the exit code."""
    tls = aiohttp.TCPConnector(ssl=identity.client_context(env.token))  # for https URLs
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(THREADS + len(shares)))  # a thread waits for each vLLM's end
    async with aiohttp.ClientSession(connector=tls) as http:
        work = asyncio.ensure_future(Agent(env, spec, store, http, shares).run())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, work.cancel)
        await asyncio.wait({work})
    if work.cancelled():
        log.info("stopped")
        return exit_codes.OK
    error = work.exception()
    if isinstance(error, ExceptionGroup) and error.subgroup(EngineAbandoned) is not None:
        log.error("gave_up", hint="see vLLM's log above")
        return exit_codes.FAILED
    work.result()
    raise AssertionError("the agent runs until it is cancelled or fails")


def gpus_of_engines(spec: RunSpec) -> list[str]:
    """Divide this machine's GPUs among as many engines as possible. Raises DriverFailed."""
    if gpus_of(Role.ROLLOUT, spec) == 0:
        return engine_devices((), 1)
    env = {**os.environ, **spec.rollout.env}
    if VISIBLE in env:
        names = visible_names(env[VISIBLE])
    else:
        names = tuple(map(str, range(counted_gpus(Role.ROLLOUT, spec, env) or 0)))
    shares = engine_devices(names, engine_gpus(spec.rollout.vllm))
    log.info("engines", gpus=len(names), engines=len(shares))
    return shares


def _last_line(env: NodeEnv, reason: str) -> None:
    """Print why the work ends, and note it for the controller."""
    leave_reason(Path(env.workdir), reason)
    print(f"grpo-orch rollout: {reason}", file=sys.stderr, flush=True)


def main() -> int:
    guard_output()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(cast("TextIO", LossyStream(sys.stderr))))
    env = read_node_env()
    store = Store(env.run)
    try:
        spec = read_run_here(store, env.token).spec
    except UntrustedRun as error:
        _last_line(env, str(error))
        return exit_codes.BAD_SPEC
    if (failed := set_up(Path(env.workdir), spec.rollout.setup)) is not None:
        _last_line(env, f"rollout.{failed}")
        return exit_codes.UNFIT_MACHINE
    try:
        check_versions(ROLLOUT)
        shares = gpus_of_engines(spec)
    except (WrongVersions, DriverFailed) as error:
        hint = f"; {DRIVER_HINT}" if isinstance(error, DriverFailed) else ""
        _last_line(env, f"{error}{hint}")
        is_unfit = isinstance(error, DriverFailed | DriverTooOld)
        return exit_codes.UNFIT_MACHINE if is_unfit else exit_codes.BAD_SPEC
    shutil.rmtree(Path(env.workdir) / "policies", ignore_errors=True)
    adopt_orphans()
    return asyncio.run(serve(env, spec, store, shares))


if __name__ == "__main__":
    sys.exit(main())
