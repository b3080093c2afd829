"""Sessions of agents over two nodes, of which one is killed half-way: `make bench-agents`.

64 sessions of 8 turns on real vLLM servers, with a tiny model on CPUs. An agent's tools take a moment between its
turns. Three ways to divide the turns between two servers: this gateway, a balancer that hashes the session, and
one that takes turns. Both balancers ask again elsewhere when a connection breaks, as their clients would. Each
side starts servers of its own, one side after the other. What one server does for all sessions is measured first.

The command prints one line of JSON, by side:

- `hit_rate`: of prompt tokens, those that a server had in its prefix cache;
- `turns_per_s`, `slowest_session_s`;
- `made_again`: tokens that servers made and no agent got;
- `failed`: turns that ended in an error that an agent saw.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.rig.local_run import NODE_PYTHON, ROOT
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.security.vouched import sign_run
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import manifest
from grpo_orch.policies.model.spec import Dataset, RolloutSpec, RunSpec, TrainerSpec
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.wire import CHAT, SESSIONS
from grpo_orch.tasks.machine.children import end_descendants

SESSIONS_AT_ONCE, TURNS = 64, 8
PROMPT_WORDS, TOOL_WORDS, ANSWER_TOKENS = 60, 20, 16
TOOL_S = 0.2  # at most
# A model with random weights says what no text shows (pad, bos, unk), after which no prompt begins as before.
SAMPLING: dict[str, Any] = {"max_tokens": ANSWER_TOKENS, "allowed_token_ids": [2, *range(4, 22)]}
START_S = 300.0
TOKEN = "the-run's-secret"
SIDES = ("gateway", "hashed", "in turn")
VLLM: dict[str, Any] = {
    "dtype": "float32",
    "enforce-eager": True,
    "kv-cache-memory-bytes": 2**26,
    "max-model-len": 1024,
    "block-size": 32,
    "generation-config": "vllm",
}
ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
COUNTS = {
    "queries": "vllm:prefix_cache_queries_total",
    "hits": "vllm:prefix_cache_hits_total",
    "made": "vllm:generation_tokens_total",
}
Ask = Callable[[int, list[dict[str, Any]]], Awaitable[dict[str, Any]]]


@dataclass(slots=True)
class Counts:
    """What servers have counted, in tokens."""

    queries: float = 0.0
    hits: float = 0.0
    made: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.queries + other.queries, self.hits + other.hits, self.made + other.made)


@dataclass(slots=True)
class Found:
    """What was measured of a side."""

    hit_rate: float
    turns_per_s: float
    slowest_session_s: float
    made_again: int
    failed: int


@dataclass(slots=True)
class Talk:
    """What the agents got."""

    tokens: int = 0
    turns: int = 0
    failed: int = 0
    took_s: list[float] = field(default_factory=list)


def words(chance: random.Random, count: int) -> str:
    return "".join(chance.choice([" it", " behind", " a", " door"]) for _ in range(count))


async def session(number: int, ask: Ask, talk: Talk, each: Callable[[], None]) -> None:
    """One agent: its tools answer by its number, whatever the model says."""
    chance, began_s = random.Random(number), time.monotonic()
    messages = [{"role": "user", "content": f"Find{words(chance, PROMPT_WORDS)}"}]
    for turn in range(TURNS):
        try:
            answer = await ask(number, messages)
        except (httpx.HTTPError, KeyError) as error:
            print(f"  session {number}, turn {turn}: {error!r}", flush=True)
            talk.failed += 1
            break
        talk.turns += 1
        talk.tokens += answer["usage"]["completion_tokens"]
        messages.append(answer["choices"][0]["message"])
        messages.append({"role": "user", "content": f"well{words(chance, TOOL_WORDS)}"})
        each()
        await asyncio.sleep(chance.uniform(0.0, TOOL_S))
    talk.took_s.append(time.monotonic() - began_s)


async def talk_all(ask: Ask, kill: Callable[[], None] | None) -> tuple[Talk, float]:
    """All sessions at once; `kill` is called when half of the turns are done."""
    talk, began_s = Talk(), time.monotonic()

    def each() -> None:
        if kill is not None and talk.turns == SESSIONS_AT_ONCE * TURNS // 2:
            kill()

    await asyncio.gather(*(session(number, ask, talk, each) for number in range(SESSIONS_AT_ONCE)))
    return talk, time.monotonic() - began_s


def read_counts(text: str) -> Counts:
    """From a server's metrics."""
    found = {
        name: sum(map(float, re.findall(rf"^{re.escape(key)}{{.*}} (\S+)$", text, re.MULTILINE)))
        for name, key in COUNTS.items()
    }
    return Counts(**found)


