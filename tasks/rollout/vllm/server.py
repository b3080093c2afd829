"""Start, control and stop the vLLM server of a rollout node.

Each start is a boot with its own id and secret, which `tasks.rollout.vllm.guard` checks inside the server.
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

from grpo_orch.checkpoint.security import identity
from grpo_orch.checkpoint.store import layout
from grpo_orch.policies.model.gpus import VISIBLE
from grpo_orch.policies.model.node_contract import TOKEN_ENV
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.serving.canary import Canary
from grpo_orch.policies.serving.joining import READ_BYTES_PER_S
from grpo_orch.policies.serving.sampling_check import judge
from grpo_orch.policies.serving.wire import COMPLETIONS, MODEL, NODE_IDLE_S, EngineStats, LoadPolicy, ProvePolicy
from grpo_orch.policies.weights.adapters import BASE_MODEL
from grpo_orch.tasks.machine.children import end_descendants, start_child
from grpo_orch.tasks.machine.node_env import NodeEnv
from grpo_orch.tasks.rollout.policy_folders import Staged
from grpo_orch.tasks.rollout.vllm.flags import argv_of, takes_adapters, uncompiled_env

log = structlog.get_logger()

# Statistics and limits of the engine. vLLM's limits depend on its hardware and version (`max_num_seqs` is 1,024 on
# an H100, 256 on other GPUs, 128 per worker on CPUs), and its KV cache size is known only after the start.

# vLLM's gauges and counters, one for each engine. They are summed, except for the usage, where the maximum counts.
_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_USAGE, _PREEMPTIONS = "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total"
NUMBER_END = 2.0**53  # exclusive maximum of a count
_TOKENS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The engine's limits: concurrent requests, and tokens in its KV cache (0 if unknown)."""

    max_requests: int = 1
    kv_tokens: int = 0


def read_metrics(text: str) -> EngineStats | None:
    """Parse vLLM's response to GET /metrics; None if it has no engine statistics."""
    samples: dict[str, list[float]] = {}
    for line in text.splitlines():
        if line.startswith("vllm:"):
            name, _, value = line.rpartition(" ")
            try:
                number = float(value)
            except ValueError:
                continue
            if 0.0 <= number < NUMBER_END:  # excludes NaN
                samples.setdefault(name.partition("{")[0], []).append(number)
    if _RUNNING not in samples:
        return None
    return EngineStats(
        running=int(sum(samples[_RUNNING])),
        waiting=int(sum(samples.get(_WAITING, []))),
        kv_usage=min(1.0, max(0.0, *samples.get(_USAGE, []), 0.0)),
        preemptions=int(sum(samples.get(_PREEMPTIONS, []))),
        tokens=int(sum(sum(samples.get(name, [])) for name in _TOKENS)),
    )


BOOT_ENV = "GRPO_ORCH_BOOT"  # in the environment of vLLM's processes
HEALTH_POLL_S = 0.25
# The first request compiles kernels, which took 25 s on a new machine; a large model may take longer.
TRIAL_TIMEOUT_S = 600.0
TRIALS = 24
CUT_TOKENS = 2  # the trial's completions are cut after this many tokens
LOAD_TIMEOUT_S = 600.0  # plus the time to read a whole policy from disk
METRICS_TIMEOUT_S = 5.0
STOP_S = 10.0


class ServerFailed(Exception):
    """The server ended or failed a request; start another one."""


