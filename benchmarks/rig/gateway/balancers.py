"""What is measured side by side: our gateway, HAProxy, sglang-router, vllm-router. How each is started and asked.

The others get what they have against dying servers: active checks, as often as they allow up to twice a second,
retries, requests that are kept whole until they are answered.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.rig.gateway.fakes import PORT as FAKE_PORT
from benchmarks.rig.gateway.fakes import FakeVllm, Prompt
from benchmarks.rig.local_run import ROOT
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.serving.wire import HEADER_POLICY, Batch, CompletionRequest, PolicyRef

HOST, PORT = "127.0.0.1", 9000
TOKEN = "the-run's-secret"
POLICY = PolicyRef("0-1", "policies/0-1")
GROUP = 8  # completions of one prompt
START_S = 40.0
BALANCER_CPU, LOAD_CPU = 0, 1
ROUTERS = ROOT / "build" / "routers-env"
ROUTER_VERSIONS = {"sglang-router": "0.3.2", "vllm-router": "0.1.17"}

HAPROXY = """
global
    nbthread 1
    maxconn 4096
    tune.bufsize 131072
defaults
    mode http
    option http-no-delay
    option http-buffer-request
    option redispatch 1
    retries 3
    retry-on all-retryable-errors
    timeout connect 1s
    timeout check 1s
    timeout client 60s
    timeout server 60s
frontend trainer
    bind {host}:{port} backlog 4096
    default_backend nodes
backend nodes
    balance leastconn
    option httpchk GET /health
    default-server check inter 500ms fall 2 rise 2 on-marked-down shutdown-sessions
{servers}
"""


@dataclass(frozen=True, slots=True)
class Ask:
    """One completion to be asked for."""

    seed: int
    prompt: Prompt
    max_tokens: int


Requests = Callable[[Sequence[Ask]], list[bytes]]


def pin(cpu: int, pinned: bool) -> list[str]:
    """What a command begins with to run on that processor alone."""
    return ["taskset", "-c", str(cpu)] if pinned else []


@dataclass
class Stand:
    """Where a balancer is started: its processes end with `exits`, its files are in `folder`.

    Where `pinned`, the balancer has one processor, and all else another one.
    """

    folder: Path
    fakes: Sequence[FakeVllm]
    exits: ExitStack
    pinned: bool
    port: int = PORT  # for the balancer; the next one may be used, too

    def spawn(self, command: Sequence[str], **env: str) -> subprocess.Popen[bytes]:
        """Start the balancer, to be killed in the end."""
        return self._spawn([*pin(BALANCER_CPU, self.pinned), *command], env)

    def spawn_beside(self, command: Sequence[str], **env: str) -> subprocess.Popen[bytes]:
        """Start something else, to be killed in the end."""
        return self._spawn([*pin(LOAD_CPU, self.pinned), *command], env)

    def _spawn(self, command: Sequence[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        log = self.exits.enter_context((self.folder / "log").open("ab"))
        process = subprocess.Popen(command, env={**os.environ, **env}, stdout=log, stderr=log, cwd=ROOT)
        self.exits.callback(end, process)
        return process


@dataclass(frozen=True, slots=True)
class Running:
    """A balancer that was started. `agents` announce its servers, where it wants that, in the servers' order."""

    process: subprocess.Popen[bytes]
    port: int
    host: str = HOST
    agents: Sequence[subprocess.Popen[bytes]] = ()

    def cpu_s(self) -> float:
        """User and system time of all its threads so far."""
        return time.clock_gettime((~self.process.pid << 3) | 2)  # the kernel's name for a process's clock


