"""What `tasks/trl_grpo.py` takes for granted of TRL. A failure here names what a new release has changed."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import textwrap

import pytest
import torch

from tasks import trl_grpo
from tasks.fleet_client import FleetClient
from tasks.trl_grpo import EpochSampler, FleetGRPOTrainer

import trl.generation.vllm_client as vllm_client  # isort: skip  # trl_grpo first: it decides what TRL imports
import trl.generation.vllm_generation as vllm_generation  # isort: skip
import trl.trainer.grpo_trainer as grpo_trainer  # isort: skip
from trl.distributed import DistributedBackend  # isort: skip


def attributes_of(name: str, source: str) -> set[str]:
    """Every NAME of `<anything>.name.NAME` in the source."""
    return {
        node.attr
        for node in ast.walk(ast.parse(textwrap.dedent(source)))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == name
    }


@pytest.mark.parametrize("module", [vllm_generation, grpo_trainer])
def test_the_client_has_all_that_trl_asks_of_one(module: object) -> None:
    used = attributes_of("vllm_client", inspect.getsource(module))  # type: ignore[arg-type]  # a module
    assert used, "TRL no longer keeps its client in `vllm_client`"
    missing = {name for name in used if not callable(getattr(FleetClient, name, None))}
    assert not missing, f"TRL now also calls {missing} of its client"


@pytest.mark.parametrize("method", ["generate", "update_named_params"])
def test_the_client_takes_what_trls_takes(method: str) -> None:
    theirs = inspect.signature(getattr(vllm_client.VLLMClient, method)).parameters
    ours = inspect.signature(getattr(FleetClient, method)).parameters
    assert [name.lstrip("_") for name in ours] == list(theirs)
    if method == "generate":
        assert {n: p.default for n, p in ours.items()} == {n: p.default for n, p in theirs.items()}


def test_generation_is_made_where_it_is_replaced() -> None:
    source = inspect.getsource(grpo_trainer.GRPOTrainer.__init__)
    assert "VLLMGeneration(" in source, "GRPOTrainer no longer makes its backend from that name"
    assert grpo_trainer.VLLMGeneration is vllm_generation.VLLMGeneration
    made = inspect.getsource(vllm_generation.VLLMGeneration)
    for name in ("_init_vllm", "_iter_named_params", "_weight_metadata", "self._dist.is_fsdp"):
        assert name in made, f"VLLMGeneration no longer has {name}"
    assert hasattr(DistributedBackend, "is_zero3")


@pytest.mark.parametrize(
    "name",
    [
        "_get_train_sampler",
        "_calculate_rewards",
        "_save_checkpoint",
        "_load_optimizer_and_scheduler",
        "_get_output_dir",
    ],
)
def test_overridden_methods_are_still_called(name: str) -> None:
    assert callable(getattr(grpo_trainer.GRPOTrainer, name, None)), f"GRPOTrainer no longer has {name}"
    ours = inspect.signature(getattr(FleetGRPOTrainer, name)).parameters
    theirs = inspect.signature(getattr(grpo_trainer.GRPOTrainer, name)).parameters
    assert len(ours) >= len(theirs) or any(p.kind is p.VAR_POSITIONAL for p in ours.values())


def test_the_window_is_still_kept_where_it_is_saved_from() -> None:
    """A restart in the middle of a generation window needs both; see FleetGRPOTrainer._save_checkpoint."""
    source = inspect.getsource(grpo_trainer.GRPOTrainer._prepare_inputs)
    assert "generate_every = self.args.steps_per_generation * self.num_iterations" in source
    assert "self._step % generate_every == 0 or self._buffered_inputs is None" in source


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epochs_order_is_trls_however_it_is_reached(shuffle: bool) -> None:
    arguments = {"mini_repeat_count": 2, "batch_size": 3, "repeat_count": 2, "shuffle": shuffle, "seed": 7}
    theirs = trl_grpo.RepeatSampler(range(10), **arguments)
    in_order = [list(theirs) for _ in range(4)]
    for epoch in (3, 0, 2, 2, 1):
        ours = EpochSampler(range(10), **arguments)
        ours.set_epoch(epoch)
        assert list(ours) == in_order[epoch]
    assert (in_order[0] != in_order[1]) == shuffle


def test_vllm_is_not_imported_by_a_trainer() -> None:
    """In a process of its own: another test may have imported TRL in its own way."""
    code = "import sys, tasks.trl_grpo; sys.exit('vllm' in sys.modules)"
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
    generation._dist = type("Dist", (), {"is_fsdp": False, "is_zero3": False, "gather_params": fake_gather})()
    published = dict(generation._iter_named_params())
    assert names == published.keys()
    assert all(before[name].equal(weight) for name, weight in model.state_dict().items())
    query = "model.layers.0.self_attn.q_proj"
    lora = model.base_model.model.model.layers[0].self_attn.q_proj
    expected = lora.get_base_layer().weight + lora.get_delta_weight("default")
    assert published[f"{query}.weight"].equal(expected)


def fake_gather(_self: object, _parameters: object) -> object:
    import contextlib

    return contextlib.nullcontext()
