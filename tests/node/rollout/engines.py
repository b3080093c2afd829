"""Real vLLM engines on the CPU with tiny random models: one behind a node's agent and a gateway, and one alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Generator, Iterable
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import httpx
import msgspec
import psutil
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.security import identity
from grpo_orch.checkpoint.security.vouched import sign_run
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import to_json
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import manifest
from grpo_orch.policies.model.node_contract import WORKDIR_ENV
from grpo_orch.policies.model.spec import Dataset, RolloutSpec, RunSpec, TrainerSpec
from grpo_orch.policies.model.vocabulary import PolicyVersion, Recovery
from grpo_orch.policies.serving.canary import Canary
from grpo_orch.policies.serving.gateway_status import MemberStatus
from grpo_orch.policies.serving.wire import Batch, BatchLine, Completion, CompletionRequest, PolicyRef
from grpo_orch.tasks.machine.node_env import NodeEnv
from grpo_orch.tasks.rollout.policy_check import PolicyCheck
from grpo_orch.tasks.rollout.vllm import server as vllm_server
from grpo_orch.tasks.trl.canary import canary_of
from tests.budget import HANG_S, until

TOKEN = "the-run's-secret"
HOST = "0.0.0.0"  # not loopback, and so under TLS; Linux connects it to this machine
VOCABULARY = 84
Tensors = dict[str, torch.Tensor]
T = TypeVar("T")


def make_model(folder: Path, seed: int, head_dim: int = 32) -> LlamaForCausalLM:
    """A random model whose next-token distribution is far from flat, with a tokenizer."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # vLLM's CPU attention takes heads of 32 and more
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=256,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    words = {word: number for number, word in enumerate(["<pad>", "<bos>", "<eos>", *map(chr, range(33, 114))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
    return model


def dense_model(folder: Path, seed: int) -> Any:
    """Its heads are of a size for which vLLM takes no AMX: it does not ask the kernel for it, and some refuse."""
    return make_model(folder, seed, head_dim=80)


def spec_of(
    folder: Path,
    flags: dict[str, Any],
    rewards: tuple[str, ...],
    peft: dict[str, Any] | None = None,
    recovery: Recovery = "continue",
) -> RunSpec:
    """A run whose nodes serve the model in `folder/base`."""
    env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return RunSpec(
        name="test",
        storage=f"file://{folder}/store",
        trainer=TrainerSpec(model="base", dataset=Dataset(path="json"), reward_funcs=rewards, peft=peft),
        grpo={},
        workdir=str(folder),
        rollout=RolloutSpec(vllm={"max-model-len": 256, **flags}, env=env, recovery=recovery),
    )


class Lab:
    """A run's store, its gateway and one node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workdir = folder / "work"
        self.workdir.mkdir()
        self.store = Store(f"file://{folder}/store")
        self.models: dict[str, LlamaForCausalLM] = {}
        self.env = {
            **os.environ,
            "GRPO_ORCH_RUN": self.store.url,
            "GRPO_ORCH_NODE": "rollout-0-i1",
            "GRPO_ORCH_TOKEN": TOKEN,
            "GRPO_ORCH_NODE_HOST": HOST,
            "GRPO_ORCH_GATEWAY_HOST": HOST,
            "GRPO_ORCH_ATTEMPT": "1",
            "GRPO_ORCH_WORKDIR": str(self.workdir),
        }
        make_model(folder / "base", seed=0)
        flags = {"dtype": "float32", "enforce_eager": True, "kv-cache-memory-bytes": 67108864}
        spec = spec_of(folder, flags, ("x.y",))
        documents.create_run(self.store, RunRecord(documents.SCHEMA, "test", 0.0, spec))
        sign_run(self.store, TOKEN)
        tls, headers = identity.client_context(TOKEN), {"Authorization": f"Bearer {TOKEN}"}
        self.http = httpx.Client(headers=headers, timeout=HANG_S, verify=tls)
        self.gateway = self.start("grpo_orch.orchestrator.gateway")
        self.agent = self.start("grpo_orch.tasks.rollout.agent")

    def start(self, module: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", module], env=self.env)

    def publish(self, version: str, seed: int, lacking: str | None = None) -> PolicyRef:
        """Publish a model as its trainer does, but for a tensor that may be `lacking`."""
        parsed = PolicyVersion.parse(version)
        folder = self.folder / f"made-{version}-{seed}"
        self.models[version] = make_model(folder, seed)
        (folder / layout.CANARY).write_bytes(to_json(canary_of(self.models[version], "no")))
        if lacking is not None:
            tensors = load_file(folder / "model.safetensors")
            del tensors[lacking]
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        manifest.publish(self.store, layout.policy(parsed, (0, 1, 1)), folder, parsed, now_s=0.0)
        return PolicyRef(version, layout.policy(parsed, (0, 1, 1)))

    def kill_vllm(self) -> None:
        """As the kernel does where memory is short."""
        servers = [
            pid
            for pid, line in self.processes().items()
            if ".vllm.api_server" in line and "machine.process_tree" not in line
        ]
        assert len(servers) == 1
        os.kill(servers[0], signal.SIGKILL)

    def member(self) -> MemberStatus | None:
        return next(iter(self.members()), None)

    def members(self) -> list[MemberStatus]:
        status = documents.read_members(self.store)
        return status.members if status else []

    def ask(
        self, policy: PolicyRef, which: Iterable[int] = range(16), deadline_s: float = HANG_S, **sampling: Any
    ) -> Generator[BatchLine]:
        batch = Batch(
            policy=policy,
            sampling={"temperature": 1.0, "max_tokens": 16, **sampling},
            requests=[CompletionRequest(i, [5 + i % 4, 6, 7], seed=i) for i in which],
            deadline_s=deadline_s,
        )
        address = documents.read_gateway(self.store)
        assert address is not None
        with self.http.stream("POST", f"{address.url}/v1/rollouts", content=msgspec.json.encode(batch)) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                yield msgspec.json.decode(line, type=BatchLine)

    def processes(self) -> dict[int, str]:
        """Pid and command line of every process of the node, by the folder in its environment."""
        return {
            one.pid: " ".join(one.info["cmdline"] or ())
            for one in psutil.process_iter(["cmdline", "environ"])
            if (one.info["environ"] or {}).get(WORKDIR_ENV) == str(self.workdir) and one.pid != self.gateway.pid
        }

    def stop(self) -> None:
        for process in (self.agent, self.gateway):
            process.kill()
            process.wait()
        until("no process of the node left", lambda: not self.processes())
        self.http.close()


def completions(lines: list[BatchLine]) -> list[Completion]:
    assert lines[-1].end is not None, lines[-1].error
    return sorted((line.completion for line in lines if line.completion), key=lambda one: one.index)


def largest_difference(model: LlamaForCausalLM, made: list[Completion], temperature: float = 1.0) -> float:
    """How far vLLM's log-probabilities are from those of transformers on the same weights."""
    worst = 0.0
    for one in made:
        prompt = [5 + one.index % 4, 6, 7]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + one.token_ids])).logits[0] / temperature
        logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        ours = logprobs[torch.arange(len(one.token_ids)), torch.tensor(one.token_ids)]
        worst = max(worst, float((ours - torch.tensor(one.logprobs)).abs().max()))
    return worst


