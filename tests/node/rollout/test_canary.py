"""What a real vLLM computes after a reload, against what its trainer computed: two boots, many policies.

One engine is a bfloat16 one of a dense model, which starts without weights; the other a float32 one of a mixture
of experts, whose weights vLLM's build for CPUs does not reload by itself as it loads them first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import manifest
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.weights.tensors import ServedTypes
from grpo_orch.tasks.rollout.policy_folders import PolicyFolders
from grpo_orch.tasks.rollout.vllm.server import PolicyRefused
from grpo_orch.tasks.storing.publish import PolicyPublisher
from grpo_orch.tasks.storing.step_costs import StepCosts
from grpo_orch.tasks.trl.canary import canary_of
from tests.node.rollout.engines import (
    VOCABULARY,
    Node,
    Tensors,
    completed,
    dense_model,
    make_model,
    policy,
    without_a_layer,
)

DOWN = "model.layers.1.mlp.down_proj.weight"


def permuted(tensors: Tensors) -> Tensors:
    shuffled = tensors[DOWN].flatten()[torch.randperm(tensors[DOWN].numel())].view_as(tensors[DOWN])
    return {**tensors, DOWN: shuffled}


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
        node.load(version, folder, node.check.verify(folder))
    assert node.asked(version) == 409
    return caught.value.reason


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("dense")
    dense_model(folder / "base", seed=0)
    (folder / "base" / "model.safetensors").rename(
        folder / "kept"
    )  # of the base model it reads all but the weights
    node = Node(folder, "bfloat16", bare=True)
    try:
        check_bare(node, folder)
        (folder / "kept").rename(folder / "base" / "model.safetensors")
        yield node
    finally:
        node.stop()


def check_bare(node: Node, folder: Path) -> None:
    """It serves nothing before all weights have come. Were the files not looked at: a policy that lacks tensors
    leaves it without, and the next one does not."""
    assert node.asked("0-0") == node.asked("None") == node.asked("") == 409
    lacking = policy(folder / "lacking", dense_model(folder / "made", seed=1), without_a_layer)
    with pytest.raises(PolicyRefused, match=r"the first policy has no weights for model\.layers\.1\."):
        node.load("0-0", lacking, None)
    assert node.asked("0-0") == 409
    made = dense_model(folder / "made", seed=2)
    node.load("0-1", policy(folder / "whole", made), canary_of(made, "no"))
    assert node.asked("0-1") == 200


def test_bfloat16_node_serves_float32_and_bfloat16_trainers(dense: Node, tmp_path: Path) -> None:
    for number, dtype in enumerate((torch.float32, torch.bfloat16), 2):
        folder = policy(tmp_path / str(number), dense_model(tmp_path / "made", seed=1 + number).to(dtype))
        canary = dense.check.verify(folder)
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
        (lambda tensors: {**tensors, DOWN: tensors[DOWN] * torch.nan}, "the engine failed to compute the canary"),
    ],
)
def test_wrong_weights_are_refused_by_name_and_never_served(
    dense: Node, tmp_path: Path, change: Callable[[Tensors], Tensors], why: str
) -> None:
    folder = policy(tmp_path / "policy", dense_model(tmp_path / "made", seed=5), change)
    assert why in refused(dense, "0-5", folder)
    dense.load(
        "0-1", whole := policy(tmp_path / "whole", dense_model(tmp_path / "made", 3)), dense.check.verify(whole)
    )
    assert dense.asked("0-1") == 200
    assert dense.asked("0-5") == 409


def test_node_follows_trainer_by_deltas(dense: Node, tmp_path: Path) -> None:
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
        canary = dense.check.verify(folder)
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
            node.load(f"0-{number}", folders[number], node.check.verify(folders[number]))
            assert node.asked(f"0-{number}") == 200
        astray = policy(tmp_path / "astray", models[1], exchanged)
        assert "log-probabilities" in refused(node, "0-2", astray)
    finally:
        node.stop()
