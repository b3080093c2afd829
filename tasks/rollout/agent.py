"""Start a rollout node's agent, `python -m grpo_orch.tasks.rollout.agent`, and report how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO, cast

import aiohttp
import structlog

from grpo_orch.checkpoint.security import identity
from grpo_orch.checkpoint.security.redaction import guard_output
from grpo_orch.checkpoint.security.vouched import UntrustedRun
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
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.vocabulary import Role
from grpo_orch.tasks.machine.children import adopt_orphans
from grpo_orch.tasks.machine.exit_note import leave_reason
from grpo_orch.tasks.machine.launching import counted_gpus, set_up
from grpo_orch.tasks.machine.node_env import NodeEnv, read_node_env, read_run_here
from grpo_orch.tasks.machine.versions import ROLLOUT, DriverTooOld, WrongVersions, check_versions
from grpo_orch.tasks.rollout.node_agent import Agent
from grpo_orch.tasks.rollout.rollout_engine import EngineAbandoned

log = structlog.get_logger()


def lossy(stream: TextIO) -> TextIO:
    """Wrap a log stream so that it drops lines instead of raising OSError, for example when the disk is full."""
    return cast("TextIO", _LossyStream(stream))


class _LossyStream:
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
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(lossy(sys.stderr)))
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
