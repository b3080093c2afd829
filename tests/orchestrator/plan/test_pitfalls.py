"""Each rule speaks of a run that has its mistake, and of no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from grpo_orch.orchestrator.plan import pitfalls
from grpo_orch.orchestrator.plan.gather import make_plan
from grpo_orch.orchestrator.plan.machines import find_model
from grpo_orch.orchestrator.plan.model import PlanWarning
from grpo_orch.orchestrator.plan.prices import by_catalog
from grpo_orch.policies.model.spec import Replicas, RunSpec
from tests.generators.model_configs import CONFIGS
from tests.orchestrator.plan.recipes import PRICES, size_of, spec_of

Change = Callable[[RunSpec], RunSpec]


def seen(spec: RunSpec, **config: Any) -> pitfalls.PlannedRun:
    """What the rules look at; `config` changes the model's config.json."""

    def sizes(one: RunSpec) -> Any:
        return size_of(one, {**CONFIGS[one.trainer.model], **config})

    plan = make_plan(spec, sizes, by_catalog(spec, lambda _: PRICES))
    return pitfalls.PlannedRun(spec, find_model(spec, sizes), plan)


def grpo(**changes: Any) -> Change:
    return lambda spec: replace(spec, grpo={**spec.grpo, **changes})


def trainer(**changes: Any) -> Change:
    return lambda spec: replace(spec, trainer=replace(spec.trainer, **changes))


def rollout(**changes: Any) -> Change:
    return lambda spec: replace(spec, rollout=replace(spec.rollout, **changes))


def budget(**changes: Any) -> Change:
    return lambda spec: replace(spec, budget=replace(spec.budget, **changes))


def on(gpu: str, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"accelerators": f"{gpu}:{count}", "use_spot": False, **more}


ZERO3 = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}


def of_32b(*told: tuple[Change, str, str]) -> list[tuple[str, Change, str, str]]:
    return [("qwen-32b", *one) for one in told]


GPUS, CONTEXT = "trainer.resources.accelerators", "rollout.vllm.max-model-len"
BF16 = {"dtype": "bfloat16"}
LONG = {"max-model-len": 32768, "gpu-memory-utilization": 0.85}
# By rule: a recipe and a change of it, the key that is named and what is said.
BROKEN: dict[Callable[..., Any], list[tuple[str, Change, str, str]]] = {
    pitfalls.bfloat16_missing: [
        ("gsm8k-zero2", trainer(resources=on("T4")), "trainer.res", "grpo.fp16: true"),
        ("gsm8k-zero2", rollout(resources=on("V100")), "rollout.res", "dtype: half"),
    ],
    pitfalls.trainer_out_of_memory: of_32b(
        (trainer(resources=on("H100")), GPUS, "H100 has 80"),
        (grpo(gradient_checkpointing=False), GPUS, "fit with gradient_checkpointing: true"),
        (grpo(model_init_kwargs={}, max_completion_length=1024), GPUS, "fit with model_init_kwargs: {dtype: bfl"),
        (
            trainer(resources=on("H200", 2), peft=None, accelerate=ZERO3),
            GPUS,
            "would fit with 8 GPUs that shard the weights",
        ),
        (trainer(resources=on("L4", 8), peft=None, accelerate=ZERO3), GPUS, "; use a larger GPU or adapters"),
        (trainer(resources=on("T4")), GPUS, "; use a larger GPU or more GPUs that shard the weights"),
    ),
    pitfalls.too_few_processes: of_32b(
        (
            trainer(resources={"instance_type": "p5en.48xlarge"}),
            "trainer.accelerate.num_processes",
            "would see 8 GPUs, but TRL uses one GPU per process; set num_processes to 8",
        )
    ),
    pitfalls.frozen_weights_in_float32: of_32b((grpo(model_init_kwargs={}), "grpo.model_init", "122.1 GiB")),
    pitfalls.bfloat16_loses_updates: [
        ("math-two-gpus", grpo(model_init_kwargs=BF16, learning_rate=1e-6), "grpo.model_init_kwargs", "1e-06"),
    ],
    pitfalls.engine_out_of_memory: of_32b(
        (rollout(resources=on("L40S")), "rollout.res", "tensor-parallel"),
        (rollout(resources=on("H100"), vllm=LONG), CONTEXT, "one sequence of 32,768"),
        (
            rollout(vllm={"kv-cache-memory-bytes": 100 * 2**30}),
            "rollout.vllm.kv",
            "takes 167 GiB, but H200 has 140",
        ),
    ),
    pitfalls.heads_not_divisible: of_32b(
        (
            rollout(vllm={"tensor-parallel-size": 16}),
            "rollout.vllm.tensor-parallel-size",
            "40 attention heads are not divisible by 16; expected one of 1, 2, 4, 5, 8, 10",
        )
    ),
    pitfalls.kv_cache_too_small: of_32b(
        (grpo(per_device_train_batch_size=64, gradient_accumulation_steps=32), "rollout.vllm", "but a step is ")
    ),
    pitfalls.store_in_other_cloud: of_32b(
        (rollout(resources=on("H200", infra="gcp")), "storage", "1.1 GB a step for each node; use one cloud")
    ),
    pitfalls.rare_checkpoints: of_32b(
        (trainer(resources={**on("H200"), "use_spot": True}), "grpo.save_steps", "of training; lower save_steps")
    ),
    pitfalls.budget_too_small: of_32b(
        (budget(usd=50.0), "budget.usd", "stops at about step"),
        (budget(usd_per_h=5.0), "budget.usd_per_h", "6.06"),
    ),
}


