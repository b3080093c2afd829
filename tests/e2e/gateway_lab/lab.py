"""A gateway and real rollout nodes, each in a network namespace of its own, and the steps that they are asked for.

What is asked is the same each time but for a salt to the nodes' prefix caches, so that a request that goes on has
nothing computed for it already, and the undisturbed completions are made once.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.security import identity
from grpo_orch.checkpoint.security.vouched import sign_run
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import manifest
from grpo_orch.policies.model.spec import Dataset, RolloutSpec, RunSpec, TrainerSpec
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.gateway_status import MembershipChange
from grpo_orch.policies.serving.wire import Batch, BatchLine, Completion, CompletionRequest, PolicyRef
from tests.budget import HANG_S, until
from tests.e2e.gateway_lab.faults import Fault
from tests.e2e.gateway_lab.node import Node
from tests.e2e.tiny import NODE_PYTHON
from tests.rigs.gateway_net import GATEWAY, Net, missing
from tests.rigs.gateway_process import Heard, hear

TOKEN = "the-run's-secret"
REQUESTS = 64
MAX_TOKENS = 240
# A prompt computed anew sums in another order than the tokens one by one did.
LOGPROB_NOISE = 1e-4
VLLM = {"dtype": "float32", "enforce-eager": True, "kv-cache-memory-bytes": 2**26, "max-model-len": 256}
ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
_MODELS = "from tests.node.rollout.engines import make_model; from pathlib import Path; import sys"
_MAKE = f"{_MODELS}; [make_model(Path(sys.argv[1]) / name, seed) for seed, name in enumerate(sys.argv[2:])]"


class Step:
    """A batch on its way."""

    def __init__(self, lines: Iterator[BatchLine], threads: ThreadPoolExecutor) -> None:
        self.tokens = 0
        self.done_s = 0.0
        self._heard: Future[Heard] = threads.submit(self._hear, lines)

    def result(self) -> Heard:
        return self._heard.result(HANG_S)

    def _hear(self, lines: Iterator[BatchLine]) -> Heard:
        heard = hear(self._note(line) for line in lines)
        self.done_s = time.monotonic()
        return heard

    def _note(self, line: BatchLine) -> BatchLine:
        if line.progress is not None:
            self.tokens = line.progress.tokens
        return line


@dataclass(frozen=True)
class Counts:
    """What the gateway has counted since its start."""

    discarded: int
    saved: int
    replayed: int
    handovers: int


@dataclass(frozen=True)
class Outcome:
    """What a fault cost."""

    done_s: float  # from the fault to the last completion
    out_by: str | None  # what the gateway noticed first of the node, in its words, if it did before that healed
    handovers: int
    saved: int  # tokens
    replayed: int  # tokens


class Lab:
    """A run's data plane. To be used from `net.inside()`."""

    def __init__(self, folder: Path, net: Net) -> None:
        self._store = Store(f"file://{folder}/store")
        models = ["base", "policy"]
        subprocess.run([NODE_PYTHON, "-c", _MAKE, folder, *models], check=True, env={**os.environ, **ENV})
        spec = RunSpec(
            name="test",
            storage=self._store.url,
            trainer=TrainerSpec(model="base", dataset=Dataset(path="json"), reward_funcs=("x.y",)),
            grpo={},
            workdir=str(folder),
            rollout=RolloutSpec(vllm=VLLM, env=ENV),
        )
        documents.create_run(self._store, RunRecord(documents.SCHEMA, "test", 0.0, spec))
        sign_run(self._store, TOKEN)
        version = PolicyVersion.parse("0-0")
        made = manifest.publish(
            self._store, layout.policy(version, (0, 1, 1)), folder / "policy", version, now_s=0.0
        )
        self._policy = PolicyRef("0-0", layout.policy(version, (0, 1, 1)), made.digest)
        env = {**os.environ, "GRPO_ORCH_RUN": self._store.url, "GRPO_ORCH_TOKEN": TOKEN}
        env["GRPO_ORCH_GATEWAY_HOST"] = GATEWAY
        self._gateway = subprocess.Popen([NODE_PYTHON, "-m", "grpo_orch.orchestrator.gateway"], env=env)
        self.nodes = [Node(port, number, folder, env) for number, port in enumerate(net.ports)]
        tls, headers = identity.client_context(TOKEN), {"Authorization": f"Bearer {TOKEN}"}
        self._http = httpx.Client(headers=headers, timeout=HANG_S, verify=tls, trust_env=False)
        self._url = until("the gateway's address", lambda: documents.read_gateway(self._store)).url
        until("both nodes", lambda: len(self._members()) == len(self.nodes))
        self._threads = ThreadPoolExecutor()
        self._steps = 0
        self._undisturbed = until("an undisturbed batch", self._make_undisturbed)

    def step(self) -> Step:
        self._steps += 1
        return Step(self._ask(f"step {self._steps}"), self._threads)

    def until_serving(self, nodes: int) -> None:
        until(f"{nodes} serving nodes", lambda: len(self.serving()) >= nodes)

    def serving(self) -> list[Node]:
        """Those that requests are given to."""
        names = {one["node"] for one in self._members() if one["state"] == "serving"}
        return [node for node in self.nodes if node.name in names]

    def running(self) -> list[int]:
        """How many requests each node has."""
        running = {one["node"]: int(one["requests_running"]) for one in self._members()}
        return [running.get(node.name, 0) for node in self.nodes]

    def counts(self) -> Counts:
        text = self._http.get(f"{self._url}/metrics").text
        found = re.findall(r"^grpo_gateway_(\w+?)_total(?:\{.*\})? (\S+)$", text, re.MULTILINE)
        sums: dict[str, int] = {}
        for name, value in found:
            sums[name] = sums.get(name, 0) + int(float(value))
        discarded, saved, replayed = (sums[f"tokens_{name}"] for name in ("discarded", "saved", "replayed"))
        return Counts(discarded, saved, replayed, sums.get("handovers", 0))

    def disturb(self, fault: Fault, chance: random.Random, *, hold_s: float | None = None) -> Outcome:
        """Have a batch made, and at a random moment of it let the node of a random request meet the fault, for so
        long or until the batch is done. Fails unless each completion is what it is without a fault."""
        before = self.counts()
        share = chance.uniform(0.1, 0.6)
        step = self.step()
        until(f"{share:.0%} of the step", lambda: step.tokens >= share * REQUESTS * MAX_TOKENS)
        running = self.running()
        (node,) = chance.choices(self.nodes, running)
        print(f"{fault.name} at {share:.0%} on {node.name}; requests running: {running}")
        struck_s = time.monotonic()
        healed = threading.Event()
        unseen = fault.serves_on or hold_s is not None
        told = self._changes()
        known = told[-1].seq if told else 0
        out = None if unseen else self._threads.submit(self._noticed, node, known, healed)
        with fault.hold(node):
            if hold_s is None:
                step.result()
            else:
                time.sleep(hold_s)
        if fault.heals:
            healed.set()
        self._check(self._whole(step.result()))
        after = self.counts()
        outcome = Outcome(
            step.done_s - struck_s,
            out.result(HANG_S) if out else None,
            after.handovers - before.handovers,
            after.saved - before.saved,
            after.replayed - before.replayed,
        )
        print(outcome)
        assert after.discarded == 0, "tokens that the gateway had were made again"
        return outcome

    def _noticed(self, node: Node, known: int, healed: threading.Event) -> str | None:
        """What changed first of the node's membership after change `known`; None if it healed before: where the
        others are quick, they have taken over its requests, and nobody asks a node that has none."""

        def found() -> list[str]:
            return [one.description for one in self._changes() if one.seq > known and node.name in one.nodes]

        until(f"a change of {node.name}", lambda: healed.is_set() or found())
        return next(iter(found()), None)

    def _changes(self) -> list[MembershipChange]:
        """What has become of the members, the oldest first."""
        answer = self._http.get(f"{self._url}/events").json()
        return msgspec.convert(answer["changes"], list[MembershipChange])

    def stop(self) -> None:
        self._gateway.kill()
        self._gateway.wait()
        for node in self.nodes:
            node.end()
        self._threads.shutdown()
        self._http.close()

    def _make_undisturbed(self) -> list[Completion] | None:
        """Nothing if a node was so slow that it was left."""
        before = self.counts()
        made = self._whole(self.step().result())
        return made if self.counts() == before else None

    def _members(self) -> list[dict[str, Any]]:
        members: list[dict[str, Any]] = self._http.get(f"{self._url}/members").json()["members"]
        return members

    def _ask(self, salt: str) -> Iterator[BatchLine]:
        """Send a batch and yield the answer's lines as they come."""
        batch = Batch(
            policy=self._policy,
            sampling={"temperature": 1.0, "max_tokens": MAX_TOKENS, "ignore_eos": True, "cache_salt": salt},
            requests=[CompletionRequest(i, [5 + i // 8, 6, 7], seed=i) for i in range(REQUESTS)],
            deadline_s=HANG_S,
        )
        body = msgspec.json.encode(batch)
        with self._http.stream("POST", f"{self._url}/v1/rollouts", content=body) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                yield msgspec.json.decode(line, type=BatchLine)

    def _whole(self, heard: Heard) -> list[Completion]:
        assert heard.error is None
        assert heard.end is not None
        assert heard.end.discarded == 0
        assert [one.index for one in heard.completions] == list(range(REQUESTS))
        assert {one.policy for one in heard.completions} == {self._policy.label}
        return heard.completions

    def _check(self, made: list[Completion]) -> None:
        """Token by token what it is without a fault, from the same weights."""
        assert [one.token_ids for one in made] == [one.token_ids for one in self._undisturbed]
        assert [one.finish_reason for one in made] == [one.finish_reason for one in self._undisturbed]
        worst = max(
            abs(ours - theirs)
            for one, undisturbed in zip(made, self._undisturbed, strict=True)
            for ours, theirs in zip(one.logprobs, undisturbed.logprobs, strict=True)
        )
        print(f"log-probabilities differ by {worst:.2g} at most")
        assert worst < LOGPROB_NOISE


@contextmanager
def real_lab(folder: Path, nodes: int = 2) -> Iterator[Lab]:
    """A lab with undisturbed completions made. Skips where there can be none."""
    if reason := missing():
        pytest.skip(f"no network for real nodes: {reason}")
    net = Net(nodes)
    with ExitStack() as stack:
        stack.callback(net.remove)
        stack.enter_context(net.inside())
        lab = Lab(folder, net)
        stack.callback(lab.stop)
        yield lab
