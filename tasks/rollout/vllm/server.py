"""The vLLM server beside a rollout node's agent: its start, its weights, its end.

Each start is a boot with an id and a secret of its own; `tasks.rollout.vllm.guard` checks them inside that server.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import msgspec
import structlog

from checkpoint.security import identity
from checkpoint.store import layout
from policies.model.gpus import VISIBLE
from policies.model.node_contract import TOKEN_ENV
from policies.model.spec import RunSpec
from policies.serving.canary import Canary
from policies.serving.joining import READ_BYTES_PER_S
from policies.serving.position_trial import judge
from policies.serving.wire import COMPLETIONS, MODEL, NODE_IDLE_S, EngineWord, LoadPolicy, ProvePolicy
from policies.weights.adapters import BASE_MODEL
from tasks.machine.children import end_descendants, start_child
from tasks.machine.node_env import NodeEnv
from tasks.rollout.policy_folders import Staged
from tasks.rollout.vllm.flags import argv_of, takes_adapters, uncompiled_env

log = structlog.get_logger()

# What a node's engine says of itself, read beside it: how much it takes, and where its work is.
#
# vLLM's limits depend on its hardware and version (`max_num_seqs` is 1,024 on an H100, 256 on others, 128 a worker
# on CPUs), and its room for keys and values is known only once it is up.

# vLLM's gauges and counters, and what they are here. Each is there once for each engine: all are added up, but for
# the share of the room, of which the fullest engine decides.
_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_USAGE, _PREEMPTIONS = "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total"
NUMBER_END = 2.0**53  # of engines' counts
_TOKENS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine takes: requests at a time; tokens that it has room for, 0 if it does not say."""

    max_requests: int = 1
    kv_tokens: int = 0


