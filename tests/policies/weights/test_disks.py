"""Disks by arithmetic: the models that people train, in both types, all weights and adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpo_orch.policies.model.spec import CheckpointsSpec, Dataset, Replicas, RolloutSpec, RunSpec, TrainerSpec
from grpo_orch.policies.model.vocabulary import Role
from grpo_orch.policies.weights.disk_sizes import GB, ModelSize, checkpoint_bytes, disk_gb, disk_parts

# Parameters in millions, as their model cards count them.
SIZES_M = {"0.6B": 596, "7B": 7616, "32B": 32764, "70B": 70554}
LORA = {"r": 16, "target_modules": "all-linear"}
PLAIN = {"architectures": ["Qwen2ForCausalLM"], "dtype": "bfloat16", "vocab_size": 151_936}


def model(name: str) -> ModelSize:
    params = SIZES_M[name] * 10**6
    return ModelSize(params, 2 * params, PLAIN)


def spec(peft: dict[str, Any] | None = None, **grpo: Any) -> RunSpec:
    return RunSpec(
        name="t",
        storage="s3://b/r",
        trainer=TrainerSpec(model="m", dataset=Dataset(path="d"), reward_funcs=(), peft=peft),
        grpo=grpo,
        cloud="sky",
    )


@pytest.mark.parametrize(
    ("name", "peft", "dtype", "checkpoint", "trainer_gb", "rollout_gb"),
    [
        # Full: 12 bytes a parameter in float32, 6 in bfloat16. Trainer 60 + 2 P + 4 P (policies) + 3 checkpoints;
        # rollout 60 + 2 P + 4 P; a tenth more, in tens. P in GB: 0.596, 7.616, 32.764, 70.554.
        ("0.6B", None, "float32", 7.2, 100, 70),
        ("0.6B", None, "bfloat16", 3.6, 90, 70),
        ("7B", None, "float32", 91.4, 420, 120),
        ("7B", None, "bfloat16", 45.7, 270, 120),
        ("32B", None, "float32", 393.2, 1580, 290),
        ("32B", None, "bfloat16", 196.6, 940, 290),
        ("70B", None, "float32", 846.6, 3330, 540),
        ("70B", None, "bfloat16", 423.3, 1930, 540),
        # Adapters of rank 16: 0.02 P of parameters at most, 12 bytes each in a checkpoint, and the base model once
        # more where it is restored; policies are adapters, of 4 bytes each.
        ("0.6B", LORA, "float32", 0.1, 70, 70),
        ("7B", LORA, "bfloat16", 1.8, 110, 90),
        ("32B", LORA, "float32", 7.9, 250, 150),
        ("32B", LORA, "bfloat16", 7.9, 250, 150),
        ("70B", LORA, "float32", 16.9, 450, 240),
        ("70B", LORA, "bfloat16", 16.9, 450, 240),
    ],
)
def test_disks_of_the_models_that_people_train(
    name: str, peft: dict[str, Any] | None, dtype: str, checkpoint: float, trainer_gb: int, rollout_gb: int
) -> None:
    run = spec(peft, model_init_kwargs={"dtype": dtype})
    assert checkpoint_bytes(run, model(name)) / GB == pytest.approx(checkpoint, abs=0.06)
    assert disk_gb(Role.TRAINER, run, model(name)) == trainer_gb
    assert disk_gb(Role.ROLLOUT, run, model(name)) == rollout_gb


ZERO_3 = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}
IN_A_FILE = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}


@pytest.mark.parametrize(
    ("accelerate", "grpo", "each"),
    [
        # Whole weights, those of what it goes on from, and its optimizer's: a copy in float32 and AdamW's two.
        (ZERO_3, {}, 2 + 12),
        (ZERO_3, {"bf16": False, "model_init_kwargs": {}}, 4 + 12),
        ({"distributed_type": "DEEPSPEED"}, {}, 2 + 2 + 12),
        ({"distributed_type": "DEEPSPEED"}, {"optim": "adamw_8bit"}, 2 + 2 + 4 + 2),
        (IN_A_FILE, {}, 2 + 2 + 12),
        ({}, {"deepspeed": "ds.json"}, 2 + 2 + 12),
        ({"distributed_type": "FSDP"}, {}, 4 + 4 + 8),
        ({"distributed_type": "MULTI_GPU"}, {}, 2 + 4),
    ],
)
def test_deepspeed_and_fsdp_states_are_stored_with_weights(
    accelerate: dict[str, Any], grpo: dict[str, Any], each: int
) -> None:
    run = spec(**{"model_init_kwargs": {"dtype": "bfloat16"}, **grpo})
    run = replace(run, trainer=replace(run.trainer, accelerate=accelerate))
    assert checkpoint_bytes(run, model("32B")) == each * model("32B").params


def test_model_options_may_be_json_as_on_a_command_line() -> None:
    asked = spec(model_init_kwargs='{"dtype": "bfloat16"}')
    assert checkpoint_bytes(asked, model("32B")) == checkpoint_bytes(
        spec(model_init_kwargs={"dtype": "bfloat16"}), model("32B")
    )
    for given in ('{"dtype', "[1]", "null", None):
        assert checkpoint_bytes(spec(model_init_kwargs=given), model("32B")) == checkpoint_bytes(
            spec(), model("32B")
        )


def test_restore_holds_base_model_where_a_restart_needs_it() -> None:
    with_kl = disk_parts(Role.TRAINER, spec(beta=0.02), model("32B"))["checkpoints"]
    without = disk_parts(Role.TRAINER, spec(), model("32B"))["checkpoints"]
    assert with_kl - without == model("32B").stored_bytes


def test_own_spool_8_bit_optimizer_and_float32_engines_count() -> None:
    run, of_32b = spec(), model("32B")
    elsewhere = replace(run, checkpoints=CheckpointsSpec(spool="/mnt/nvme"))
    assert disk_parts(Role.TRAINER, elsewhere, of_32b)["checkpoints"] == checkpoint_bytes(run, of_32b)
    assert checkpoint_bytes(spec(optim="paged_adamw_8bit"), of_32b) == 6 * of_32b.params
    wide = replace(run, rollout=RolloutSpec(vllm={"dtype": "float32"}))
    assert disk_parts(Role.ROLLOUT, wide, of_32b)["two policies"] == 8 * of_32b.params


def test_a_trainer_that_generates_itself_publishes_nothing() -> None:
    alone = replace(spec(), rollout=RolloutSpec(replicas=Replicas(min=0, max=0)))
    assert "two policies" not in disk_parts(Role.TRAINER, alone, model("7B"))


@pytest.mark.parametrize("config", [{}, {**PLAIN, "architectures": ["BloomForCausalLM"]}])
def test_adapters_that_may_be_merged_count_as_whole_policies(config: dict[str, Any]) -> None:
    of_7b = replace(model("7B"), config=config)
    assert disk_parts(Role.ROLLOUT, spec(LORA), of_7b)["two policies"] == 4 * of_7b.params
