"""A gateway in a process of its own with stand-in nodes, for tests: started, killed and asked over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
import msgspec

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.security import identity
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.serving.gateway_status import GatewayStatus, MemberStatus
from grpo_orch.policies.serving.wire import Batch, BatchLine, Completion, CompletionRequest, PolicyRef, Progress
from tests.budget import HANG_S, until
from tests.stand_ins.fake_vllm import completion

TOKEN = "the-run's-secret"
T = TypeVar("T")


@dataclass(frozen=True)
class Heard:
    """A whole answer."""

    completions: list[Completion]
    end: Progress | None
    error: str | None


@dataclass
class Rig:
    """One run's data plane below `folder`."""

    folder: Path
    host: str = "127.0.0.1"
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = Store(f"file://{self.folder}/store")
        self.env = {**os.environ, "GRPO_ORCH_RUN": self.store.url, "GRPO_ORCH_TOKEN": TOKEN}
        self.env["GRPO_ORCH_GATEWAY_HOST"] = self.host
        tls, headers = identity.client_context(TOKEN), {"Authorization": f"Bearer {TOKEN}"}
        self.http = httpx.Client(headers=headers, timeout=HANG_S, verify=tls)

    def spawn(self, *argv: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, *argv], env=self.env)
        self.processes.append(process)
        return process

    def gateway(self) -> subprocess.Popen[bytes]:
        """Start a gateway; return once it has written its address and answers there."""
        before = documents.read_gateway(self.store)
        process = self.spawn("-m", "grpo_orch.orchestrator.gateway")
        until("a new gateway's address", lambda: documents.read_gateway(self.store) != before)
        assert self.http.get(f"{self.url}/health").status_code == 200
        return process

    def node(
        self, name: str, *, host: str = "127.0.0.1", port: int = 0, **attributes: object
    ) -> subprocess.Popen[bytes]:
        """Start a node that is `tests.stand_ins.fake_vllm.FakeVllm` with these attributes."""
        where = [str(self.seen_path(name)), host, str(port)]
        return self.spawn("-m", "tests.stand_ins.fake_vllm", "node", name, *where, json.dumps(attributes))

    @property
    def url(self) -> str:
        address = documents.read_gateway(self.store)
        assert address is not None
        return address.url

    def status(self) -> GatewayStatus:
        """What the gateway of now wrote last; what has just happened may not be in it yet."""
        return until("the gateway's status", self._written)

    def _written(self) -> GatewayStatus | None:
        address = documents.read_gateway(self.store)
        status = documents.read_members(self.store)
        assert address is not None
        return status if status is not None and status.boot_id == address.boot_id else None

    def member(self, name: str) -> MemberStatus | None:
        return next((one for one in self.status().members if one.node == name), None)

    def until_members(self, *names: str) -> None:
        until(f"members {names}", lambda: {one.node for one in self.status().members} == set(names))

    def seen_path(self, name: str) -> Path:
        return self.folder / f"{name}.seen"

    def seen(self, name: str) -> list[dict[str, Any]]:
        """Every request that the stand-in got."""
        path = self.seen_path(name)
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def ask(self, batch: Batch) -> Iterator[BatchLine]:
        """Send a batch and yield the answer's lines as they come."""
        with self.http.stream("POST", f"{self.url}/v1/rollouts", content=msgspec.json.encode(batch)) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                yield msgspec.json.decode(line, type=BatchLine)

    def complete(self, batch: Batch) -> Heard:
        return hear(self.ask(batch))

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.http.close()


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def make_batch(
    version: str,
    *,
    requests: int = 32,
    max_tokens: int = 16,
    deadline_s: float = HANG_S,
    recovery: Literal["continue", "exact"] = "continue",
    **sampling: object,
) -> Batch:
    """Requests in groups of eight, as a trainer makes them."""
    return Batch(
        policy=PolicyRef(version, f"policies/{version}"),
        sampling={"temperature": 1.0, "max_tokens": max_tokens, **sampling},
        requests=[CompletionRequest(i, [1, 2, 3 + i // 8], seed=1000 + i) for i in range(requests)],
        deadline_s=deadline_s,
        recovery=recovery,
    )


def hear(lines: Iterator[BatchLine]) -> Heard:
    completions, end, error = [], None, None
    for line in lines:
        if line.completion is not None:
            completions.append(line.completion)
        end, error = line.end or end, line.error or error
    return Heard(sorted(completions, key=lambda one: one.index), end, error)


def check_complete(batch: Batch, heard: Heard) -> None:
    """Every request finished, with exactly the tokens that an undisturbed run gives."""
    assert heard.error is None
    assert heard.end is not None
    assert [one.index for one in heard.completions] == [one.index for one in batch.requests]
    for request, got in zip(batch.requests, heard.completions, strict=True):
        body = {**batch.sampling, "seed": request.seed}
        tokens, logprobs, reason = completion(body, request.prompt_token_ids)
        assert (got.token_ids, got.logprobs, got.finish_reason) == (tokens, logprobs, reason)
        assert got.policy == batch.policy.version
    assert heard.end.tokens == sum(len(one.token_ids) for one in heard.completions)
