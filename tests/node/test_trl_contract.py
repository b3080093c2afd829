"""What `tasks/trl/trl_grpo.py` takes for granted of TRL. A failure here names what a new release has changed."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from trl.trainer.utils import RepeatSampler

from grpo_orch.policies.serving.canary import Canary
from grpo_orch.policies.weights.tensors import mismatch
from grpo_orch.tasks.machine.base_model import tensors_in
from grpo_orch.tasks.storing.tensors import LazyTensor
from grpo_orch.tasks.trl import trl_grpo
from grpo_orch.tasks.trl.parts.publishing import Publishing
from grpo_orch.tasks.trl.trl_grpo import EpochSampler
from grpo_orch.tasks.trl.weights import as_in_checkpoint

# TRL's classes by way of ours: TRL's trainer must not be imported before `trl_grpo`, which keeps vLLM out.
OURS: dict[Any, Any] = {
    ours.__base__: ours for ours in (trl_grpo.FleetGRPOTrainer, trl_grpo.FleetGeneration, trl_grpo.EpochSampler)
}
GRPOTrainer: Any = trl_grpo.FleetGRPOTrainer.__base__
TASKS = Path(trl_grpo.__file__).parents[1]
OF_EVERY_CLASS = {"__module__", "__doc__", "__annotations__", "__parameters__", "__orig_bases__"}


class Seam(NamedTuple):
    """An entry of the table in the module's docstring; `parameters` of a method, without `self`."""

    of: type
    name: str
    parameters: list[str] | None


def seams(text: str) -> list[Seam]:
    owners = {owner.__name__: owner for owner in OURS}
    found = re.findall(rf"\b({'|'.join(owners)})\.(\w+)(?:\(([^)]*)\))?", text)
    called = re.findall(rf"\b(?:{'|'.join(owners)})\.\w+(\()?", text)
    return [
        Seam(owners[owner], name, re.findall(r"\w+", parameters) if paren else None)
        for (owner, name, parameters), paren in zip(found, called, strict=True)
    ]


OVERRIDDEN, USED = map(seams, str(trl_grpo.__doc__).split("Used:"))


def source_of(owner: type) -> str:
    """The source of a class of TRL, and of those of TRL and transformers that it inherits from."""
    bases = [base for base in owner.__mro__ if base.__module__.startswith(("trl.", "transformers."))]
    return "\n".join(map(inspect.getsource, bases))


def private_reads(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield each private name that is read of an object, and whether the object is the reader itself."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            yield node.attr, isinstance(node.value, ast.Name) and node.value.id == "self"


def test_table_was_read_in_the_installed_versions() -> None:
    read = re.search(r"in trl (\S+) and transformers (\d\S+\d)", str(trl_grpo.__doc__))
    assert read is not None
    assert read.groups() == (version("trl"), version("transformers"))


@pytest.mark.parametrize("seam", [*OVERRIDDEN, *USED], ids=lambda seam: f"{seam.of.__name__}.{seam.name}")
def test_seam_is_as_the_table_says(seam: Seam) -> None:
    if seam.parameters is None:
        assert re.search(rf"self\.{seam.name}(: [^=]+)? = ", source_of(seam.of)), "it is not set"
    else:
        assert [*inspect.signature(getattr(seam.of, seam.name)).parameters][1:] == seam.parameters


@pytest.mark.parametrize("theirs", OURS, ids=lambda theirs: theirs.__name__)
def test_each_seam_is_overridden_once_in_the_tables_order(theirs: type) -> None:
    ours = OURS[theirs]
    overridden = [name for name in vars(ours) if hasattr(theirs, name) and name not in OF_EVERY_CLASS]
    table = [seam.name for seam in OVERRIDDEN if seam.of is theirs]
    assert ours.__bases__ == (theirs,)
    assert sorted(overridden) == sorted(table)
    if theirs is GRPOTrainer:
        assert overridden == table


def test_no_private_name_of_trl_is_used_without_an_entry() -> None:
    table = {seam.name for seam in (*OVERRIDDEN, *USED)}
    private = re.compile(r"(?:self\.|def )(_[a-z]\w*)")
    theirs = {name for owner in OURS for name in private.findall(source_of(owner))}
    used = {name for name, _ in private_reads(Path(trl_grpo.__file__))}
    assert used & theirs <= table
    assert {name for name in table if name.startswith("_") and not name.startswith("__")} <= used | {
        seam.name for seam in OVERRIDDEN
    }, "the table has an entry that nothing uses"


def test_no_other_module_uses_a_private_name_of_trl() -> None:
    table = {seam.name for seam in (*OVERRIDDEN, *USED)}
    modules = [path for path in TASKS.rglob("*.py") if path != Path(trl_grpo.__file__)]
    reads = {(path.name, name) for path in modules for name, is_own in private_reads(path) if not is_own}
    assert not {read for read in reads if read[1] in table}


def test_parts_inherit_from_nothing() -> None:
    for path in (TASKS / "trl" / "parts").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            assert bases in ([], ["Exception"]), path


def test_result_of_generate_has_our_fields() -> None:
    results = re.findall(r"return (prompt_ids, .*)", inspect.getsource(GRPOTrainer._generate))
    assert results == [", ".join(trl_grpo.Generated._fields)]


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        ("__init__", ["self.vllm_generation = VLLMGeneration(", "self._step = 0", "self._buffered_inputs = None"]),
        (
            "_prepare_inputs",
            [
                "generate_every = self.args.steps_per_generation * self.num_iterations",
                "if self._step % generate_every == 0 or self._buffered_inputs is None:",
                "self._buffered_inputs[self._step % self.args.steps_per_generation]",
            ],
        ),
        (
            "_generate",
            [
                "self.rollout_func(prompts, self)",
                "self._tokenize_prompts(prompts)",
                *[
                    f'"completions/{of}_{kind}length"'
                    for of in ("mean", "min", "max")
                    for kind in ("", "terminated_")
                ],
                '"completions/clipped_ratio"',
            ],
        ),
        (
            "_generate_single_turn",
            ["self.vllm_generation.sync_weights()", "self.vllm_generation.generate(", "[lp[0] for lp in seq]"],
        ),
        (
            "_generate_and_score_completions",
            [
                *['"frac_reward_zero_std"', '["reward"]', '["reward_std"]', 'f"rewards/{'],
                *[f'self._logs["{name}"].extend(' for name in ("prompt", "completion", "advantages")],
                *['"tool_mask"', '"completion_mask"', '"num_items_in_batch"', '"advantages"'],
                *['"old_per_token_logps"', '"sampling_per_token_logps"', "self._pending_metrics"],
            ],
        ),
        ("_calculate_rewards", ["rewards_per_func = gather(rewards_per_func)", "return rewards_per_func"]),
        ("_save_checkpoint", ["self._get_output_dir(trial=trial)"]),
    ],
)
def test_method_of_trl_contains_the_lines_that_parts_rely_on(method: str, parts: list[str]) -> None:
    text = inspect.getsource(getattr(GRPOTrainer, method))
    assert [part for part in parts if part not in text] == []


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
    published = {name: one.read() for name, one in publishing(model).weights()}
    assert names == published.keys()
    assert all(before[name].equal(weight) for name, weight in model.state_dict().items())
    query = "model.layers.0.self_attn.q_proj"
    lora = model.base_model.model.model.layers[0].self_attn.q_proj
    expected = lora.get_base_layer().weight + lora.get_delta_weight("default")
    assert published[f"{query}.weight"].equal(expected)


