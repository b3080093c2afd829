"""A real rollout node: agent, vLLM on CPU and gateway, each a process, on a tiny model made on the spot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from checkpoint.records import documents
from checkpoint.records.documents import RunRecord
from checkpoint.security import identity
from checkpoint.security.vouched import vouch
from checkpoint.store import layout
from checkpoint.store.codec import to_json
from checkpoint.store.run_store import Store
from checkpoint.stream import manifest
from policies.model.gpus import VISIBLE
from policies.model.node_contract import WORKDIR_ENV
from policies.model.spec import Dataset, RolloutSpec, RunSpec, TrainerSpec
from policies.model.vocabulary import PolicyVersion
from policies.serving.gateway_status import MemberStatus
from policies.serving.wire import Batch, BatchLine, Completion, CompletionRequest, PolicyRef, Progress
from tasks.trl.canary import canary_of
from tests.budget import HANG_S, until
from tests.stand_ins.strangers import check_closed

TOKEN = "the-run's-secret"
HOST = "0.0.0.0"  # not loopback, and so under TLS; Linux connects it to this machine
VOCABULARY = 84
MANY = 4096  # completions, so many that they cannot end before what is done meanwhile, however slowly
LOST = 32  # of the 128 that vLLM makes at a time
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


class Lab:
    """A run's store, its gateway and one node, which may be told of `gpus`: names that vLLM on a CPU ignores."""

    def __init__(self, folder: Path, peft: dict[str, Any] | None = None, gpus: str | None = None) -> None:
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
            **({} if gpus is None else {VISIBLE: gpus}),
        }
        make_model(folder / "base", seed=0)
        spec = RunSpec(
            name="test",
            storage=self.store.url,
            trainer=TrainerSpec(model="base", dataset=Dataset(path="json"), reward_funcs=("x.y",), peft=peft),
            grpo={},
            workdir=str(folder),
            rollout=RolloutSpec(
                vllm={
                    "dtype": "float32",
                    "enforce_eager": True,
                    "kv-cache-memory-bytes": 67108864,
                    "max-model-len": 256,
                },
                env={"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            ),
        )
        documents.create_run(self.store, RunRecord(documents.SCHEMA, "test", 0.0, spec))
        vouch(self.store, TOKEN)
        tls, headers = identity.client_context(TOKEN), {"Authorization": f"Bearer {TOKEN}"}
        self.http = httpx.Client(headers=headers, timeout=HANG_S, verify=tls)
        self.gateway = self.start("orchestrator.gateway")
        self.agent = self.start("tasks.rollout.agent")

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
            if "tasks.rollout.vllm.main" in line and "tasks.machine.process_tree" not in line
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


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.stop()


def completions(lines: list[BatchLine]) -> list[Completion]:
    assert lines[-1].end is not None, lines[-1].error
    return sorted((line.completion for line in lines if line.completion), key=lambda one: one.index)


def check_killed_vllm(lab: Lab, policy: PolicyRef, max_tokens: int) -> None:
    """Kill it in the middle of completions: they are what they are on one that is not killed."""
    long = {"max_tokens": max_tokens, "ignore_eos": True}
    lines = lab.ask(policy, range(MANY), **long)
    next(line for line in lines if line.progress and line.progress.tokens > 16 * LOST)  # they have begun
    lab.kill_vllm()
    lost = (one for line in lines if (one := line.completion) and any(part.tokens for part in one.handed_over))
    made = {one.index: replace(one, handed_over=[]) for one in islice(lost, LOST)}
    lines.close()
    assert len(made) == LOST
    assert completions(list(lab.ask(policy, made, **long))) == [made[index] for index in sorted(made)]


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


def test_a_node_serves_each_published_policy_exactly(lab: Lab) -> None:
    member = until("the node among the members", lab.member)
    assert (member.node, member.policy, member.serving) == ("rollout-0-i1", None, False)
    first = completions(list(lab.ask(lab.publish("0-0", seed=1))))
    assert len(first) == 16
    assert largest_difference(lab.models["0-0"], first) < 1e-5
    assert completions(list(lab.ask(PolicyRef("0-0", "policies/0000/00000000")))) == first
    second = completions(list(lab.ask(lab.publish("0-1", seed=2), temperature=0.7)))
    assert {one.policy for one in second} == {"0-1"}
    assert largest_difference(lab.models["0-1"], second, temperature=0.7) < 1e-5
    assert largest_difference(lab.models["0-0"], second, temperature=0.7) > 0.1
    kept = until(
        "one policy's files", lambda: len(found := list((lab.workdir / "policies").iterdir())) == 1 and found
    )
    assert kept[0].name == "0-1"


def test_the_nodes_door_lets_nobody_else_in(lab: Lab) -> None:
    member = until("a member", lab.member)
    check_closed(HOST, int(member.address.rpartition(":")[2]), TOKEN)
    node = f"https://{member.address}"
    http = httpx.Client(verify=identity.client_context(TOKEN), timeout=HANG_S)
    body = {"model": "policy", "prompt": [5], "max_tokens": 1}
    right = {
        "Authorization": f"Bearer {TOKEN}",
        "X-Grpo-Boot": member.boot_id,
        "X-Grpo-Policy": "0-1",
    }
    chat = {"model": "policy", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 1}
    for path, asked in (("/v1/completions", body), ("/v1/chat/completions", chat)):
        assert http.post(f"{node}{path}", json=asked, headers=right).status_code == 200
        for name, value, status in (
            ("Authorization", "Bearer wrong", 401),
            ("X-Grpo-Boot", "another", 409),
            ("X-Grpo-Policy", "0-0", 409),
        ):
            answer = http.post(f"{node}{path}", json=asked, headers={**right, name: value})
            assert answer.status_code == status
    assert http.get(f"{node}/health").status_code == 401
    assert http.get(f"{node}/metrics").status_code == 401
    assert "vllm:num_requests_running" in http.get(f"{node}/metrics", headers=right).text
    assert member.max_requests == 128  # vLLM's own default on a CPU
    assert member.kv_tokens > 256

    def idle() -> bool:  # the last word may be from when the test before this one had requests at work
        word = one.engine if (one := lab.member()) else None
        return word is not None and (word.running, word.waiting) == (0, 0) and word.tokens > 0

    until("an idle engine's word", idle)
    load = {"version": "0-9", "path": "/nowhere"}
    assert http.put(f"{node}/grpo/policy", json=load).status_code == 401
    assert http.put(f"{node}/grpo/policy", json=load, headers=right).status_code == 404
    for method, path in (
        ("POST", "/collective_rpc"),
        ("POST", "/pause"),
        ("GET", "/v1/models"),
        ("PUT", "/grpo/sampling"),
        ("GET", "/docs"),
    ):
        assert http.request(method, f"{node}{path}", headers=right).status_code == 404
    assert http.post(f"{node}/v1/completions", json=body, headers=right).status_code == 200
    http.close()


def test_new_weights_end_what_runs_and_nothing_is_made_of_two_policies(lab: Lab) -> None:
    next_one = lab.publish("0-2", seed=3)  # of which the node hears once it is asked for
    policy, finished = PolicyRef("0-1", "policies/0000/00000001"), list[Completion]()
    old = lab.ask(policy, range(MANY), max_tokens=250, ignore_eos=True)

    def until_told(told: Callable[[Progress], bool]) -> None:
        for line in old:
            assert (line.error, line.end) == (None, None)
            finished.extend([line.completion] if line.completion else [])
            if line.progress and told(line.progress):
                return

    until_told(lambda one: one.tokens > 0)
    new = completions(list(lab.ask(next_one)))
    assert largest_difference(lab.models["0-2"], new) < 1e-5
    # Nobody serves it, and all that is left waits.
    until_told(lambda one: (one.members, one.waiting) == (0, MANY - len(finished)))
    old.close()
    assert largest_difference(lab.models["0-1"], finished) < 1e-5


def test_a_damaged_policy_is_never_served_and_a_repaired_one_is(lab: Lab) -> None:
    policy = lab.publish("0-3", seed=4)
    boot_id = until("a member", lab.member).boot_id
    files = manifest.load(lab.store, policy.prefix).files
    weights = next(f"{policy.prefix}/{file.chunks[0]}" for file in files if file.name == "model.safetensors")
    good = lab.store.get(weights)
    lab.store.put(weights, good[:-1] + bytes([good[-1] ^ 1]))
    lines = list(lab.ask(policy, deadline_s=3.0))
    assert lines[-1].error is not None
    assert not any(line.completion for line in lines)
    lab.store.put(weights, good)
    made = completions(list(lab.ask(policy)))
    assert largest_difference(lab.models["0-3"], made) < 1e-5
    assert until("a member", lab.member).boot_id == boot_id  # vLLM never saw the damaged file


def test_a_policy_that_lacks_a_tensor_is_never_served_and_the_next_one_is(lab: Lab) -> None:
    until("a member", lab.member)
    completions(list(lab.ask(lab.publish("0-4", seed=4))))  # a first policy that lacks one costs a start
    boot_id = until("a member", lab.member).boot_id
    policy = lab.publish("0-5", seed=5, lacking="model.layers.1.mlp.down_proj.weight")
    lines = list(lab.ask(policy, deadline_s=3.0))
    assert lines[-1].error is not None
    assert not any(line.completion for line in lines)
    made = completions(list(lab.ask(lab.publish("0-6", seed=6))))
    assert largest_difference(lab.models["0-6"], made) < 1e-5
    assert until("a member", lab.member).boot_id == boot_id  # vLLM never saw it


def test_a_killed_vllm_is_a_new_boot_that_serves_only_with_the_policy(lab: Lab) -> None:
    policy = lab.publish("0-7", seed=7)
    completions(list(lab.ask(policy)))
    before = until("a member", lab.member)
    old = lab.processes()
    check_killed_vllm(lab, policy, max_tokens=250)
    until("its next boot", lambda: (one := lab.member()) is not None and one.boot_id != before.boot_id)
    left = {pid: line for pid, line in lab.processes().items() if pid in old and pid != lab.agent.pid}
    assert left == {}  # the engine and its workers went with the server


def test_a_notice_takes_the_node_out_and_its_death_leaves_nothing(lab: Lab) -> None:
    (lab.workdir / "notice").touch()
    until("no member", lambda: lab.member() is None)
    assert lab.agent.poll() is None
    assert len(lab.processes()) > 3
    lab.agent.kill()
    lab.agent.wait()
    until("no process of the node left", lambda: not lab.processes())
    (lab.workdir / "notice").unlink()


def test_sigterm_ends_the_agent_in_good_order_while_vllm_starts(lab: Lab) -> None:
    agent = lab.start("tasks.rollout.agent")
    until("vLLM's process", lambda: any("tasks.rollout.vllm.main" in line for line in lab.processes().values()))
    agent.terminate()
    assert agent.wait(HANG_S) == 0
    assert lab.processes() == {}