@pytest.mark.parametrize(("rule", "case"), [(rule, case) for rule, cases in BROKEN.items() for case in cases])
def test_rule_names_the_key_and_the_remedy(
    rule: Callable[[pitfalls.PlannedRun], Any], case: tuple[str, Change, str, str]
) -> None:
    recipe, change, key, words = case
    told: list[PlanWarning] = list(rule(seen(change(spec_of(recipe)))))
    assert len(told) == 1, told
    assert told[0].key.startswith(key)
    assert words in told[0].message
    assert told[0].message.count("\n") == 0


def test_bfloat16_keeps_updates_of_half_its_distance() -> None:
    """Weights of 0.02 lie 2^-13 apart in it: half of that, 6.1e-5, is the least that counts."""
    for rate, said in ((6.0e-5, 1), (6.2e-5, 0)):
        change = grpo(model_init_kwargs={"dtype": "bfloat16"}, learning_rate=rate)
        assert len(list(pitfalls.bfloat16_loses_updates(seen(change(spec_of("math-two-gpus")))))) == said


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP"])
def test_float32_weights_lose_no_update_in_bfloat16(kind: str) -> None:
    change = grpo(model_init_kwargs={"dtype": "bfloat16"}, learning_rate=1e-6)
    divided = trainer(accelerate={"distributed_type": kind})(change(spec_of("math-two-gpus")))
    assert not list(pitfalls.bfloat16_loses_updates(seen(divided)))


def test_a_budget_ends_a_run_at_the_step_that_it_pays_for() -> None:
    told = seen(budget(usd=50.0)(spec_of("qwen-32b")))
    (warned,) = pitfalls.budget_too_small(told)
    assert told.plan.step is not None
    assert f"stops at about step {int(50 / (6.06 * told.plan.step.step_s / 3600))};" in warned.message


def test_memory_of_quantised_model_is_not_guessed() -> None:
    awq, spec = {"quantization_config": {"quant_method": "awq", "bits": 4}}, spec_of("qwen-32b")
    told = seen(spec, **awq)
    assert (told.model.shape, told.plan.trainer.memory) == (None, {})
    assert "quantised" in told.model.unknown
    alone = replace(spec, rollout=replace(spec.rollout, replicas=Replicas(min=0, max=0)))
    for asked in ({"load_in_4bit": True}, '{"quantization_config": {"load_in_4bit": true}}'):
        few = seen(grpo(model_init_kwargs=asked)(alone))
        assert few.model.shape is None
        assert [one.key for one in pitfalls.find_pitfalls(few)] == []  # nothing is said of float32


def test_every_rule_is_in_force_and_was_tried() -> None:
    assert set(pitfalls.RULES) == BROKEN.keys()


@pytest.mark.parametrize("recipe", ["qwen-32b", "math-two-gpus", "llama-one-card"])
def test_recipes_have_no_pitfalls(recipe: str) -> None:
    assert not pitfalls.find_pitfalls(seen(spec_of(recipe)))