def test_canary_of_the_weights_is_known_at_the_handover() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    handed: list[object] = []

    class Client:
        publishes_adapters = False

        def take_canary(self, canary: Canary) -> None:
            self.canary = canary

        def take_weights(self, *_: object) -> None:
            handed.append(self.canary)

    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    weights = publishing(model, Client(), mixed_precision="bf16")
    weights.hand_over()
    assert isinstance(handed[0], Canary)
    assert handed[0].dtype == "bfloat16"
    model.lm_head.weight.data.mul_(2)
    weights.hand_over()
    assert handed[1] != handed[0]


def test_adapter_published_alone_is_never_merged() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    plain = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)).bfloat16()
    lora = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    handed: dict[str, torch.Tensor] = {}
    client: Any = SimpleNamespace(
        publishes_adapters=True,
        take_canary=lambda _: None,
        take_weights=lambda tensors: handed.update(tensors),
    )
    model = get_peft_model(plain, lora)
    model.merge_adapter = lambda *_: pytest.fail("merging rounds")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    publishing(model, client).hand_over()
    assert all(before[name].equal(weight) for name, weight in model.state_dict().items())
    assert len(handed) == 4
    query = "base_model.model.model.layers.0.self_attn.q_proj"
    assert handed[f"{query}.lora_A.weight"].equal(before[f"{query}.lora_A.default.weight"])
    handed.clear()
    publishing(model, client, is_main_process=False).hand_over()
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
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    weights = publishing(model, in_shards=in_shards)
    published = {name: one.read().clone().contiguous() for name, one in weights.weights()}
    announced = {name: (one.dtype, one.shape) for name, one in weights.weights()}
    assert announced == {name: (one.dtype, tuple(one.shape)) for name, one in published.items()}
    save_file(published, tmp_path / "model.safetensors")
    tied = bool(model.config.tie_word_embeddings)
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


def publishing(
    model: Any,
    client: Any = None,
    *,
    in_shards: bool = False,
    mixed_precision: str = "no",
    is_main_process: bool = True,
) -> Publishing:
    """What publishes a model's weights, in one process, without a trainer around it."""
    accelerator = SimpleNamespace(mixed_precision=mixed_precision, is_main_process=is_main_process)
    division = SimpleNamespace(is_fsdp=False, is_zero3=in_shards, gather_params=no_gather)
    client = client or SimpleNamespace(publishes_adapters=False)
    return Publishing(model, accelerator, division, client)


def no_gather(_parameters: object) -> object:
    return contextlib.nullcontext()