@dataclass(slots=True)
class Server:
    """One vLLM server: where it is, what it asks of who asks, and its processes."""

    url: str
    headers: dict[str, str]
    process: subprocess.Popen[bytes]
    last: Counts = field(default_factory=Counts)

    def counts(self) -> Counts:
        try:
            answer = httpx.get(f"{self.url}/metrics", headers=self.headers, timeout=30.0, trust_env=False)
            self.last = read_counts(answer.text)
        except httpx.HTTPError:
            pass  # it was killed
        return self.last

    def kill(self) -> None:
        """All of it at once, as when its machine is gone; what it had made is asked for at that moment."""
        self.counts()
        tree = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        for one in tree:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)


def measured(servers: list[Server], ask: Ask, *, kills: bool) -> Found:
    before = [one.counts() for one in servers]
    talk, took_s = asyncio.run(talk_all(ask, servers[0].kill if kills else None))
    after, total = [one.counts() for one in servers], Counts()
    for start, end in zip(before, after, strict=True):
        total += Counts(end.queries - start.queries, end.hits - start.hits, end.made - start.made)
    return Found(
        hit_rate=round(total.hits / total.queries, 3),
        turns_per_s=round(talk.turns / took_s, 1),
        slowest_session_s=round(max(talk.took_s), 1),
        made_again=int(total.made) - talk.tokens,
        failed=talk.failed,
    )