class Node:
    """A server started on `folder/base`."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        peft: dict[str, Any] | None = None,
        flags: dict[str, Any] | None = None,
        *,
        bare: bool = False,
        recovery: Recovery = "exact",
    ) -> None:
        self.folder = folder
        small = {"dtype": dtype, "enforce-eager": True, "kv-cache-memory-bytes": 8 * 2**20, **(flags or {})}
        spec = spec_of(folder, small, (), peft, recovery)
        env = NodeEnv(spec.storage, "rollout-0-i1", TOKEN, 1, 0, str(folder), "127.0.0.1")
        self.check = PolicyCheck(spec)
        self._loop = asyncio.new_event_loop()
        self._http = self.do(_session())
        self.server = self.do(self._started(spec, env, bare=bare))

    async def _started(self, spec: RunSpec, env: NodeEnv, *, bare: bool) -> vllm_server.Server:
        """Start vLLM, twice if need be, as an agent does: its free port may be another process's by then."""
        with contextlib.suppress(vllm_server.ServerFailed):
            return await vllm_server.start(spec, env, self._http, bare=bare)
        return await vllm_server.start(spec, env, self._http, bare=bare)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def load(self, version: str, folder: Path, canary: Canary | None) -> None:
        self.do(self.server.load(version, folder, canary))

    def asked(self, policy: str) -> int:
        """The status of a completion that is asked of it."""
        return self.completion(policy, {"prompt": [5, 6, 7], "max_tokens": 4})[0]

    def completion(self, policy: str, asked: dict[str, Any]) -> tuple[int, Any]:
        """The status of what is asked of it, and its answer."""

        return self.do(self.ask(policy, asked))

    async def ask(self, policy: str, asked: dict[str, Any]) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {TOKEN}", "X-Grpo-Boot": self.server.boot_id, "X-Grpo-Policy": policy}
        url = f"{self.server.url}/v1/completions"
        async with self._http.post(url, json={"model": "policy", **asked}, headers=headers) as answer:
            return answer.status, await answer.json() if answer.status == 200 else await answer.text()

    def stop(self) -> None:
        self.do(self.server.stop())
        self.do(self._http.close())
        self._loop.close()


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HANG_S))


def policy(folder: Path, model: Any, change: Callable[[Tensors], Tensors] = lambda tensors: tensors) -> Path:
    """A policy as a trainer publishes it, its tensors changed on the way."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    (folder / layout.CANARY).write_bytes(to_json(canary_of(model, "no")))
    return folder


def without_a_layer(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if "layers.1" not in name}


def completed(node: Node, policy: str) -> str:
    asked = {"prompt": [5, 6, 7], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    status, answer = node.completion(policy, asked)
    assert status == 200, answer
    text: str = answer["choices"][0]["text"]
    return text
