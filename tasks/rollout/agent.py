"""A rollout node's agent, `python -m tasks.rollout.agent`: keeps vLLM up, and the policy in it the wanted one.

Loops share one state: one starts vLLM again whenever it ends, one tells the gateway what the node is and learns
which policy is wanted, one fetches and loads that. A policy is announced only after its files' digests were
verified, its tensors are the model's, and vLLM computes with it what the trainer does; vLLM is told of no others,
because one bad file kills its engine. On a preemption notice the node leaves the gateway once its requests are
done, and waits for its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import aiohttp
import structlog

from checkpoint.security import identity
from checkpoint.security.redaction import guard_output
from checkpoint.security.vouched import NotVouched
from checkpoint.store.errors import Corrupt, NotFound, StoreError
from checkpoint.store.run_store import Store
from policies.model import exit_codes
from policies.model.node_contract import NOTICE
from policies.model.spec import RunSpec
from policies.serving.fitness import AGAIN_S, Fitness
from policies.serving.wire import Announce, EngineWord, PolicyRef
from tasks.machine.children import adopt_orphans
from tasks.machine.lasting_log import lasting
from tasks.machine.node_env import NodeEnv, read_node_env, read_run_here
from tasks.machine.user_setup import set_up
from tasks.machine.versions import ROLLOUT, WrongVersions, check_versions
from tasks.rollout import vllm_server
from tasks.rollout.gateway_link import GatewayLink, GatewayUnreachable
from tasks.rollout.policy_check import PolicyCheck
from tasks.rollout.policy_folders import DiskFailed, Overtaken, PolicyFolders
from tasks.rollout.vllm_server import PolicyRefused, Server, ServerFailed, Unfit

log = structlog.get_logger()

STARTS_MAX = 3  # in a row that did not come up: then the node ends, and the controller decides
RESTART_WAIT_S = 0.5  # doubled for each such start
RETRY_S = 0.5  # before the gateway or the store is tried again
NOTICE_POLL_S = 0.25
ENGINE_POLL_S = 1.0
WHY_CHARS_MAX = 500  # of what is announced


class GaveUp(Exception):
    """vLLM does not come up here, or is not fit for the run."""


class Agent:
    """One node's agent."""

    def __init__(self, env: NodeEnv, spec: RunSpec, store: Store, http: aiohttp.ClientSession) -> None:
        self._env = env
        self._spec = spec
        self._store = store
        self._http = http
        self._gateway = GatewayLink(store, env, http)
        self._folders = PolicyFolders(store, Path(env.workdir) / "policies")
        self._check = PolicyCheck(spec)
        self._fitness = Fitness()
        self._server: Server | None = None
        self._policy: str | None = None  # what the server holds
        self._wanted: PolicyRef | None = None
        self._leaving = False
        self._engine: EngineWord | None = None
        self._changed = asyncio.Event()  # what is announced is no longer what is
        self._work = asyncio.Event()  # a server or a wanted policy is new

    async def run(self) -> None:
        """Work until cancelled, then leave the gateway and stop vLLM. Raises GaveUp."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._serve())
                group.create_task(self._announce())
                group.create_task(self._load_wanted())
                group.create_task(self._listen_to_engine())
                group.create_task(self._watch_for_notice())
        finally:
            if self._server is not None:
                await self._gateway.leave(self._server.boot_id)
                await self._server.stop()

    async def _serve(self) -> None:
        """Keep a server up. Each one is a new boot, on base weights."""
        failed = 0
        while True:
            try:
                server = await vllm_server.start(self._spec, self._env, self._http)
            except Unfit as error:
                log.error("vllm_unfit", why=str(error), hint="set rollout.recovery: exact in run.yaml")
                raise GaveUp(str(error)) from error
            except ServerFailed as error:
                failed += 1
                log.error("vllm_did_not_start", start=failed, of=STARTS_MAX, why=str(error))
                if failed == STARTS_MAX:
                    raise GaveUp(str(error)) from error
                await asyncio.sleep(RESTART_WAIT_S * 2**failed)
                continue
            failed = 0
            log.info("vllm_up", boot_id=server.boot_id, address=server.address)
            self._server = server
            self._announce_again()
            self._work.set()
            code = await server.ended()
            log.warning("vllm_ended", boot_id=server.boot_id, exit_code=code)
            self._server = self._policy = None
            self._announce_again()
            await self._gateway.leave(server.boot_id)
            await server.stop()

    async def _announce(self) -> None:
        """Tell the gateway what this node is, at every change and as a heartbeat."""
        while True:
            self._changed.clear()
            if self._server is None:
                await self._changed.wait()
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
            if reply.policy is not None and reply.policy != self._wanted:
                self._wanted = reply.policy
                self._work.set()

    async def _load_wanted(self) -> None:
        """Load the wanted policy whenever the server does not hold it, as long as trying may help."""
        while True:
            await self._work.wait()
            self._work.clear()
            server, wanted = self._server, self._wanted
            if server is None or wanted is None:
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
                folder = await asyncio.to_thread(self._folders.fetch, wanted, partial(self._wants, wanted))
                await self._load(server, wanted, folder)
            except Overtaken:
                self._work.set()
            except (Corrupt, NotFound, DiskFailed, OSError) as error:
                await self._failed(wanted, str(error), passes=True)
            except StoreError as error:
                log.error("policy_not_fetched", policy=wanted.label, why=str(error))
                await self._wait_for_work(RETRY_S)
            except PolicyRefused as error:
                if error.touched:
                    await self._end(server)
                await self._failed(wanted, error.reason, passes=False)
            except ServerFailed as error:
                await self._end(server)  # what it holds now is unknown
                await self._failed(wanted, str(error), passes=False)

    async def _end(self, server: Server) -> None:
        """Stop a server, so that `_serve` starts another."""
        if server is self._server:
            self._server = self._policy = None
        await server.stop()

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

    async def _load(self, server: Server, wanted: PolicyRef, folder: Path) -> None:
        canary = await asyncio.to_thread(self._check.passed, folder)
        if server is not self._server or wanted != self._wanted:
            self._work.set()  # overtaken while it was fetched
            return
        self._policy = None
        self._announce_again()
        await server.load(wanted.label, folder, canary)
        if server is self._server:
            self._policy, self._fitness = wanted.label, Fitness()
            self._announce_again()
            log.info("policy_loaded", policy=wanted.label, boot_id=server.boot_id, proved=canary is not None)
        await asyncio.to_thread(self._folders.keep_only, folder)

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
        )

    def _announce_again(self) -> None:
        self._changed.set()


def _name(wanted: PolicyRef) -> str:
    """By which tries are counted: a policy that was published anew is another one, whatever its content."""
    return f"{wanted.prefix} {wanted.label}"


async def serve(env: NodeEnv, spec: RunSpec, store: Store) -> int:
    """Run the agent until SIGTERM. Returns the exit code."""
    tls = aiohttp.TCPConnector(ssl=identity.client_context(env.token))  # for the URLs that say https
    async with aiohttp.ClientSession(connector=tls) as http:
        work = asyncio.ensure_future(Agent(env, spec, store, http).run())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, work.cancel)
        await asyncio.wait({work})
    if work.cancelled():
        log.info("stopped")
        return exit_codes.OK
    error = work.exception()
    if isinstance(error, ExceptionGroup) and error.subgroup(GaveUp) is not None:
        log.error("gave_up", hint="vLLM's own log is above")
        return exit_codes.FAILED
    work.result()
    raise AssertionError("the agent works until it is cancelled or fails")


def main() -> int:
    guard_output()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(lasting(sys.stderr)))
    env = read_node_env()
    store = Store(env.run)
    try:
        spec = read_run_here(store, env.token).spec
    except NotVouched as error:
        print(f"grpo-orch rollout: {error}", file=sys.stderr, flush=True)
        return exit_codes.BAD_SPEC
    if not set_up(Path(env.workdir), spec.rollout.setup):
        return exit_codes.BAD_SPEC
    try:
        check_versions(ROLLOUT)
    except WrongVersions as error:
        print(f"grpo-orch rollout: {error}", file=sys.stderr, flush=True)
        return exit_codes.BAD_SPEC
    shutil.rmtree(Path(env.workdir) / "policies", ignore_errors=True)
    adopt_orphans()
    return asyncio.run(serve(env, spec, store))


if __name__ == "__main__":
    sys.exit(main())
