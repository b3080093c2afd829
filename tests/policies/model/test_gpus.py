"""How many GPUs run.yaml says a node takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpo_orch.policies.model.gpus import engine_gpus, gpus_of, named_gpus
from grpo_orch.policies.model.vocabulary import Role
from tests.stand_ins.world import spec


@pytest.mark.parametrize(
    ("resources", "count"),
    [
        ({}, None),
        ({"cpus": 8}, None),
        ({"accelerators": "H100"}, 1),
        ({"accelerators": "H100:8"}, 8),
        ({"accelerators": {"H100": 8, "H200": 8}}, 8),
        ({"accelerators": {"H100": 8, "L40S": 4}}, None),
        ({"accelerators": ["H100:2", "A100-80GB:2"]}, 2),
        ({"accelerators": "tpu-v5litepod-8"}, None),
        ({"accelerators": "H100:all"}, None),
        ({"accelerators": "H100:8.0"}, 8),
        ({"accelerators": "H100: 8"}, 8),
        ({"accelerators": {"H100": 8.0}}, 8),
        ({"accelerators": "H100:nan"}, None),
        ({"any_of": [{"accelerators": "H100:4"}, {"accelerators": "A100:4"}]}, 4),
        ({"any_of": [{"accelerators": "H100:4"}, {"accelerators": "A100:8"}]}, None),
        ({"accelerators": "H100:4", "ordered": [{"infra": "aws"}, {"infra": "gcp"}]}, 4),
        (
            {"accelerators": "H100:4", "ordered": [{"infra": "aws", "accelerators": "H200:2"}, {"infra": "gcp"}]},
            None,
        ),
    ],
)
def test_the_count_that_resources_name(resources: dict[str, Any], count: int | None) -> None:
    assert named_gpus(resources) == count


def test_an_engine_takes_the_product_of_what_works_together() -> None:
    assert engine_gpus({}) == 1
    assert engine_gpus({"tensor_parallel_size": 4, "pipeline-parallel-size": 2, "data-parallel-size": 9}) == 8
    assert engine_gpus({"tensor-parallel-size": "two", "pipeline-parallel-size": [1]}) == 1, "reported elsewhere"


def test_a_node_that_names_none_takes_what_works_on_it() -> None:
    plain = spec()
    run = replace(
        plain,
        trainer=replace(plain.trainer, accelerate={"num_processes": 4}),
        rollout=replace(plain.rollout, vllm={"tensor-parallel-size": 2}),
    )
    assert (gpus_of(Role.TRAINER, run), gpus_of(Role.ROLLOUT, run)) == (4, 2)
    on_cpu = replace(run, grpo={"use_cpu": True})
    assert (gpus_of(Role.TRAINER, on_cpu), gpus_of(Role.ROLLOUT, on_cpu)) == (0, 0)
    named = replace(on_cpu, rollout=replace(on_cpu.rollout, resources={"accelerators": "L4:1"}))
    assert (gpus_of(Role.TRAINER, named), gpus_of(Role.ROLLOUT, named)) == (0, 1)
