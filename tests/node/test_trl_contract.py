"""What `tasks/trl/trl_grpo.py` takes for granted of TRL. A failure here names what a new release has changed."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from trl.trainer.utils import RepeatSampler

from grpo_orch.policies.serving.canary import Canary
from grpo_orch.policies.weights.tensors import mismatch
from grpo_orch.tasks.machine.base_model import tensors_in
from grpo_orch.tasks.storing.tensors import LazyTensor
from grpo_orch.tasks.trl import trl_grpo
from grpo_orch.tasks.trl.checkpoint_names import as_in_checkpoint
from grpo_orch.tasks.trl.trl_grpo import EpochSampler


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epochs_order_is_trls_however_it_is_reached(shuffle: bool) -> None:
    arguments = {"mini_repeat_count": 2, "batch_size": 3, "repeat_count": 2, "shuffle": shuffle, "seed": 7}
    theirs = RepeatSampler(range(10), **arguments)
    in_order = [list(theirs) for _ in range(4)]
    for epoch in (3, 0, 2, 2, 1):
        ours = EpochSampler(range(10), **arguments)
        ours.epoch = epoch
        assert list(ours) == in_order[epoch]
    assert (in_order[0] != in_order[1]) == shuffle


def test_vllm_is_not_imported_by_a_trainer() -> None:
    """In a process of its own: another test may have imported TRL in its own way."""
    code = "import sys, grpo_orch.tasks.trl.trl_grpo; sys.exit('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 0, "importing TRL imports vLLM again: a restart takes twice as long"


def test_merging_adapters_does_not_touch_the_base_weights() -> None:
    """TRL merges and unmerges at each synchronization, which rounds; the published weights must be merged ones."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    plain = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    names = set(plain.state_dict())
    model = get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    generation = object.__new__(trl_grpo.FleetGeneration)
    generation.model = model
    dist = {"is_fsdp": False, "is_zero3": False, "fsdp_version": None, "gather_params": fake_gather}
    generation._dist = type("Dist", (), dist)()
    generation._fleet_client = SimpleNamespace(publishes_adapters=False)  # type: ignore[assignment]  # a stand-in
    published = {name: one.read() for name, one in generation._weights()}
    assert names == published.keys()
    assert all(before[name].equal(weight) for name, weight in model.state_dict().items())
    query = "model.layers.0.self_attn.q_proj"
    lora = model.base_model.model.model.layers[0].self_attn.q_proj
    expected = lora.get_base_layer().weight + lora.get_delta_weight("default")
    assert published[f"{query}.weight"].equal(expected)


def test_what_the_weights_compute_is_known_when_they_are_handed_over() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    handed: list[object] = []

    class Client:
        publishes_adapters = False

        def take_canary(self, canary: Canary) -> None:
            self.canary = canary

        def update_named_params(self, *_: object) -> None:
            handed.append(self.canary)

        def reset_prefix_cache(self) -> None:
            pass

    generation = object.__new__(trl_grpo.FleetGeneration)
    generation.model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    generation.mode, generation._weight_metadata = "server", []
    generation.accelerator = SimpleNamespace(mixed_precision="bf16", is_main_process=True, state=None)
    generation._dist = SimpleNamespace(is_fsdp=False, is_zero3=False, fsdp_version=None, gather_params=fake_gather)
    generation._fleet_client = generation.vllm_client = Client()  # type: ignore[assignment]  # a stand-in
    generation.sync_weights()
    assert isinstance(handed[0], Canary)
    assert handed[0].dtype == "bfloat16"
    generation.model.lm_head.weight.data.mul_(2)
    generation.sync_weights()
    assert handed[1] != handed[0]


def test_an_adapter_that_travels_alone_is_handed_over_and_nothing_is_merged() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    plain = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)).bfloat16()
    lora = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    handed: dict[str, torch.Tensor] = {}
    client: Any = SimpleNamespace(
        publishes_adapters=True,
        take_canary=lambda _: None,
        update_named_params=lambda _, tensors: handed.update(tensors),
    )
    generation = object.__new__(trl_grpo.FleetGeneration)
    generation.model = get_peft_model(plain, lora)
    generation.model.merge_adapter = lambda *_: pytest.fail("merging rounds")
    before = {name: weight.clone() for name, weight in generation.model.state_dict().items()}
    generation.accelerator = SimpleNamespace(mixed_precision="no", is_main_process=True)
    generation._dist = SimpleNamespace(is_fsdp=False, is_zero3=False, fsdp_version=None)
    generation._fleet_client = client
    generation.sync_weights()
    assert all(before[name].equal(weight) for name, weight in generation.model.state_dict().items())
    assert len(handed) == 4
    query = "base_model.model.model.layers.0.self_attn.q_proj"
    assert handed[f"{query}.lora_A.weight"].equal(before[f"{query}.lora_A.default.weight"])
    handed.clear()
    generation.accelerator.is_main_process = False
    generation.sync_weights()
    assert handed == {}


@pytest.mark.parametrize("in_shards", [False, True])
@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "gpt2", "qwen3_moe", "glm4_moe"])
def test_what_is_published_is_named_as_the_models_own_checkpoint(
    kind: str, in_shards: bool, tmp_path: Path
) -> None:
    """With heads that are tied, experts that transformers holds as one tensor, and routers with stored buffers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "n_group": 1, "topk_group": 1}
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads, **experts)).save_pretrained(
        tmp_path / "base"
    )
    generation = object.__new__(trl_grpo.FleetGeneration)
    generation.model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    dist = {"is_fsdp": False, "is_zero3": in_shards, "fsdp_version": None, "gather_params": fake_gather}
    generation._dist = type("Dist", (), dist)()
    generation._fleet_client = SimpleNamespace(publishes_adapters=False)  # type: ignore[assignment]  # a stand-in
    published = {name: one.read().clone().contiguous() for name, one in generation._weights()}
    announced = {name: (one.dtype, one.shape) for name, one in generation._weights()}
    assert announced == {name: (one.dtype, tuple(one.shape)) for name, one in published.items()}
    save_file(published, tmp_path / "model.safetensors")
    tied = bool(generation.model.config.tie_word_embeddings)
    assert mismatch(tensors_in(tmp_path), tensors_in(tmp_path / "base"), tied=tied) == ""


def test_what_is_converted_is_read_once() -> None:
    """In the order of names, as a publisher takes them; each expert by itself would gather its layer anew."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "moe_intermediate_size": 32}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes, num_experts=4))
    reads: list[str] = []

    def read(name: str) -> torch.Tensor:
        reads.append(name)
        found: torch.Tensor = model.state_dict()[name]
        return found

    held = {
        name: LazyTensor(one.dtype, tuple(one.shape), functools.partial(read, name))
        for name, one in model.named_parameters()
    }
    there = as_in_checkpoint(model, held)
    for name in sorted(there):
        there[name].read()
    assert sorted(reads) == sorted(held)
    assert len(there) == len(held) + 2 * (3 * 4 - 2)


def fake_gather(_self: object, _parameters: object) -> object:
    import contextlib

    return contextlib.nullcontext()
