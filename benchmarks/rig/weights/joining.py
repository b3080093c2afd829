"""A rollout node that joins a run whose policy is there already: from its agent's start to its first token.

Agent, vLLM on a CPU and gateway are processes, the store an S3 server behind a proxy that slows what the node
reads. The tiny model stands for a large one: what counts is how long the policy travels beside vLLM's start.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from benchmarks.rig.local_run import NODE_PYTHON, ROOT, make_tiny
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.security.vouched import sign_run
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import OPTIONS_ENV, Store
from grpo_orch.checkpoint.stream import manifest
from grpo_orch.policies.model.spec import Dataset, RolloutSpec, RunSpec, TrainerSpec
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.gateway_status import GatewayStatus
from grpo_orch.policies.serving.wire import ROLLOUTS, Batch, BatchLine, CompletionRequest, PolicyRef
from tests.rigs.store.fault_proxy import FaultProxy, Slow, fault_proxy
from tests.rigs.store.moto_server import moto_server
from tests.rigs.store.server import S3Server

T = TypeVar("T")
TOKEN = "secret"
VERSION = PolicyVersion(0, 1)
DEADLINE_S = 900.0
POLL_S = 0.1
VLLM = {"dtype": "float32", "enforce-eager": True, "kv-cache-memory-bytes": 67108864, "max-model-len": 256}
VLLM_ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def join_s(folder: Path, bytes_per_s: int, code: Path = ROOT) -> dict[str, float]:
    """Return the seconds until `first_token`, as the trainer sees it; the node logs those of each part.

    Args:
        folder: nobody else's.
        bytes_per_s: of each object that the node reads; the policy's weights are one of 0.4 MB.
        code: the node's sources: those of another commit tell what has changed since.
    """
    with _rig(folder, VLLM) as rig:
        rig.proxy.inject(Slow(bytes_per_s))
        return rig.join(1, os.environ["HOME"], code)


def join_compiled_s(folder: Path) -> dict[str, dict[str, float]]:
    """The same over a quick store, where vLLM compiles: of a node that is the first of its kind, and of one that
    comes once that has stored what it has compiled. Each begins with an empty home folder, at one path."""
    home, took_s = folder / "home", dict[str, dict[str, float]]()
    with _rig(folder, {**VLLM, "enforce-eager": False}) as rig:
        for number, what in enumerate(("compiles", "compiled before"), start=1):
            home.mkdir()
            took_s[what] = rig.join(number, str(home), until=lambda: rig.store.entries(layout.COMPILED))
            shutil.rmtree(home)
        [stored] = rig.store.entries(layout.COMPILED)
    return {**took_s, "compiled_bytes": {"stored": stored.size_bytes}}


@dataclass(frozen=True, slots=True)
class _Rig:
    """A run with a policy and a gateway, that waits for nodes."""

    folder: Path
    server: S3Server
    proxy: FaultProxy
    store: Store
    policy: PolicyRef

    def join(
        self, number: int, home: str, code: Path = ROOT, until: Callable[[], object] = lambda: True
    ) -> dict[str, float]:
        """Start a node, and end it once it has joined and what it is to do besides is done."""
        name = f"rollout-0-i{number}"
        with _asked(self.store, self.policy) as lines:
            _until(lambda: _status(self.store).policy == self.policy.label)
            env = {**_env(self.store, self.folder, self.server.at(self.proxy.endpoint), name), "HOME": home}
            begun_s = time.monotonic()
            with _process([str(NODE_PYTHON), "-m", "grpo_orch.tasks.rollout.agent"], env, code):
                next(line for line in lines if line.completion or (line.progress and line.progress.tokens))
                first_token_s = time.monotonic() - begun_s
                _until(until)
        return {"first_token": round(first_token_s, 3)}


@contextmanager
def _rig(folder: Path, vllm: dict[str, Any]) -> Iterator[_Rig]:
    make_tiny(folder)
    with ExitStack() as stack:
        server = stack.enter_context(moto_server(folder))
        proxy = stack.enter_context(fault_proxy(server.endpoint))
        store = Store(server.url("run"), options=server.options())
        policy = _begin_run(store, folder, vllm)
        gateway = _env(store, folder, server, "rollout-0-i1")
        stack.enter_context(_process([sys.executable, "-m", "grpo_orch.orchestrator.gateway"], gateway, ROOT))
        yield _Rig(folder, server, proxy, store, policy)


def _begin_run(store: Store, folder: Path, vllm: dict[str, Any]) -> PolicyRef:
    spec = RunSpec(
        name="joining",
        storage=store.url,
        trainer=TrainerSpec(model="model", dataset=Dataset(path="json"), reward_funcs=("x.y",)),
        grpo={},
        workdir=str(folder),
        rollout=RolloutSpec(vllm=vllm, env=VLLM_ENV),
    )
    documents.create_run(store, RunRecord(documents.SCHEMA, "joining", 0.0, spec))
    sign_run(store, TOKEN)
    prefix = layout.policy(VERSION, (0, 1, 1))
    found = manifest.publish(store, prefix, folder / "model", VERSION, now_s=0.0)
    return PolicyRef(str(VERSION), prefix, found.digest)


@contextmanager
def _asked(store: Store, policy: PolicyRef) -> Iterator[Iterator[BatchLine]]:
    """The lines of the answer to a trainer's batch."""
    address = _until(lambda: documents.read_gateway(store))
    requests = [CompletionRequest(0, [5, 6, 7], seed=0)]
    batch = Batch(policy, {"temperature": 1.0, "max_tokens": 8}, requests, DEADLINE_S)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with (
        httpx.Client(headers=headers, timeout=DEADLINE_S) as http,
        http.stream("POST", f"{address.url}{ROLLOUTS}", content=msgspec.json.encode(batch)) as answer,
    ):
        yield (msgspec.json.decode(line, type=BatchLine) for line in answer.iter_lines())


@contextmanager
def _process(argv: list[str], env: dict[str, str], code: Path) -> Iterator[None]:
    process = subprocess.Popen(argv, env=env, cwd=code, stdout=sys.stderr)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _env(store: Store, folder: Path, server: S3Server, node: str) -> dict[str, str]:
    return {
        **os.environ,
        "GRPO_ORCH_RUN": store.url,
        "GRPO_ORCH_NODE": node,
        "GRPO_ORCH_TOKEN": TOKEN,
        "GRPO_ORCH_ATTEMPT": "1",
        "GRPO_ORCH_WORKDIR": str(folder),
        OPTIONS_ENV: json.dumps(server.options()),
    }


def _status(store: Store) -> GatewayStatus:
    return _until(lambda: documents.read_members(store))


def _until(look: Callable[[], T | None]) -> T:
    """What there is once there is something."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        if found := look():
            return found
        time.sleep(POLL_S)
    raise TimeoutError(f"nothing within {DEADLINE_S:g} s")


if __name__ == "__main__":
    _folder = Path(sys.argv[1])
    _folder.mkdir()
    print(json.dumps(join_s(_folder, int(sys.argv[2]), *map(Path, sys.argv[3:]))))
