"""What a published adapter is called, and what lies in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import manifest
from grpo_orch.policies.model.spec import Dataset, RunSpec, TrainerSpec
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.wire import PolicyRef
from grpo_orch.policies.weights.adapters import ADAPTER_WEIGHTS
from grpo_orch.policies.weights.tensors import ServedTypes
from grpo_orch.tasks.machine.base_model import identity_of
from grpo_orch.tasks.rollout.vllm.flags import takes_adapters
from grpo_orch.tasks.storing.publish import AdapterPublisher
from grpo_orch.tasks.storing.step_costs import StepCosts
from grpo_orch.tasks.trainer.assemble import policy_publisher
from grpo_orch.tasks.trl.weights import adapter_tensors
from tests.stand_ins.catalog_rig import fetch

LORA: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "up_proj", "v_proj"], "init_lora_weights": False}


def base(seed: int = 0, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    return LlamaForCausalLM(config).to(dtype).eval()


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store(f"file://{folder}/store")

    def publish(self, model: Any, step: int = 0, identity: str = "abc", rounds_to: str | None = None) -> PolicyRef:
        config = model.peft_config["default"].to_dict()
        scratch = self.folder / "scratch"
        by, served = (0, 1, 1), ServedTypes(rounds_to)
        publisher = AdapterPublisher(self.store, config, "base", identity, scratch, by, served, StepCosts())
        ref = publisher.publish(PolicyVersion(0, step), adapter_tensors(model), None)
        publisher.removal.result()
        return ref

    def fetched(self, ref: PolicyRef) -> Path:
        folder = self.folder / "node" / ref.label
        assert fetch(self.store, ref.prefix, folder).digest == ref.digest
        return folder


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def adapted(seed: int = 1, **config: Any) -> Any:
    model = base()
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(**{**LORA, **config}))


def test_peft_reads_published_adapter_back_bit_for_bit(world: World) -> None:
    model = adapted().eval()
    folder = world.fetched(world.publish(model))
    assert manifest.load(world.store, "policies/0000/00000000-i1-a1").meta["kind"] == "adapter"
    again = PeftModel.from_pretrained(base(), folder).eval()
    inputs = torch.arange(8)[None]
    assert again(input_ids=inputs).logits.equal(model(input_ids=inputs).logits)
    model.save_pretrained(world.folder / "theirs")
    theirs = load_file(world.folder / "theirs" / ADAPTER_WEIGHTS)
    ours = load_file(folder / ADAPTER_WEIGHTS)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_adapter_name_follows_tensors_config_and_base_alone(world: World) -> None:
    def digest(identity: str = "abc", step: int = 0, **config: Any) -> str:
        return world.publish(adapted(**config), step, identity).digest

    same = digest()
    assert digest(step=1) == same
    elsewhere = adapted()
    elsewhere.peft_config["default"].base_model_name_or_path = "/another/machine"
    elsewhere.peft_config["default"].target_modules = {"v_proj", "up_proj", "q_proj"}
    assert world.publish(elsewhere).digest == same
    others = [digest(seed=2), digest(lora_alpha=9), digest(identity="def")]
    assert len({same, *others}) == 4


def test_adapters_of_bfloat16_model_keep_their_training_type(world: World) -> None:
    model = get_peft_model(base(dtype=torch.bfloat16), LoraConfig(**LORA))
    tensors = load_file(world.fetched(world.publish(model)) / ADAPTER_WEIGHTS)
    trained = {weight.dtype for weight in model.parameters() if weight.requires_grad}
    assert {one.dtype for one in tensors.values()} == trained == {torch.float32}


def test_adapter_is_published_in_the_engines_rounding(world: World) -> None:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    model = adapted(init_lora_weights=False)
    as_trained = world.fetched(world.publish(model))
    rounded = world.fetched(world.publish(model, step=1, rounds_to="BF16"))
    assert {one.dtype for one in load_file(rounded / ADAPTER_WEIGHTS).values()} == {torch.bfloat16}

    def loaded(folder: Path) -> Any:
        tensors, helper = load_file(folder / ADAPTER_WEIGHTS), PEFTHelper.from_local_dir(str(folder), 64)
        made = LoRAModel.from_lora_tensors(1, tensors, helper, device="cpu", dtype=torch.bfloat16)
        return {name: layer.optimize() for name, layer in made.loras.items()}

    one, other = loaded(as_trained), loaded(rounded)
    assert one.keys() == other.keys()
    assert all(one[name].lora_a.equal(other[name].lora_a) for name in one)
    assert all(one[name].lora_b.equal(other[name].lora_b) for name in one)


def test_same_model_is_recognised_in_other_file_divisions(tmp_path: Path) -> None:
    model = base()
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="4KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    same = identity_of(tmp_path / "whole")
    assert identity_of(tmp_path / "shards") == same != ""
    model.model.layers[1].mlp.down_proj.weight.data *= 1.01
    model.save_pretrained(tmp_path / "tuned")
    base(dtype=torch.bfloat16).save_pretrained(tmp_path / "rounded")
    assert len({same, identity_of(tmp_path / "tuned"), identity_of(tmp_path / "rounded")}) == 3
    (tmp_path / "none").mkdir()
    assert identity_of(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("told", "alone"),
    [({}, True), ({"quantization_config": {}}, True), ({"quantization_config": {"bits": 4}}, False)],
)
def test_trainer_decides_by_the_file_that_nodes_read(world: World, told: dict[str, Any], alone: bool) -> None:
    """Where it cannot compute in four bits it takes the quantisation out of model and configuration."""
    folder = world.folder / "base"
    base().save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **told}))
    asked = TrainerSpec(model=str(folder), dataset=Dataset(path="d"), reward_funcs=(), peft=LORA)
    spec = RunSpec(name="t", storage="memory://t", trainer=asked, grpo={})
    env = SimpleNamespace(workdir=world.folder, precedence=(0, 1, 1))
    here: dict[str, Any] = {"workdir": world.folder, "base_model": None, "costs": StepCosts()}
    start: Any = SimpleNamespace(spec=spec, store=world.store, env=env, **here)
    trainer = SimpleNamespace(model=adapted(), args=SimpleNamespace(model_init_kwargs=None))
    assert isinstance(policy_publisher(start, trainer), AdapterPublisher) is alone
    assert takes_adapters(spec) is alone