@dataclass(frozen=True, slots=True)
class System:
    """A balancer, asked in one way.

    Args:
        name: as the tables have it.
        start: starts it.
        requests: the HTTP requests for some completions.
        batch: whether that is one request for all of them.
        text: whether prompts must be text, because it refuses token ids.
    """

    name: str
    start: Callable[[Stand], Running]
    requests: Requests
    batch: bool = False
    text: bool = False

    def asks(self, count: int, max_tokens: int, prompt_tokens: int = 64) -> list[Ask]:
        """Completions to ask for, GROUP of each prompt."""
        prompts: list[Prompt] = [tuple(range(n, n + prompt_tokens)) for n in range(0, count, GROUP)]
        if self.text:
            prompts = [" ".join(map(str, prompt)) for prompt in prompts]
        return [Ask(seed, prompts[seed // GROUP], max_tokens) for seed in range(count)]


def start_gateway(stand: Stand, loads_s: Sequence[float] = ()) -> Running:
    """Its members hold POLICY from the start; with `loads_s` each loads what is wanted, in so long a time."""
    store = Store((stand.folder / "store").as_uri())
    env = {"GRPO_ORCH_RUN": store.url, "GRPO_ORCH_TOKEN": TOKEN, "GRPO_ORCH_GATEWAY_HOST": HOST}
    process = stand.spawn([sys.executable, "-m", "grpo_orch.orchestrator.gateway"], **env)
    deadline_s = time.monotonic() + START_S
    while (address := documents.read_gateway(store)) is None:
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"the gateway did not start: {(stand.folder / 'log').read_text()[-2000:]}")
        time.sleep(0.05)
    agents = []
    for number, fake in enumerate(stand.fakes):
        said = [address.url, f"rollout-{number}", fake.address, POLICY.label]
        said += [str(loads_s[number])] if loads_s else []
        agents.append(stand.spawn_beside([sys.executable, "-m", "benchmarks.rig.gateway.announcer", *said], **env))
    return Running(process, int(address.url.rsplit(":", 1)[1]), agents=agents)


def start_haproxy(stand: Stand) -> Running:
    config = stand.folder / "haproxy.cfg"
    servers = "\n".join(f"    server s{n} {fake.address}" for n, fake in enumerate(stand.fakes))
    config.write_text(HAPROXY.format(host=HOST, port=stand.port, servers=servers))
    return Running(stand.spawn(["haproxy", "-db", "-f", str(config)]), stand.port)


def _start_router(stand: Stand, module: str, log_level: str) -> Running:
    urls = [f"http://{fake.address}" for fake in stand.fakes]
    checks = ["--health-check-interval-secs", "1", "--health-check-timeout-secs", "1"]
    checks += ["--health-failure-threshold", "2", "--health-success-threshold", "1"]
    command = [str(ROUTERS / "bin" / "python"), "-m", f"{module}.launch_router", "--host", HOST]
    command += ["--port", str(stand.port), "--prometheus-port", str(stand.port + 1)]
    command += ["--worker-urls", *urls, "--policy", "round_robin", "--max-concurrent-requests", "16384"]
    command += ["--worker-startup-check-interval", "1", "--log-level", log_level]
    return Running(stand.spawn([*command, *checks]), stand.port)


def start_sglang_router(stand: Stand) -> Running:
    return _start_router(stand, "sglang_router", "warn")


def start_vllm_router(stand: Stand) -> Running:
    return _start_router(stand, "vllm_router", "warning")


def start_nothing(stand: Stand) -> Running:
    """The client speaks to one of the servers itself."""
    return Running(stand.fakes[0].process, FAKE_PORT, host=stand.fakes[0].host)


def batch_request(asks: Sequence[Ask]) -> list[bytes]:
    """All in one request to our gateway, which answers with a line for each."""
    wanted = [CompletionRequest(n, list(map(int, ask.prompt)), ask.seed) for n, ask in enumerate(asks)]
    salt = secrets.token_hex(8)  # or the gateway would hand out what it keeps of the batch before
    sampling = {"temperature": 1.0, "max_tokens": asks[0].max_tokens, "cache_salt": salt}
    batch = Batch(POLICY, sampling, wanted, deadline_s=60.0)
    return [_post("/v1/rollouts", msgspec.json.encode(batch))]


def streams(asks: Sequence[Ask]) -> list[bytes]:
    """One request each, answered by events."""
    return [_post("/v1/completions", json.dumps(_body(ask, stream=True)).encode()) for ask in asks]


def documents_whole(asks: Sequence[Ask]) -> list[bytes]:
    """One request each, answered by one JSON document."""
    return [_post("/v1/completions", json.dumps(_body(ask, stream=False)).encode()) for ask in asks]


def _body(ask: Ask, *, stream: bool) -> dict[str, Any]:
    sampling = {"temperature": 1.0, "max_tokens": ask.max_tokens, "logprobs": 0, "return_token_ids": True}
    return {"model": "policy", "prompt": ask.prompt, "seed": ask.seed, "stream": stream, **sampling}


def _post(path: str, body: bytes) -> bytes:
    ours = f"Authorization: Bearer {TOKEN}\r\n{HEADER_POLICY}: {POLICY.label}\r\n"
    kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\n{ours}{kind}\r\n".encode() + body


NOBODY = "no balancer"
OURS = System("grpo-orch", start_gateway, batch_request, batch=True)


def ours_as(requests: Requests) -> System:
    """Our gateway, asked as an OpenAI server."""
    return System("grpo-orch", start_gateway, requests)


def others(requests: Requests) -> list[System]:
    """Those that are measured beside ours, asked in this way."""
    return [
        System("haproxy", start_haproxy, requests),
        System("sglang-router", start_sglang_router, requests, text=True),
        System("vllm-router", start_vllm_router, requests),
    ]


def install() -> dict[str, str]:
    """Install the routers into an environment of their own. Return the version of each system that is there."""
    found = {"grpo-orch": version("grpo-orch")}
    if shutil.which("haproxy"):
        said = subprocess.run(["haproxy", "-v"], capture_output=True, text=True, check=True).stdout
        found["haproxy"] = said.split()[2]
    if not (ROUTERS / "bin").exists():
        subprocess.run([sys.executable, "-m", "venv", ROUTERS], check=True)
    pip = [str(ROUTERS / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    for name, wanted in ROUTER_VERSIONS.items():
        there = list(ROUTERS.glob(f"lib/*/site-packages/{name.replace('-', '_')}-{wanted}.dist-info"))
        if there or subprocess.run([*pip, "install", f"{name}=={wanted}"], check=False).returncode == 0:
            found[name] = wanted
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that was started here."""
    process.kill()
    process.wait()