# Plain servers behind a plain balancer.


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def plain_server(model: Path, stack: ExitStack) -> Server:
    port = free_port()
    flags = [
        item
        for name, value in VLLM.items()
        for item in ((f"--{name}",) if value is True else (f"--{name}", str(value)))
    ]
    argv: list[str | Path] = [NODE_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *flags]
    argv += ["--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--distributed-executor-backend", UNIPROC]
    process = subprocess.Popen(
        argv, env={**os.environ, **ENV}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    stack.callback(end, process)
    return Server(f"http://127.0.0.1:{port}", {}, process)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for one in children:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()


@contextmanager
def plain_servers(model: Path, count: int) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        servers = [plain_server(model, stack) for _ in range(count)]
        for one in servers:
            until(lambda one=one: answers(f"{one.url}/health", {}), one.process)  # type: ignore[misc]
        yield servers


def balanced(servers: list[Server], choose: Callable[[int], int]) -> Ask:
    """Ask the server that a rule chooses, and the others in their order where a connection breaks."""
    client = httpx.AsyncClient(timeout=600.0, trust_env=False, limits=httpx.Limits(max_connections=None))

    async def ask(number: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
        first = choose(number)
        for at in range(len(servers)):
            server = servers[(first + at) % len(servers)]
            body = {"model": "policy", "messages": messages, **SAMPLING}
            try:  # without a seed: on CPUs vLLM ends with one where it computes a prompt in parts
                answer = await client.post(f"{server.url}{CHAT}", json=body)
            except httpx.TransportError:
                continue
            answer.raise_for_status()
            found: dict[str, Any] = answer.json()
            return found
        raise httpx.ConnectError("no server is left")

    return ask


def hashed(number: int) -> int:
    return hashlib.blake2b(str(number).encode()).digest()[0] % 2


# This project's nodes behind its gateway.


@contextmanager
def fleet(folder: Path, model: Path, count: int) -> Iterator[tuple[list[Server], Ask]]:
    with ExitStack() as stack:
        store = Store((folder / "store").as_uri())
        spec = RunSpec(
            name="agents",
            storage=store.url,
            trainer=TrainerSpec(model=str(model), dataset=Dataset(path="json"), reward_funcs=("x.y",)),
            grpo={},
            workdir=str(folder),
            rollout=RolloutSpec(vllm=VLLM, env=ENV),
        )
        documents.create_run(store, RunRecord(documents.SCHEMA, "agents", 0.0, spec))
        sign_run(store, TOKEN)
        version = PolicyVersion.parse("0-0")
        prefix = layout.policy(version, (0, 1, 1))
        weights = folder / "policy"
        weights.mkdir()
        (weights / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
        made = manifest.publish(store, prefix, weights, version, now_s=0.0)
        env = {**os.environ, **ENV, "GRPO_ORCH_RUN": store.url, "GRPO_ORCH_TOKEN": TOKEN}
        gateway = subprocess.Popen(
            [NODE_PYTHON, "-m", "grpo_orch.orchestrator.gateway"], env=env, cwd=ROOT, stderr=subprocess.DEVNULL
        )
        stack.callback(end, gateway)
        agents = [stack.enter_context(node(folder, f"rollout-{number}-i1", env)) for number in range(count)]
        until(lambda: documents.read_gateway(store) is not None, gateway)
        address = documents.read_gateway(store)
        assert address is not None
        policy = {"version": "0-0", "prefix": prefix, "digest": made.digest}
        http = httpx.Client(headers={"Authorization": f"Bearer {TOKEN}"}, base_url=address.url, trust_env=False)
        for number in range(SESSIONS_AT_ONCE):
            http.put(f"{SESSIONS}/s{number}", json={"policy": policy, "seed": number}).raise_for_status()
        until(lambda: sum(one["state"] == "serving" for one in members(http)) == count, agents[0])
        by_name = {one["node"]: one for one in members(http)}
        servers = [
            Server(
                f"http://{by_name[f'rollout-{number}-i1']['address']}", {"Authorization": f"Bearer {TOKEN}"}, agent
            )
            for number, agent in enumerate(agents)
        ]
        yield servers, through(address.url)


def members(http: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = http.get("/members").json()["members"]
    return found


@contextmanager
def node(folder: Path, name: str, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    workdir = folder / name
    workdir.mkdir()
    mine = {"GRPO_ORCH_NODE": name, "GRPO_ORCH_ATTEMPT": "1", "GRPO_ORCH_WORKDIR": str(workdir)}
    argv: list[str | Path] = [NODE_PYTHON, "-m", "grpo_orch.tasks.rollout.agent"]
    with (folder / f"{name}.log").open("wb") as out:
        process = subprocess.Popen(argv, env={**env, **mine}, cwd=ROOT, stdout=out, stderr=out)
        try:
            yield process
        finally:
            end(process)


def through(url: str) -> Ask:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    limits = httpx.Limits(max_connections=None)
    client = httpx.AsyncClient(base_url=url, headers=headers, timeout=600.0, trust_env=False, limits=limits)

    async def ask(number: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
        body = {"messages": messages, **SAMPLING}
        answer = await client.post(f"{SESSIONS}/s{number}{CHAT}", json=body)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    return ask


def answers(url: str, headers: dict[str, str]) -> bool:
    try:
        return httpx.get(url, headers=headers, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def until(ready: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    ends_s = time.monotonic() + START_S
    while not ready():
        if time.monotonic() > ends_s or process.poll() is not None:
            raise SystemExit(f"a server did not start: {process.args!r}")
        time.sleep(0.25)


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        make = ROOT / "examples" / "agent" / "make_model.py"
        argv: list[str | Path] = [NODE_PYTHON, make, "--out", base, "--context", str(VLLM["max-model-len"])]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        model, load = base / "model", os.getloadavg()[0]
        found: dict[str, Found] = {}
        with plain_servers(model, 1) as servers:
            found["one server"] = measured(servers, balanced(servers, lambda _: 0), kills=False)
        for side in SIDES:
            if side == "gateway":
                with fleet(base, model, 2) as (nodes, ask):
                    found[side] = measured(nodes, ask, kills=True)
            else:
                numbers = itertools.count()
                choose = hashed if side == "hashed" else lambda _, numbers=numbers: next(numbers) % 2
                with plain_servers(model, 2) as servers:
                    found[side] = measured(servers, balanced(servers, choose), kills=True)
        end_descendants(0.0)
    told = {side: asdict(one) for side, one in found.items()}
    print(json.dumps({**told, "sessions": SESSIONS_AT_ONCE, "turns": TURNS, "load": round(load, 2)}))


if __name__ == "__main__":
    main()
