"""What training takes, by the way in which it is done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpo_orch.policies.model.spec import Dataset, Replicas, RolloutSpec, RunSpec, TrainerSpec
from grpo_orch.policies.sizing.engine import Engine, engine_memory
from grpo_orch.policies.sizing.memory import host_memory, moments
from grpo_orch.policies.sizing.shapes import shape_of
from grpo_orch.policies.sizing.training import (
    Lora,
    Training,
    adapter_params,
    lora_of,
    trained_params,
    training_of,
)
from tests.generators import model_configs as known

SHAPE = shape_of(known.QWEN_2_5_7B)
LARGE = shape_of(known.QWEN_2_5_32B)
GB = 10**9
ALL = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
ZERO: dict[str, Any] = {"weight_bytes": 2, "stored_bytes": 2}


def spec_with(grpo: dict[str, Any], rollout: RolloutSpec | None = None, **trainer: Any) -> RunSpec:
    of = TrainerSpec(model="m", dataset=Dataset(path="d"), reward_funcs=(), **trainer)
    return RunSpec(name="r", storage="file:///s", trainer=of, grpo=grpo, rollout=rollout or RolloutSpec())


def held(training: Training, *parts: str) -> float:
    """Bytes a parameter of these parts, when the optimizer takes its step."""
    at = next(one for one in moments(SHAPE, training) if one.moment == "optimizer's step")
    return sum(at.parts.get(part, 0) for part in parts) / SHAPE.params


ADAM = ("weights", "gradients", "optimizer")


@pytest.mark.parametrize(
    ("training", "each"),
    [
        (Training(), 16),
        (Training(weight_bytes=2, stored_bytes=2, state_bytes=4), 8),
        (Training(state_bytes=2), 10),
        (Training(processes=8, sharding="zero1", **ZERO), 2 + 2 + 12 / 8),
        (Training(processes=8, sharding="zero2", **ZERO), 2 + 2 / 8 + 12 / 8),
        (Training(processes=8, sharding="zero3", **ZERO), 16 / 8),
        (Training(processes=8, sharding="fsdp", weight_bytes=2), 16 / 8),
        (Training(processes=1, sharding="zero2", offloads_optimizer=True, **ZERO), 2),
        (Training(processes=4, sharding="zero3", offloads_optimizer=True, offloads_weights=True, **ZERO), 0),
    ],
    ids=["float32", "bfloat16", "8-bit", "zero1", "zero2", "zero3", "fsdp", "zero2 offloaded", "zero3 offloaded"],
)
def test_bytes_a_parameter_by_how_it_is_divided(training: Training, each: float) -> None:
    assert held(training, *ADAM) == pytest.approx(each, rel=1e-6)


def test_zero_3_copies_gradients_of_1e9_weights_at_a_time() -> None:
    """A 32B model over 8: 4,096 million elements a process, of which DeepSpeed updates 1,000 million at once."""
    three, two = (
        next(one for one in moments(LARGE, Training(processes=8, sharding=stage, **ZERO)) if "step" in one.moment)
        for stage in ("zero3", "zero2")
    )
    assert three.parts["gradients copied"] == 6 * 10**9
    assert two.parts["gradients copied"] == pytest.approx(6 * LARGE.params / 8)
    few = Training(processes=64, sharding="zero3", **ZERO)
    small = next(one for one in moments(LARGE, few) if "step" in one.moment)
    assert small.parts["gradients copied"] == pytest.approx(6 * LARGE.params / 64, rel=1e-6)


def test_data_parallel_processes_copy_the_gradients() -> None:
    assert held(Training(processes=2), "gradients sent") == 4
    assert held(Training(processes=1), "gradients sent") == 0


def test_offloaded_states_are_in_the_machines_memory() -> None:
    away = Training(sharding="zero2", offloads_optimizer=True, **ZERO)
    assert host_memory(SHAPE, away).parts["optimizer"] == 16 * SHAPE.params
    assert "optimizer" not in host_memory(SHAPE, Training()).parts


def test_an_adapter_is_two_matrices_for_each_layer_that_it_is_on() -> None:
    attention = Lora(16, frozenset({"q_proj", "o_proj"}))
    assert adapter_params(SHAPE, attention) == 28 * 16 * 2 * (3584 + 3584)
    assert trained_params(SHAPE, Training(lora=attention)) == adapter_params(SHAPE, attention)
    experts = shape_of(known.QWEN_3_30B_A3B)
    assert adapter_params(experts, Lora(8, ALL)) == adapter_params(experts, Lora(8, ALL - {"gate_proj"}))


def test_modules_trained_with_adapter_cost_as_in_full_training() -> None:
    """The head and the embedding of 7B: 2 x 545 million, of 16 bytes each; of 8 in bfloat16, PEFT leaves it so."""
    plain, ends = Lora(8, ALL), Lora(8, ALL, frozenset({"lm_head", "embed_tokens"}))
    parts = ("adapter", "gradients", "optimizer")
    for each, kinds in ((16, {}), (8, ZERO)):
        more = held(Training(lora=ends, **kinds), *parts) - held(Training(lora=plain, **kinds), *parts)
        assert more * SHAPE.params == pytest.approx(each * 2 * 152_064 * 3584)
    assert trained_params(SHAPE, Training(lora=ends)) == adapter_params(SHAPE, plain) + 2 * 152_064 * 3584
    at = [
        next(one for one in moments(SHAPE, Training(lora=lora)) if "head" in one.moment) for lora in (plain, ends)
    ]
    assert at[1].parts["logits"] - at[0].parts["logits"] == 4 * 152_064 * 3584


def test_the_trainer_that_generates_keeps_a_cache() -> None:
    made = Training(generation_sequences=16, lora=Lora(8, ALL))
    at = next(one for one in moments(SHAPE, made) if one.moment == "generation")
    assert at.parts["KV cache"] >= 16 * (512 + 256) * 57_344
    assert all(one.moment != "generation" for one in moments(SHAPE, replace(made, generation_sequences=0)))


def test_a_run_as_it_is_written() -> None:
    grpo = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 8,
        "max_completion_length": 300,
        "beta": 0.02,
        "gradient_checkpointing": False,
        "optim": "adamw_8bit",
        "model_init_kwargs": '{"dtype": "bfloat16", "attn_implementation": "flash_attention_2"}',
    }
    got = training_of(spec_with(grpo), SHAPE, 100)
    assert (got.sequences, got.completion_tokens, got.prompt_tokens, got.accumulates) == (4, 300, 100, True)
    assert (got.weight_bytes, got.compute_bytes, got.is_mixed, got.attention) == (2, 2, False, "flash")
    assert (got.reference, got.checkpointing, got.state_bytes) == (True, False, 2 + 8 / 256)


def test_omitted_settings_are_trls_defaults() -> None:
    got = training_of(spec_with({}), SHAPE, 100)
    assert got == Training(prompt_tokens=100)
    assert (got.weight_bytes, got.compute_bytes, got.state_bytes) == (4, 2, 8)


def test_with_an_adapter_the_reference_costs_nothing() -> None:
    got = training_of(spec_with({"beta": 0.04}, peft={"r": 16}), SHAPE, 100)
    assert (got.reference, got.lora) == (False, Lora(16, frozenset({"q_proj", "v_proj"})))
    assert lora_of({"target_modules": "all-linear"}, SHAPE) == Lora(8, ALL)
    assert lora_of({"target_modules": ["model.layers.0.q_proj"]}, SHAPE) == Lora(8, frozenset({"q_proj"}))


@pytest.mark.parametrize(
    ("trainer", "grpo", "divided"),
    [
        ({"resources": {"accelerators": "H100:8"}}, {}, (8, "none", False, False)),
        ({"accelerate": {"distributed_type": "FSDP", "num_processes": 4}}, {}, (4, "fsdp", False, False)),
        (
            {"accelerate": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": True}}},
            {},
            (1, "fsdp", True, True),
        ),
        (
            {
                "accelerate": {
                    "distributed_type": "DEEPSPEED",
                    "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"},
                }
            },
            {},
            (1, "zero2", True, False),
        ),
        (
            {},
            {"deepspeed": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}},
            (1, "zero3", False, True),
        ),
    ],
)
def test_how_it_is_divided(trainer: dict[str, Any], grpo: dict[str, Any], divided: tuple[Any, ...]) -> None:
    got = training_of(spec_with(grpo, **trainer), SHAPE, 100)
    assert (got.processes, got.sharding, got.offloads_optimizer, got.offloads_weights) == divided


def test_deepspeed_and_fsdp_compute_in_two_bytes_always() -> None:
    zero = training_of(spec_with({}, accelerate={"distributed_type": "DEEPSPEED"}), SHAPE, 100)
    fsdp = training_of(spec_with({}, accelerate={"distributed_type": "FSDP"}), SHAPE, 100)
    assert (zero.weight_bytes, zero.stored_bytes, zero.state_bytes) == (2, 2, 8)
    assert (fsdp.weight_bytes, fsdp.stored_bytes, fsdp.state_bytes) == (2, 4, 8)


def test_without_rollout_nodes_a_whole_window_is_made_at_once() -> None:
    alone = RolloutSpec(replicas=Replicas(min=0, max=0))
    grpo = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    assert training_of(spec_with(grpo, alone), SHAPE, 100).generation_sequences == 16
    assert training_of(spec_with(grpo), SHAPE, 100).generation_sequences == 0


@pytest.mark.parametrize(
    ("optim", "each"),
    [
        ("adamw_torch_fused", 8),
        ("adamw_8bit", 2 + 8 / 256),
        ("lion_8bit", 1 + 4 / 256),
        ("lion_32bit", 4),
        ("sgd", 0),
    ],
)
def test_states_of_the_optimizers(optim: str, each: float) -> None:
    assert training_of(spec_with({"optim": optim}), SHAPE, 100).state_bytes == each


@pytest.mark.parametrize(("sharding", "sent"), [("zero1", 2.0), ("zero2", 1.0), ("zero3", 2.0), ("fsdp", 0.0)])
def test_deepspeeds_buckets_are_of_500_million_gradients(sharding: Any, sent: float) -> None:
    """In float32 under stage 1, in two bytes under stage 2, two of them under stage 3."""
    at = next(
        one for one in moments(LARGE, Training(processes=8, sharding=sharding, **ZERO)) if "step" in one.moment
    )
    assert at.parts.get("gradients sent", 0) == sent * GB


def test_two_gpus_hold_half_of_an_engines_weights_each() -> None:
    one, two = (engine_memory(LARGE, Engine(gpus=gpus), 140 * 2**30).gpu.parts for gpus in (1, 2))
    assert one["weights"] == 2 * LARGE.params == 2 * two["weights"]


def test_a_reference_model_is_as_wide_as_the_weights() -> None:
    assert held(Training(reference=True), "reference") == 4
    assert held(Training(reference=True, **ZERO), "reference") == 2
    assert held(Training(), "reference") == 0


def test_temporarily_whole_weights_under_zero_3_are_counted() -> None:
    """DeepSpeed gathers up to a thousand million weights; autocast keeps all that it has cast."""
    gathered = (held(Training(processes=8, sharding="zero3", **ZERO), "weights gathered"), 2 * GB / SHAPE.params)
    assert gathered[0] == pytest.approx(gathered[1])
    made: dict[str, Any] = {"generation_sequences": 8}
    for training, each in (
        (Training(**made), 2),
        (Training(**made, **ZERO), 0),
        (Training(**made, lora=Lora(8, ALL)), 0),
    ):
        at = next(one for one in moments(SHAPE, training) if one.moment == "generation")
        cast = SHAPE.text_params - SHAPE.embedding_params
        assert at.parts.get("weights cast", 0) == each * cast
