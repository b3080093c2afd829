"""What a step consists of, against TRL's own arithmetic written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpo_orch.orchestrator.plan.machines import passes_of, prompt_tokens, work_of
from grpo_orch.policies.model.spec import Replicas, RolloutSpec, RunSpec
from grpo_orch.policies.sizing.training import batches_per_generation
from tests.orchestrator.plan.recipes import spec_of


def run(**grpo: Any) -> RunSpec:
    return replace(spec_of("qwen-32b"), grpo=grpo)


@pytest.mark.parametrize(
    ("grpo", "batches", "generated", "trained", "prompts"),
    [
        ({}, 1, 8, 8, 1),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}, 8, 32, 32, 4),
        ({"gradient_accumulation_steps": 2, "num_iterations": 4}, 2, 4, 16, 0.5),
        ({"generation_batch_size": 64, "num_generations": 16}, 8, 8, 8, 0.5),
        ({"steps_per_generation": 4}, 4, 8, 8, 1),
    ],
)
def test_a_step(grpo: dict[str, Any], batches: int, generated: float, trained: float, prompts: float) -> None:
    work = work_of(run(**grpo))
    assert batches_per_generation(run(**grpo)) == batches
    assert (work.generated, work.trained, work.prompts) == (generated, trained, prompts)


def test_eight_processes_make_eight_times_as_many() -> None:
    spec = run()
    wide = replace(spec, trainer=replace(spec.trainer, resources={"accelerators": "H100:8"}))
    assert work_of(wide).trained == 64


@pytest.mark.parametrize(
    ("context", "completion", "tokens"),
    [
        (4096, 3900, 196),
        (4096, 100, 512),
        ("4k", 3900, 100),
        ("4K", 3900, 196),
        ("auto", 3900, 512),  # vLLM chooses
        (-1, 3900, 512),
    ],
)
def test_prompts_are_cut_to_the_engines_context(context: object, completion: int, tokens: int) -> None:
    spec = run(max_completion_length=completion)
    assert prompt_tokens(replace(spec, rollout=replace(spec.rollout, vllm={"max-model-len": context}))) == tokens
    alone = RolloutSpec(replicas=Replicas(min=0, max=0), vllm={"max-model-len": context})
    assert prompt_tokens(replace(spec, rollout=alone)) == 512


def test_flops_computed_for_each_token() -> None:
    spec = run(beta=0.04)
    assert passes_of(spec).flops_per_param == 4 + 2 + 2 + 2  # checkpointing, reference, the policy's own again
    assert passes_of(run(vllm_importance_sampling_correction=False)).flops_per_param == 4 + 2
    alone = replace(run(), rollout=replace(spec.rollout, replicas=Replicas(min=0, max=0)))
    assert not passes_of(alone).old
    assert passes_of(replace(alone, grpo={"num_iterations": 2})).old
    assert passes_of(replace(alone, grpo={"steps_per_generation": 4})).old
    whole = replace(alone, trainer=replace(alone.trainer, peft=None), grpo={"gradient_checkpointing": False})
    assert passes_of(whole).flops_per_param == 6