class PolicyRefused(Exception):
    """The engine disagrees with the policy's trainer. `reason` explains that in one line.

    The policy was not served, and this server would refuse it again. If `touched`, the engine does not hold any
    policy: start another server before loading anything else. Otherwise the engine still holds its old policy.
    """

    def __init__(self, reason: str, *, touched: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.touched = touched


class Unfit(Exception):
    """This vLLM cannot do what run.yaml requires, and a restart would not change that."""


@dataclass(frozen=True, slots=True)
class Server:
    """One running boot of vLLM."""

    boot_id: str
    address: str  # host and port
    url: str
    process: subprocess.Popen[bytes]
    _secret: str
    _http: aiohttp.ClientSession
    adapters: bool = False  # policies are adapters; the base weights never change
    member: str = ""
    start_s: float = 0.0  # until the first response
    trial_s: float = 0.0  # from then until the first tokens
    limits: EngineLimits = field(default_factory=EngineLimits)  # known after the start

    async def load(self, version: str, folder: Path, canary: Canary | None = None) -> None:
        """Load verified weights from `folder` and compute the canary. Raises PolicyRefused, ServerFailed."""
        size_bytes = sum(path.stat().st_size for path in folder.iterdir())
        timeout_s = LOAD_TIMEOUT_S + size_bytes / READ_BYTES_PER_S
        await self._put(LoadPolicy(version, str(folder), canary, self.adapters), 204, timeout_s)

    async def overwrite(self, version: str, base: str, staged: Staged, canary: Canary | None) -> None:
        """Apply deltas to the policy `base`, which the engine holds, and compute the canary.

        Raises PolicyRefused, ServerFailed.
        """
        await self._put(_delta_request(version, "", base, staged, canary), 204)

    async def try_deltas(
        self, version: str, base: str, staged: Staged, canary: Canary | None, folder: Path
    ) -> str:
        """Apply deltas, then load the same weights from `folder`.

        Returns a reason if deltas do not work with this engine, else an empty text. Raises PolicyRefused,
        ServerFailed.
        """
        return (await self._put(_delta_request(version, str(folder), base, staged, canary), 200)).decode()

    async def prove(self, version: str, folder: Path, first: int, step: int) -> bool:
        """Compare each `step`th tensor that deltas change, from the `first`, with the file in `folder`.

        Returns whether the engine holds that policy. Raises ServerFailed if a tensor differs; then the engine
        serves no requests.
        """
        body = msgspec.json.encode(ProvePolicy(version, str(folder / layout.MODEL), first, step))
        status, content = await self._request("PUT", "/grpo/proof", body, LOAD_TIMEOUT_S)
        if status not in (200, 204):
            raise ServerFailed(_unexpected("PUT", "/grpo/proof", status, content))
        return status == 200

    async def _put(self, policy: LoadPolicy, expected: int, timeout_s: float = LOAD_TIMEOUT_S) -> bytes:
        status, content = await self._request("PUT", "/grpo/policy", msgspec.json.encode(policy), timeout_s)
        if status == 422:
            raise PolicyRefused(content.decode(errors="replace"), touched=not self.adapters)
        if status != expected:
            raise ServerFailed(_unexpected("PUT", "/grpo/policy", status, content))
        return content

    async def await_weights(self) -> None:
        """Prepare an engine that started without weights for its first policy. Raises ServerFailed."""
        await self._call("PUT", "/grpo/bare", b"", 204, TRIAL_TIMEOUT_S)

    async def try_out(self) -> None:
        """Generate a few tokens and discard them. Raises ServerFailed."""
        await self._trial(0, [])

    async def sample_by_position(self) -> None:
        """Switch the engine to sampling by seed and position, and test that cut completions continue identically.

        Raises Unfit, ServerFailed.
        """
        if reason := await self._call("PUT", "/grpo/sampling", b"", 200, TRIAL_TIMEOUT_S):
            raise Unfit(reason.decode())
        await self.try_out()  # the first request may take long
        whole = await asyncio.gather(*(self._trial(seed, []) for seed in range(TRIALS)))
        continued = await asyncio.gather(
            *(self._trial(seed, tokens[:CUT_TOKENS]) for seed, tokens in enumerate(whole))
        )
        trial = judge([tokens[CUT_TOKENS] for tokens in whole], [tokens[0] for tokens in continued])
        log.info("sampling_tested", agree=round(trial.agree, 3), chance=round(trial.chance, 3))
        if not trial.passed:
            raise Unfit(
                f"only {trial.agree:.0%} of {TRIALS} cut completions continued like the uncut ones, where chance "
                f"gives {trial.chance:.0%}: this vLLM does not sample by seed and position"
            )

    async def _trial(self, seed: int, start: list[int]) -> list[int]:
        """Return the rest of a completion of CUT_TOKENS + 1 tokens that begins with `start`."""
        body = {
            "model": BASE_MODEL if self.adapters else MODEL,
            "prompt": [0, 0, *start],
            "max_tokens": CUT_TOKENS + 1 - len(start),
            "ignore_eos": True,
            "seed": seed,
            "logprobs": 0,
            "temperature": 2.0,  # the maximum, so that the draws decide and not the weights
            "return_token_ids": True,
        }
        completion = await self._call("POST", COMPLETIONS, json.dumps(body).encode(), 200, TRIAL_TIMEOUT_S)
        tokens: list[int] = json.loads(completion)["choices"][0]["token_ids"]
        return tokens

    async def fetch_limits(self) -> EngineLimits:
        """Return the engine's limits. Raises ServerFailed."""
        content = await self._call("GET", "/grpo/engine", b"", 200, METRICS_TIMEOUT_S)
        return msgspec.json.decode(content, type=EngineLimits)

    async def fetch_stats(self) -> EngineStats | None:
        """Return the engine's statistics, if it reports any. Raises ServerFailed."""
        content = await self._call("GET", "/metrics", b"", 200, METRICS_TIMEOUT_S)
        return read_metrics(content.decode(errors="replace"))

    async def ended(self) -> int:
        """Wait for the server's end. Returns its exit code."""
        return await asyncio.to_thread(self.process.wait)

    async def stop(self) -> None:
        """End the server and its descendants."""
        await asyncio.to_thread(stop, self.process, self.boot_id)

    async def _call(self, method: str, path: str, body: bytes, expected: int, timeout_s: float) -> bytes:
        status, content = await self._request(method, path, body, timeout_s)
        if status != expected:
            raise ServerFailed(_unexpected(method, path, status, content))
        return content

    async def _request(self, method: str, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self._secret}", "Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        url = f"{self.url}{path}"
        try:
            async with self._http.request(method, url, data=body, headers=headers, timeout=timeout) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ServerFailed(f"{method} {path}: {str(error) or type(error).__name__}") from error


def _delta_request(version: str, path: str, base: str, staged: Staged, canary: Canary | None) -> LoadPolicy:
    deltas = [str(delta) for delta in staged.deltas]
    return LoadPolicy(version, path, canary, base=base, deltas=deltas, digests=staged.digests)


def _unexpected(method: str, path: str, status: int, content: bytes) -> str:
    return f"{method} {path}: {status} {content[:500].decode(errors='replace')}"


async def start(
    spec: RunSpec, node: NodeEnv, http: aiohttp.ClientSession, *, bare: bool = False, gpus: str = ""
) -> Server:
    """Start a server, and return it once it has generated its first tokens. Raises ServerFailed, Unfit.

    Args:
        node: the machine's environment with the member's name as `node`.
        bare: start without the base model's weights.
        gpus: visible GPUs; empty for all.
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
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(NODE_IDLE_S),  # the default, 5 s, is shorter than a step
        "SPT_NOENV": "1",  # keeps the environment readable when vLLM's engine sets its process title
    }
    argv = [
        sys.executable,
        "-m",
        "grpo_orch.tasks.machine.process_tree",
        sys.executable,
        *argv_of(spec, node.host, port, pem, adapters=adapters, bare=bare),
    ]
    # `process_tree` handles SIGTERM by ending vLLM's processes, then itself.
    process = start_child(argv, env, death_signal=signal.SIGTERM)
    address, url = identity.address(node.host, port), identity.url(node.host, port)
    server = Server(boot_id, address, url, process, secret, http, adapters, node.node)
    try:
        begun_s = time.monotonic()
        await _until_healthy(server, node.token, http)
        up_s = time.monotonic()
        if bare:
            await server.await_weights()
        await (server.sample_by_position() if spec.rollout.recovery == "continue" else server.try_out())
        tried_s = time.monotonic()
        limits = await server.fetch_limits()
        return replace(server, start_s=up_s - begun_s, trial_s=tried_s - up_s, limits=limits)
    except BaseException:
        await server.stop()
        raise


def stop(process: subprocess.Popen[bytes], boot_id: str) -> None:
    """End the boot's process tree, including processes whose parent was killed."""
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
    raise ServerFailed(f"vLLM exited with code {server.process.returncode} during its start; see its log above")


def _free_port(host: str) -> int:
    """Return a free port. If another process takes it first, vLLM ends and the next start uses another port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])
