"""When an adapter travels alone, and which tensors are one: truth tables over what run.yaml and the files say."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_orch.policies.model.spec import Dataset, RolloutSpec, RunSpec, TrainerSpec
from grpo_orch.policies.weights.adapters import (
    adapter_mismatch,
    adapter_obstacle,
    engine_flags,
    engine_rank,
    engine_type,
)
from grpo_orch.policies.weights.tensors import Tensor
from grpo_orch.tasks.rollout.vllm.flags import argv_of

CONFIG = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 151_936}
EXPERTS = {"num_experts": 8}
SEES: dict[str, Any] = {"text_config": {"hidden_size": 2560}, "vision_config": {}}
GEMMA = {"vocab_size": 262_144}


def spec_of(
    peft: dict[str, Any] | None,
    vllm: dict[str, Any] | None = None,
    grpo: dict[str, Any] | None = None,
    accelerate: dict[str, Any] | None = None,
) -> RunSpec:
    trainer = TrainerSpec(
        model="m", dataset=Dataset(path="d"), reward_funcs=("x.y",), peft=peft, accelerate=accelerate
    )
    return RunSpec(
        name="t", storage="memory://t", trainer=trainer, grpo=grpo or {}, rollout=RolloutSpec(vllm=vllm or {})
    )


@pytest.mark.parametrize(
    "peft",
    [
        {},
        {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
        {"r": 512, "target_modules": ["q_proj", "self_attn.v_proj"], "use_rslora": True, "lora_dropout": 0.1},
        {"rank_pattern": {"q_proj": 20}, "alpha_pattern": {"q_proj": 3}, "layers_to_transform": [0, 1]},
        {"layers_pattern": "layers", "init_lora_weights": "gaussian", "bias": "none", "use_dora": False},
        {
            "modules_to_save": None,
            "layer_replication": [],
            "exclude_modules": ["k_proj"],
            "task_type": "CAUSAL_LM",
        },
    ],
)
def test_plain_adapter_is_published_alone(peft: dict[str, Any]) -> None:
    assert adapter_obstacle(spec_of(peft), CONFIG) == ""
    assert adapter_obstacle(spec_of(peft), {}) == ""


@pytest.mark.parametrize(
    ("peft", "why"),
    [
        (None, "no adapter is trained"),
        ({"use_dora": True}, "trainer.peft.use_dora"),
        ({"modules_to_save": ["lm_head"]}, "trainer.peft.modules_to_save"),
        ({"bias": "lora_only"}, "trainer.peft.bias: lora_only"),
        ({"lora_bias": True}, "trainer.peft.lora_bias"),
        ({"use_qalora": True}, "trainer.peft.use_qalora"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "trainer.peft.target_parameters"),
        ({"trainable_token_indices": [1]}, "trainer.peft.trainable_token_indices"),
        ({"alora_invocation_tokens": [1]}, "trainer.peft.alora_invocation_tokens"),
        ({"layer_replication": [[0, 1]]}, "trainer.peft.layer_replication"),
        ({"a_key_of_tomorrow": 1}, "trainer.peft.a_key_of_tomorrow"),
        ({"init_lora_weights": "pissa_niter_4"}, "trainer.peft.init_lora_weights: pissa_niter_4"),
        ({"init_lora_weights": "olora"}, "changes the base weights"),
        ({"init_lora_weights": "eva"}, "changes the base weights"),
        ({"target_modules": r".*\.q_proj"}, "is a pattern"),
        ({"target_modules": ["q_proj", "lm_head"]}, "has lm_head"),
        ({"target_modules": ["model.embed_tokens"]}, "has embed_tokens"),
        ({"r": 513}, "rank 513 is above vLLM's maximum, 512"),
        ({"r": 4, "rank_pattern": {"q_proj": 600}}, "rank 600"),
    ],
)
def test_more_than_an_adapter_is_published_whole(peft: dict[str, Any] | None, why: str) -> None:
    assert why in adapter_obstacle(spec_of(peft), CONFIG)


@pytest.mark.parametrize(
    ("changes", "config", "why"),
    [
        ({"vllm": {"enable-lora": False}}, CONFIG, "rollout.vllm.enable-lora is false"),
        ({"vllm": {"enable_lora": False}}, CONFIG, "rollout.vllm.enable-lora is false"),
        ({"vllm": {"quantization": "fp8"}}, CONFIG, "rollout.vllm.quantization"),
        ({"vllm": {"enable-lora": True, "tensor-parallel-size": 2}}, CONFIG, ""),
        ({"grpo": {"model_init_kwargs": {"quantization_config": {"bits": 4}}}}, CONFIG, "model_init_kwargs"),
        ({"grpo": {"model_init_kwargs": '{"load_in_4bit": true}'}}, CONFIG, "model_init_kwargs"),
        ({"grpo": {"model_init_kwargs": {"dtype": "bfloat16"}}}, CONFIG, ""),
        ({"grpo": {"fsdp": "full_shard"}}, CONFIG, "grpo.fsdp"),
        ({"accelerate": {"distributed_type": "FSDP"}}, CONFIG, "trainer.accelerate may shard"),
        (
            {"accelerate": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}},
            CONFIG,
            "shard",
        ),
        ({"accelerate": {"deepspeed_config": {"deepspeed_config_file": "z.json"}}}, CONFIG, "shard"),
        ({"accelerate": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}}, CONFIG, ""),
        ({"accelerate": {"distributed_type": "MULTI_GPU", "num_processes": 4}}, CONFIG, ""),
        ({}, {"architectures": ["FalconForCausalLM"]}, "vLLM does not support adapters for FalconForCausalLM"),
        ({}, {**CONFIG, "quantization_config": {"bits": 4}}, "quantised (its config.json)"),
        ({}, GEMMA, "vLLM needs named target_modules"),
        ({}, EXPERTS, "the model has experts"),
        ({}, SEES, "multimodal"),
        ({"grpo": {"model_init_kwargs": {"revision": "v1"}}}, CONFIG, "different revisions"),
        ({"grpo": {"model_init_kwargs": '{"revision": "v1"}'}}, CONFIG, "different revisions"),
        ({"vllm": {"revision": "v1"}, "grpo": {"model_init_kwargs": '{"revision": "v1"}'}}, CONFIG, ""),
        ({"vllm": {"revision": "v1"}}, CONFIG, "different revisions"),
        ({"vllm": {"revision": "v1"}, "grpo": {"model_init_kwargs": {"revision": "v1"}}}, CONFIG, ""),
    ],
)
def test_impossible_adapter_settings_are_refused(
    changes: dict[str, Any], config: dict[str, Any], why: str
) -> None:
    said = adapter_obstacle(spec_of({"r": 8}, **changes), config)
    assert said == "" if why == "" else why in said


@pytest.mark.parametrize("config", [GEMMA, EXPERTS, SEES])
def test_named_targets_spare_the_head_and_the_experts(config: dict[str, Any]) -> None:
    assert adapter_obstacle(spec_of({"target_modules": ["q_proj"]}), config) == ""


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (9, 16), (33, 64), (300, 320), (512, 512)])
def test_the_engine_has_room_for_the_rank(rank: int, room: int) -> None:
    assert engine_rank({"r": rank}) == room
    assert engine_rank({"r": 1, "rank_pattern": {"q_proj": rank}}) == room


def test_vllm_adapter_flags_follow_run_yamls_adapters() -> None:
    spec = spec_of({"r": 20, "target_modules": ["v_proj", "self_attn.q_proj"]}, {"max-lora-rank": 8})
    argv = argv_of(spec, "127.0.0.1", 1, None, adapters=True)
    assert "--enable-lora" in argv
    assert argv[argv.index("--max-lora-rank") + 1] == "32"
    where = argv.index("--lora-target-modules")
    assert argv[where + 1 : where + 3] == ["q_proj", "v_proj"]
    assert argv[argv.index("--served-model-name") + 1] == "base", "nobody gets bare weights for the policy"
    assert "--enable-lora" not in argv_of(spec, "127.0.0.1", 1, None)
    assert "lora-target-modules" not in engine_flags(spec_of({"target_modules": "all-linear"}))


Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
BASE = {f"{Q}.weight": Tensor("BF16", (64, 32)), f"{UP}.weight": Tensor("BF16", (128, 32))}
SAVED = {"r": 4, "lora_alpha": 8, "rank_pattern": {"up_proj": 2}}


def pair(layer: str, inner: tuple[int, ...], outer: tuple[int, ...], dtype: str = "F32") -> dict[str, Tensor]:
    name = f"base_model.model.{layer}"
    return {f"{name}.lora_A.weight": Tensor(dtype, inner), f"{name}.lora_B.weight": Tensor(dtype, outer)}


GOOD = {**pair(Q, (4, 32), (64, 4)), **pair(UP, (2, 32), (128, 2))}


@pytest.mark.parametrize(
    ("published", "why"),
    [
        (GOOD, ""),
        (pair(Q, (4, 32), (64, 4), "BF16"), ""),
        ({**GOOD, **pair("vision.q", (4, 9), (9, 4))}, ""),  # its name in the files may be another one
        ({}, "no tensors"),
        ({**GOOD, "model.norm.weight": Tensor("F32", (32,))}, "does not belong to an adapter: model.norm.weight"),
        ({f"base_model.model.{Q}.lora_magnitude_vector": Tensor("F32", (64,))}, "does not belong to an adapter"),
        ({f"base_model.model.{Q}.lora_A.weight": Tensor("F32", (4, 32))}, f"half of the adapter of {Q}"),
        (pair(Q, (8, 32), (64, 8)), "wrong rank"),
        (pair(Q, (4, 32), (64, 8)), "wrong rank"),
        (pair(UP, (4, 32), (128, 4)), f"wrong rank: {UP} has [4, 32] and [128, 4], adapter_config.json has 2"),
        (pair(Q, (4, 33), (64, 4)), f"wrong shape: {Q} is adapted as [64, 33], the model's is [64, 32]"),
        (pair(Q, (4, 32), (65, 4)), "wrong shape"),
        (pair(Q, (4,), (64, 4)), "wrong rank"),
        (pair(Q, (4, 32), (64, 4), "I8"), "quantised weights"),
    ],
)
def test_adapter_tensors_are_recognised(published: dict[str, Tensor], why: str) -> None:
    said = adapter_mismatch(published, SAVED, BASE, engine_rank=8)
    assert said == "" if why == "" else why in said


def test_ranks_are_compared_without_base_files_and_shapes_not() -> None:
    assert adapter_mismatch(pair(Q, (4, 33), (64, 4)), SAVED, {}, engine_rank=8) == ""
    assert "has 16, the engine supports at most 8" in adapter_mismatch(
        pair(Q, (16, 32), (64, 16)), {"r": 16}, BASE, engine_rank=8
    )


@pytest.mark.parametrize(
    ("vllm", "config", "expected"),
    [
        ({}, {"dtype": "bfloat16"}, "BF16"),
        ({}, {"torch_dtype": "float16"}, "F16"),
        ({}, {"dtype": "float32"}, "BF16"),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, "F32"),
        ({"lora-dtype": "float16"}, {"dtype": "bfloat16"}, "F16"),
        ({"lora_dtype": "auto", "dtype": "half"}, {"dtype": "bfloat16"}, "F16"),
        ({"hf-overrides": {}}, {"dtype": "bfloat16"}, None),
        ({}, {}, None),
    ],
)
def test_adapter_dtypes_of_engines(vllm: dict[str, Any], config: dict[str, Any], expected: str | None) -> None:
    assert engine_type(spec_of({}, vllm=vllm), config) == expected
