"""What a real vLLM computes after a reload, against what its trainer computed: two boots, many policies.

One engine is a bfloat16 one of a dense model, the other a float32 one of a mixture of experts, whose weights
vLLM's build for CPUs does not reload by itself as it loads them first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from checkpoint.store import layout
from checkpoint.store.codec import to_json
from checkpoint.store.run_store import Store
from checkpoint.stream import manifest
from policies.model.spec import Dataset, RolloutSpec, RunSpec, TrainerSpec
from policies.model.vocabulary import PolicyVersion
from policies.serving.canary import Canary
from policies.weights.tensors import ServedTypes
from tasks.machine.node_env import NodeEnv
from tasks.rollout.policy_check import PolicyCheck
from tasks.rollout.policy_folders import PolicyFolders
from tasks.rollout.vllm import server as vllm_server
from tasks.rollout.vllm.server import PolicyRefused
from tasks.storing.publish import PolicyPublisher
from tasks.storing.step_costs import StepCosts
from tasks.trl.canary import canary_of
from tests.budget import HANG_S
from tests.node.rollout.test_rollout_node import TOKEN, VOCABULARY, make_model

Tensors = dict[str, torch.Tensor]
T = TypeVar("T")
DOWN = "model.layers.1.mlp.down_proj.weight"


def dense_model(folder: Path, seed: int) -> Any:
    """Its heads are of a size for which vLLM takes no AMX: it does not ask the kernel for it, and some refuse."""
    return make_model(folder, seed, head_dim=80)


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
    ) -> None:
        self.folder = folder
        spec = RunSpec(
            name="test",
            storage=f"file://{folder}/store",
            trainer=TrainerSpec(model="base", dataset=Dataset(path="json"), reward_funcs=(), peft=peft),
            grpo={},
            workdir=str(folder),
            rollout=RolloutSpec(
                vllm={
                    "dtype": dtype,
                    "enforce-eager": True,
                    "kv-cache-memory-bytes": 8 * 2**20,
                    "max-model-len": 256,
                    **(flags or {}),
                },
                env={"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                recovery="exact",
            ),
        )
        env = NodeEnv(spec.storage, "rollout-0-i1", TOKEN, 1, 0, str(folder), "127.0.0.1")
        self.check = PolicyCheck(spec)
        self._loop = asyncio.new_event_loop()
        self._http = self.do(_session())
        self.server = self.do(vllm_server.start(spec, env, self._http, bare=bare))

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def load(self, version: str, folder: Path, canary: Canary | None) -> None:
        self.do(self.server.load(version, folder, canary))

    def asked(self, policy: str) -> int:
        """The status of a completion that is asked of it."""
        return self.completion(policy, {"prompt": [5, 6, 7], "max_tokens": 4})[0]

    def completion(self, policy: str, asked: dict[str, Any]) -> tuple[int, Any]:
        """The status of what is asked of it, and its answer."""

        async def ask() -> tuple[int, Any]:
            headers = {
                "Authorization": f"Bearer {TOKEN}",
                "X-Grpo-Boot": self.server.boot_id,
                "X-Grpo-Policy": policy,
            }
            url = f"{self.server.url}/v1/completions"
            async with self._http.post(url, json={"model": "policy", **asked}, headers=headers) as answer:
                return answer.status, await answer.json() if answer.status == 200 else await answer.text()

        return self.do(ask())

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


def permuted(tensors: Tensors) -> Tensors:
    shuffled = tensors[DOWN].flatten()[torch.randperm(tensors[DOWN].numel())].view_as(tensors[DOWN])
    return {**tensors, DOWN: shuffled}


def without_a_layer(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if "layers.1" not in name}


def in_eight_bits(tensors: Tensors) -> Tensors:
    """As a trainer publishes its linear layers in 8 bits: without their scales, which are no parameters."""
    return {
        name: (tensor / tensor.abs().amax() * 127).round().to(torch.int8)
        if name.endswith("_proj.weight")
        else tensor
        for name, tensor in tensors.items()
    }


def refused(node: Node, version: str, folder: Path) -> str:
    """Why; by the files, and without them by the engine, which afterwards serves nobody."""
    with pytest.raises(PolicyRefused) as caught:
        node.load(version, folder, node.check.passed(folder))
    assert node.asked(version) == 409
    return caught.value.reason


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("dense")
    dense_model(folder / "base", seed=0)
    node = Node(folder, "bfloat16")
    yield node
    node.stop()


def test_a_bfloat16_node_serves_what_a_float32_or_bfloat16_trainer_publishes(dense: Node, tmp_path: Path) -> None:
    for number, dtype in enumerate((torch.float32, torch.bfloat16)):
        folder = policy(tmp_path / str(number), dense_model(tmp_path / "made", seed=1 + number).to(dtype))
        canary = dense.check.passed(folder)
        assert canary is not None
        assert canary.dtype == str(dtype).removeprefix("torch.")
        dense.load(f"0-{number}", folder, canary)
        assert dense.asked(f"0-{number}") == 200


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (permuted, "log-probabilities"),
        (in_eight_bits, "quantised weights: model.layers.0.mlp.down_proj.weight is of I8"),
        (lambda tensors: {f"base_model.model.{name}": one for name, one in tensors.items()}, "unmerged adapters"),
        (lambda tensors: {name: one for name, one in tensors.items() if name != DOWN}, f"missing tensors: {DOWN}"),
        (lambda tensors: {**tensors, DOWN: tensors[DOWN] * torch.nan}, "the engine does not compute the canary"),
    ],
)
def test_what_is_not_the_trainers_is_refused_by_name_and_never_asked(
    dense: Node, tmp_path: Path, change: Callable[[Tensors], Tensors], why: str
) -> None:
    folder = policy(tmp_path / "policy", dense_model(tmp_path / "made", seed=5), change)
    assert why in refused(dense, "0-5", folder)
    dense.load(
        "0-1", whole := policy(tmp_path / "whole", dense_model(tmp_path / "made", 3)), dense.check.passed(whole)
    )
    assert dense.asked("0-1") == 200
    assert dense.asked("0-5") == 409


def test_the_engine_alone_tells_weights_that_it_has_misread(dense: Node, tmp_path: Path) -> None:
    """Were the files not looked at: what vLLM loads without an error is not what the trainer computes."""
    for name, change in (("quantised", in_eight_bits), ("partial", without_a_layer)):
        model = dense_model(tmp_path / "made", seed=6)
        folder = policy(tmp_path / name, model, change)
        with pytest.raises(PolicyRefused, match="log-probabilities"):
            dense.load("0-6", folder, canary_of(model, "no"))
        assert dense.asked("0-6") == 409


def completed(node: Node, policy: str) -> str:
    asked = {"prompt": [5, 6, 7], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    status, answer = node.completion(policy, asked)
    assert status == 200, answer
    text: str = answer["choices"][0]["text"]
    return text


def test_a_node_follows_its_trainer_by_deltas_and_serves_what_it_loaded(dense: Node, tmp_path: Path) -> None:
    store, before = Store(f"memory://{tmp_path}"), ""
    model, served = dense_model(tmp_path / "made", seed=9), ServedTypes("BF16", "F32")
    publisher = PolicyPublisher(store, model.config, tmp_path / "scratch", (0, 1, 1), served, StepCosts())
    folders, made, kinds = PolicyFolders(store, tmp_path / "policies"), list[str](), list[str]()
    for step in range(4):
        version = PolicyVersion(0, step)
        ref = publisher.publish(version, model.state_dict().items(), canary_of(model, "no"))
        kinds.append(manifest.load(store, ref.prefix).meta[manifest.KIND])
        folder = folders.fetch(ref, lambda: True)
        if made:  # the file that the engine has read is another one by now
            assert completed(dense, before) == made[-1]
        canary = dense.check.passed(folder)
        assert canary is not None
        dense.load(ref.label, folder, canary)
        before = ref.label
        made.append(completed(dense, before))
        with torch.no_grad():
            for weight in model.parameters():
                weight += torch.randn_like(weight) * (torch.rand_like(weight) < 0.05)
    assert kinds == ["whole", "delta", "delta", "delta"]
    assert len(set(made)) == 4


def experts_of(seed: int) -> Any:
    """Of a size that vLLM's kernel for CPUs takes only padded."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        initializer_range=0.15,
    )
    return Qwen3MoeForCausalLM(config).float().eval()


def exchanged(tensors: Tensors) -> Tensors:
    """One expert has another's weights."""
    one, other = (f"model.layers.1.mlp.experts.{number}.down_proj.weight" for number in (0, 1))
    return {**tensors, one: tensors[other], other: tensors[one]}


def test_experts_are_reloaded_as_they_are_loaded_first(tmp_path: Path) -> None:
    """Which vLLM's build for CPUs does not do by itself."""
    make_model(tmp_path / "base", seed=0)  # for its tokenizer
    models = [experts_of(seed) for seed in (0, 1)]
    folders = [policy(tmp_path / f"policy-{number}", model) for number, model in enumerate(models)]
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "base" / name).write_bytes((folders[0] / name).read_bytes())
    node = Node(tmp_path, "float32")
    try:
        for number in (0, 1, 0):
            node.load(f"0-{number}", folders[number], node.check.passed(folders[number]))
            assert node.asked(f"0-{number}") == 200
        astray = policy(tmp_path / "astray", models[1], exchanged)
        assert "log-probabilities" in refused(node, "0-2", astray)
    finally:
        node.stop()
