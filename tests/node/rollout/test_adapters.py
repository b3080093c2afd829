"""LoRA adapters in a real vLLM: what it computes with each, against transformers and PEFT; what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.wire import PolicyRef
from grpo_orch.policies.weights.tensors import ServedTypes
from grpo_orch.tasks.machine.base_model import identity_of
from grpo_orch.tasks.rollout.vllm.server import PolicyRefused
from grpo_orch.tasks.storing.publish import AdapterPublisher
from grpo_orch.tasks.storing.step_costs import StepCosts
from grpo_orch.tasks.trl.canary import canary_of
from grpo_orch.tasks.trl.weights import adapter_tensors
from tests.node.rollout.engines import Node, make_model
from tests.stand_ins.catalog_rig import fetch

TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]  # vLLM holds q, k, v as one, and gate with up
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "rank_pattern": {"up_proj": 2}}
PROMPT = [5 + number * number % 70 for number in range(150)]  # longer than the prefix cache's block, 128 on CPUs
TOKENS = 24


class Trainer:
    """Makes adapters for the model in `folder/base`, and publishes them as a trainer does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_model(folder / "base", seed=0)
        self.identity = identity_of(folder / "base")
        self.store = Store(f"file://{folder}/store")
        self.models: dict[str, Any] = {}

    def publish(self, step: int, **config: Any) -> tuple[str, Path]:
        """Returns the label, and where a node has fetched it to."""
        ref = self.put(step, **config)
        folder = self.folder / "policies" / ref.label
        fetch(self.store, ref.prefix, folder)
        return ref.label, folder

    def put(self, step: int, **config: Any) -> PolicyRef:
        base = make_model(self.folder / "again", seed=0)
        torch.manual_seed(step)
        model = get_peft_model(base, LoraConfig(**{**LORA, **config}, init_lora_weights=False))
        for weight in (one for name, one in model.named_parameters() if "lora_" in name):
            weight.data.mul_(3.0)
        publisher = AdapterPublisher(
            self.store,
            model.peft_config["default"].to_dict(),
            "base",
            self.identity,
            self.folder / "scratch",
            (0, 1, 1),
            ServedTypes(),
            StepCosts(),
        )
        ref = publisher.publish(PolicyVersion(0, step), adapter_tensors(model), canary_of(model, "no"))
        self.models[ref.label] = model.eval()
        return ref

    def greedy(self, label: str) -> list[int]:
        """What transformers and PEFT go on with after PROMPT."""
        inputs = torch.tensor([PROMPT])
        made = self.models[label].generate(
            input_ids=inputs, do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS, pad_token_id=0
        )
        return [int(token) for token in made[0, len(PROMPT) :]]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def node(trainer: Trainer) -> Iterator[Node]:
    node = Node(trainer.folder, "float32", peft=LORA)
    yield node
    node.stop()


def serve(node: Node, policy: tuple[str, Path]) -> None:
    label, folder = policy
    canary = node.check.verify(folder)
    assert canary is not None
    node.load(label, folder, canary)


def greedy_of(node: Node, label: str) -> list[int]:
    asked = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0.0, "return_token_ids": True}
    status, said = node.completion(label, {**asked, "ignore_eos": True, "min_tokens": TOKENS})
    assert status == 200, said
    tokens: list[int] = said["choices"][0]["token_ids"]
    return tokens


def test_each_adapter_version_computes_what_its_trainer_does(node: Node, trainer: Trainer) -> None:
    first, second = trainer.publish(1), trainer.publish(2)
    assert first[0] != second[0]
    for policy in (first, second, first):  # the last one as after a rollback
        serve(node, policy)
        for _ in range(2):  # the second time from the prefix cache
            assert greedy_of(node, policy[0]) == trainer.greedy(policy[0])
    assert trainer.greedy(first[0]) != trainer.greedy(second[0])
    assert node.asked(second[0]) == 409


def test_bare_weights_serve_no_requests(node: Node, trainer: Trainer) -> None:
    policy = trainer.publish(3)
    serve(node, policy)
    assert node.completion(policy[0], {"prompt": PROMPT, "max_tokens": 1})[0] == 200
    assert node.asked("0-0") == 409


def test_adapter_computed_otherwise_is_refused_without_restart(node: Node, trainer: Trainer) -> None:
    (first, there), (second, _) = trainer.publish(7), trainer.publish(8)
    canary = canary_of(trainer.models[second], "no")
    boot_id = node.server.boot_id
    with pytest.raises(PolicyRefused, match="log-probabilities") as caught:
        node.load(first, there, canary)
    assert not caught.value.touched
    assert node.asked(first) == 409
    serve(node, (first, there))
    assert greedy_of(node, first) == trainer.greedy(first)
    assert node.server.boot_id == boot_id


def test_adapter_of_nan_is_refused_without_restart(node: Node, trainer: Trainer) -> None:
    label, folder = trainer.publish(11)
    path = folder / "adapter_model.safetensors"
    save_file({name: one * torch.nan for name, one in load_file(path).items()}, path)
    with pytest.raises(PolicyRefused, match="the engine failed to compute the canary") as caught:
        node.load(label, folder, canary_of(trainer.models[label], "no"))
    assert not caught.value.touched
    serve(node, trainer.publish(12))


def test_a_layer_that_the_engine_does_not_adapt_is_named(node: Node, trainer: Trainer) -> None:
    """vLLM leaves it out without a word; with an adapter near its beginning no canary tells."""
    of_another_name, there = trainer.publish(9)
    path = there / "adapter_model.safetensors"
    save_file({name.replace("layers.1.", "layers.7."): one for name, one in load_file(path).items()}, path)
    head, with_head = trainer.publish(10, target_modules=[*TARGETS, "lm_head"])
    for label, folder, layer in (
        (of_another_name, there, "model.layers.7.mlp.down_proj"),
        (head, with_head, "lm_head"),
    ):
        with pytest.raises(PolicyRefused, match=f"adapter layers that vLLM's model lacks: {layer}") as caught:
            node.load(label, folder, None)
        assert not caught.value.touched
        assert node.asked(label) == 409
