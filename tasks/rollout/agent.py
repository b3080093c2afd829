"""A rollout node's agent, `python -m tasks.rollout.agent`: what it reads before it begins, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
from pathlib import Path

import aiohttp
import structlog

from checkpoint.security import identity
from checkpoint.security.redaction import guard_output
from checkpoint.security.vouched import NotVouched
from checkpoint.store.run_store import Store
from policies.model import exit_codes
from policies.model.spec import RunSpec
from tasks.machine.lasting_log import lasting
from tasks.machine.node_env import NodeEnv, read_node_env, read_run_here
from tasks.machine.processes.children import adopt_orphans
from tasks.machine.user_setup import set_up
from tasks.machine.versions import ROLLOUT, WrongVersions, check_versions
from tasks.peers.peers import Peers, may_pay
from tasks.rollout.node_agent import Agent, GaveUp

log = structlog.get_logger()


async def serve(env: NodeEnv, spec: RunSpec, store: Store) -> int:
    """Run the agent until SIGTERM. Returns the exit code."""
    tls = aiohttp.TCPConnector(ssl=identity.client_context(env.token))  # for the URLs that say https
    peers = Peers(env.host, env.token) if may_pay(store.url, store.options, env.host) else None
    async with aiohttp.ClientSession(connector=tls) as http:
        with peers or contextlib.nullcontext():
            work = asyncio.ensure_future(Agent(env, spec, store, http, peers).run())
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