def read_metrics(text: str) -> EngineWord | None:
    """Read vLLM's answer to GET /metrics; None for one without its numbers."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        if line.startswith("vllm:"):
            what, _, value = line.rpartition(" ")
            try:
                number = float(value)
            except ValueError:
                continue
            if 0.0 <= number < NUMBER_END:  # what is not in it, NaN among it, is no count and no share
                found.setdefault(what.partition("{")[0], []).append(number)
    if _RUNNING not in found:
        return None
    return EngineWord(
        running=int(sum(found[_RUNNING])),
        waiting=int(sum(found.get(_WAITING, []))),
        kv_usage=min(1.0, max(0.0, *found.get(_USAGE, []), 0.0)),
        preemptions=int(sum(found.get(_PREEMPTIONS, []))),
        tokens=int(sum(sum(found.get(name, [])) for name in _TOKENS)),
    )


BOOT_ENV = "GRPO_ORCH_BOOT"  # in the environment of vLLM's processes
HEALTH_POLL_S = 0.25
# The first request compiles kernels, which took 25 s on a cold machine; on a large model it may take longer.
TRIAL_TIMEOUT_S = 600.0
TRIALS = 24
CUT_TOKENS = 2  # after which the completions of the trial are cut
LOAD_TIMEOUT_S = 600.0  # and longer by what a disk takes to read a whole policy
METRICS_TIMEOUT_S = 5.0
STOP_S = 10.0


class ServerFailed(Exception):
    """The server ended, or did not do what was asked: start another."""


class PolicyRefused(Exception):
    """Here the policy is not what its trainer computes: `reason` says in one line what does not agree.

    None of it was served. With `touched` the engine's weights are those of no policy: start another server before
    anything else is loaded. Without, the engine holds what it held. This server would refuse it again.
    """

    def __init__(self, reason: str, *, touched: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.touched = touched


class Unfit(Exception):
    """This vLLM cannot do what run.yaml asks of it, and another start would not change that."""


@dataclass(frozen=True, slots=True)
class Server:
    """One boot of vLLM that is up."""

    boot_id: str
    address: str  # host and port
    url: str
    process: subprocess.Popen[bytes]
    _secret: str
    _http: aiohttp.ClientSession
    adapters: bool = False  # whether its policies are adapters, beside base weights that stay
    member: str = ""
    start_s: float = 0.0  # until it answered
    trial_s: float = 0.0  # for its first tokens
    limits: EngineLimits = field(default_factory=EngineLimits)  # known once it is up

    async def load(self, version: str, folder: Path, canary: Canary | None = None) -> None:
        """Have it load the weights in `folder`, which were verified, and compute the canary with them.

        Raises PolicyRefused, ServerFailed.
        """
        size_bytes = sum(path.stat().st_size for path in folder.iterdir())
        timeout_s = LOAD_TIMEOUT_S + size_bytes / READ_BYTES_PER_S
        await self._put(LoadPolicy(version, str(folder), canary, self.adapters), 204, timeout_s)

    async def overwrite(self, version: str, base: str, staged: Staged, canary: Canary | None) -> None:
        """Have it overwrite what has changed since the policy `base`, which it holds, and compute the canary.

        Raises PolicyRefused, ServerFailed.
        """
        await self._put(_changes(version, "", base, staged, canary), 204)

    async def try_changes(
        self, version: str, base: str, staged: Staged, canary: Canary | None, folder: Path
    ) -> str:
        """Have it overwrite what has changed, then load the same weights from `folder`. Returns why the two
        differ, empty where they do not. Raises PolicyRefused, ServerFailed."""
        return (await self._put(_changes(version, str(folder), base, staged, canary), 200)).decode()

    async def prove(self, version: str, folder: Path, first: int, step: int) -> bool:
        """Have it compare each `step`th tensor that changes with the file in `folder`, from the `first`. Returns
        whether it holds that policy. Raises ServerFailed: it serves nobody any more where a tensor differs."""
        body = msgspec.json.encode(ProvePolicy(version, str(folder / layout.MODEL), first, step))
        status, said = await self._exchange("PUT", "/grpo/proof", body, LOAD_TIMEOUT_S)
        if status not in (200, 204):
            raise ServerFailed(_unexpected("PUT", "/grpo/proof", status, said))
        return status == 200

    async def _put(self, policy: LoadPolicy, wanted: int, timeout_s: float = LOAD_TIMEOUT_S) -> bytes:
        status, said = await self._exchange("PUT", "/grpo/policy", msgspec.json.encode(policy), timeout_s)
        if status == 422:
            raise PolicyRefused(said.decode(errors="replace"), touched=not self.adapters)
        if status != wanted:
            raise ServerFailed(_unexpected("PUT", "/grpo/policy", status, said))
        return said

    async def await_weights(self) -> None:
        """Have an engine that was started without weights watch for its first. Raises ServerFailed."""
        await self._ask("PUT", "/grpo/bare", b"", 204, TRIAL_TIMEOUT_S)

    async def try_out(self) -> None:
        """Have it make a few tokens from the weights that it has, for nobody. Raises ServerFailed."""
        await self._trial(0, [])

    async def sample_by_position(self) -> None:
        """Have it draw each token by seed and position, and try that a completion that was cut goes on as it would
        have without. Raises Unfit, ServerFailed."""
        if reason := await self._ask("PUT", "/grpo/sampling", b"", 200, TRIAL_TIMEOUT_S):
            raise Unfit(reason.decode())
        await self.try_out()  # the first request may take long
        whole = await asyncio.gather(*(self._trial(seed, []) for seed in range(TRIALS)))
        cut = await asyncio.gather(*(self._trial(seed, one[:CUT_TOKENS]) for seed, one in enumerate(whole)))
        trial = judge([one[CUT_TOKENS] for one in whole], [one[0] for one in cut])
        log.info("drawing_tried", agree=round(trial.agree, 3), chance=round(trial.chance, 3))
        if not trial.passed:
            raise Unfit(
                f"of {TRIALS} completions that were cut {trial.agree:.0%} went on as the whole ones did, and "
                f"chance alone gives {trial.chance:.0%}: it does not draw by seed and position"
            )

    async def _trial(self, seed: int, begun: list[int]) -> list[int]:
        """The rest of a completion of CUT_TOKENS + 1 tokens, after those that are `begun`."""
        body = {
            "model": BASE_MODEL if self.adapters else MODEL,
            "prompt": [0, 0, *begun],
            "max_tokens": CUT_TOKENS + 1 - len(begun),
            "ignore_eos": True,
            "seed": seed,
            "logprobs": 0,
            "temperature": 2.0,  # as hot as it may be: the draws decide, not the weights
            "return_token_ids": True,
        }
        made = await self._ask("POST", COMPLETIONS, json.dumps(body).encode(), 200, TRIAL_TIMEOUT_S)
        tokens: list[int] = json.loads(made)["choices"][0]["token_ids"]
        return tokens

    async def ask_limits(self) -> EngineLimits:
        """What its engine takes. Raises ServerFailed."""
        said = await self._ask("GET", "/grpo/engine", b"", 200, METRICS_TIMEOUT_S)
        return msgspec.json.decode(said, type=EngineLimits)

    async def ask_engine(self) -> EngineWord | None:
        """The numbers of its engine; None where it tells none. Raises ServerFailed."""
        said = await self._ask("GET", "/metrics", b"", 200, METRICS_TIMEOUT_S)
        return read_metrics(said.decode(errors="replace"))

    async def ended(self) -> int:
        """Return its exit code once it has ended."""
        return await asyncio.to_thread(self.process.wait)

    async def stop(self) -> None:
        """End it and all that it started."""
        await asyncio.to_thread(stop, self.process, self.boot_id)

    async def _ask(self, method: str, path: str, body: bytes, status: int, timeout_s: float) -> bytes:
        answered, said = await self._exchange(method, path, body, timeout_s)
        if answered != status:
            raise ServerFailed(_unexpected(method, path, answered, said))
        return said

    async def _exchange(self, method: str, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self._secret}", "Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        url = f"{self.url}{path}"
        try:
            async with self._http.request(method, url, data=body, headers=headers, timeout=timeout) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ServerFailed(f"{method} {path}: {str(error) or type(error).__name__}") from error


def _changes(version: str, path: str, base: str, staged: Staged, canary: Canary | None) -> LoadPolicy:
    deltas = [str(one) for one in staged.deltas]
    return LoadPolicy(version, path, canary, base=base, deltas=deltas, digests=staged.digests)


def _unexpected(method: str, path: str, status: int, said: bytes) -> str:
    return f"{method} {path}: {status} {said[:500].decode(errors='replace')}"


async def start(
    spec: RunSpec, node: NodeEnv, http: aiohttp.ClientSession, *, bare: bool = False, gpus: str = ""
) -> Server:
    """Start a server, `bare` without the base model's weights, on these `gpus` or on all that it finds, and return
    once it has made its first tokens. `node.node` is the member's name.

    Raises ServerFailed, Unfit.
    """
    try:
        boot_id, secret, port = secrets.token_hex(8), secrets.token_hex(32), _free_port(node.host)
    except OSError as error:
        raise ServerFailed(f"no free port on {node.host}: {error}") from error
    adapters = await asyncio.to_thread(takes_adapters, spec)
    pem = None
    if identity.protects(node.host):
        pem = Path(node.workdir) / f"identity-{node.node}.pem"
        try:
            identity.write_pem(node.token, pem)
        except OSError as error:
            raise ServerFailed(f"{pem}: {error}") from error
    env = {
        **os.environ,
        **uncompiled_env(spec),
        **spec.rollout.env,
        **({VISIBLE: gpus} if gpus else {}),
        TOKEN_ENV: node.token,
        BOOT_ENV: boot_id,
        "GRPO_ORCH_NODE_SECRET": secret,
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(NODE_IDLE_S),  # 5 s by default: shorter than a step
        "SPT_NOENV": "1",  # vLLM's engine renames itself; without this it would overwrite its environment
    }
    argv = [
        sys.executable,
        "-m",
        "tasks.machine.process_tree",
        sys.executable,
        *argv_of(spec, node.host, port, pem, adapters=adapters, bare=bare),
    ]
    # A signal that `process_tree` can act upon: it ends vLLM's processes, then itself.
    process = start_child(argv, env, death_signal=signal.SIGTERM)
    where = identity.address(node.host, port), identity.url(node.host, port)
    server = Server(boot_id, *where, process, secret, http, adapters, node.node)
    try:
        begun_s = time.monotonic()
        await _until_healthy(server, node.token, http)
        up_s = time.monotonic()
        if bare:
            await server.await_weights()
        await (server.sample_by_position() if spec.rollout.recovery == "continue" else server.try_out())
        tried_s = time.monotonic()
        limits = await server.ask_limits()
        return replace(server, start_s=up_s - begun_s, trial_s=tried_s - up_s, limits=limits)
    except BaseException:
        await server.stop()
        raise


def stop(process: subprocess.Popen[bytes], boot_id: str) -> None:
    """End vLLM's process tree, and what is left of one whose root was killed; no other boot's."""
    process.terminate()
    try:
        process.wait(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    end_descendants(0.0, marked=(BOOT_ENV, boot_id))


async def _until_healthy(server: Server, token: str, http: aiohttp.ClientSession) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    while server.process.poll() is None:
        try:
            async with http.get(f"{server.url}/health", headers=headers) as answer:
                if answer.status == 200:
                    return
        except (aiohttp.ClientError, OSError):
            pass  # not listening yet
        await asyncio.sleep(HEALTH_POLL_S)
    raise ServerFailed(f"vLLM ended with exit code {server.process.returncode} before it was up; its log is above")


def _free_port(host: str) -> int:
    """A port that was free a moment ago; should another take it, vLLM ends and the next start takes another."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])
