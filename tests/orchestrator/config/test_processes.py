"""How many processes a file starts, what `validate` says of it, and what is refused before a machine is bought."""

# ruff: noqa: E501  # what is printed stands here whole, to be found by searching for it

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.load import ConfigError, load
from policies.model.spec import gpu_counts, processes_in, processes_of
from tests.generators.config_world import VALID, furnish

SKY = VALID[: VALID.index("rehearse:")].replace("storage: ./run", "storage: s3://bucket/run\ncloud: sky")


def loaded(folder: Path, resources: str, more: str = "", *, text: str = SKY) -> Any:
    run_yaml = furnish(folder)
    lines = "".join(f"  {line}\n" for line in (f"resources: {resources}", more) if line)
    run_yaml.write_text(text.replace("  reward_funcs", f"{lines}  reward_funcs"))
    return load(run_yaml)


@pytest.mark.parametrize(
    ("resources", "counts"),
    [
        ({}, {None}),
        ({"accelerators": "H100"}, {1}),
        ({"accelerators": "A100-80GB:8"}, {8}),
        ({"accelerators": {"H100": 8}}, {8}),
        ({"accelerators": {"H100": 8, "A100": 4}}, {8, 4}),
        ({"accelerators": ["H100:2", "A100:2"]}, {2}),
        ({"accelerators": "L4:0.5"}, {None}),
        ({"accelerators": ["H100:many", "H100:2"]}, {None, 2}),
        ({"accelerators": "H100:8", "any_of": [{"infra": "aws"}, {"accelerators": "A100:4"}]}, {8, 4}),
        ({"ordered": [{"accelerators": "H100:8"}, {"accelerators": {"B200": 8}}]}, {8}),
    ],
)
def test_the_gpus_of_a_machine(resources: dict[str, Any], counts: set[int | None]) -> None:
    assert gpu_counts(resources) == counts


def test_the_accelerate_config_goes_before_the_gpus() -> None:
    assert processes_in({"num_processes": 7}, {"accelerators": "H100:8"}) == 7
    assert processes_in({"num_processes": -1}, {"accelerators": "H100:8"}) == 8
    assert processes_in({}, {}) == 1


@pytest.mark.parametrize(
    ("resources", "more", "processes", "notices"),
    [
        (
            "{accelerators: H100:8}",
            "",
            8,
            [
                "8 processes train, one for each GPU (DDP); each takes per_device_train_batch_size completions at once"
            ],
        ),
        (
            "{accelerators: 'H100:8'}",
            "accelerate: {distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 2}}",
            8,
            [
                "8 processes train, one for each GPU (DEEPSPEED); each takes per_device_train_batch_size completions at once"
            ],
        ),
        ("{accelerators: 'H100:8'}", "accelerate: {num_processes: 8}", 8, []),
        (
            "{accelerators: 'H100:8'}",
            "accelerate: {num_processes: 7}",
            7,
            ["7 of the trainer's 8 GPUs train; the others are yours to use"],
        ),
        ("{accelerators: H100}", "", 1, []),
        ("{cpus: 4}", "", 1, []),
    ],
)
def test_what_will_be_started_is_said(
    resources: str, more: str, processes: int, notices: list[str], tmp_path: Path
) -> None:
    found = loaded(tmp_path, resources, more)
    assert processes_of(found.spec) == processes
    assert [notice.message for notice in found.notices] == notices


@pytest.mark.parametrize(
    ("resources", "more", "said"),
    [
        ("{accelerators: 8}", "", "accelerators: expected text or a mapping or a list of texts, got 8"),
        (
            "{accelerators: ['H100:8', {A100: 4}]}",
            "",
            "trainer.resources.accelerators: expected text or a mapping or a list of texts, got",
        ),
        ("{any_of: 3}", "", "trainer.resources.any_of: expected a list, got 3"),
        ("{any_of: [{accelerators: 8}]}", "", "trainer.resources.any_of[0].accelerators: expected text"),
        (
            "{accelerators: H100:2}",
            "accelerate: {num_processes: 8}",
            "trainer.accelerate.num_processes: 8 processes, and trainer.resources may give a machine of 2 GPUs; expected at most one for each",
        ),
        (
            "{any_of: [{accelerators: 'H100:8'}, {accelerators: 'A100:4'}]}",
            "",
            "trainer.resources: machines of 4 or 8 GPUs, and each would train with batches of another size; expected as many GPUs in each alternative, or trainer.accelerate.num_processes",
        ),
        (
            "{accelerators: H100:8}",
            "accelerate: {num_machines: 2, num_processes: 16}",
            "trainer.accelerate.num_machines: one machine trains, and 2 would never find each other; remove it, and name more GPUs on one machine in trainer.resources.accelerators",
        ),
        (
            "{accelerators: H100:8}",
            "accelerate: {distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 3, zero3_save_16bit_model: false}}",
            "trainer.accelerate.deepspeed_config: checkpoints would hold weights in shards, which no from_pretrained loads; expected zero3_save_16bit_model: true",
        ),
        (
            "{accelerators: H100:8}",
            "accelerate: {distributed_type: FSDP, fsdp_config: {fsdp_state_dict_type: SHARDED_STATE_DICT}}",
            "trainer.accelerate.fsdp_config: checkpoints would hold weights in shards, which no from_pretrained loads; expected fsdp_state_dict_type: FULL_STATE_DICT",
        ),
    ],
)
def test_what_cannot_be_started_is_refused(resources: str, more: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, resources, more)
    assert said in str(caught.value)


def test_batches_are_counted_over_all_gpus(tmp_path: Path) -> None:
    text = SKY.replace("num_generations: 8", "num_generations: 5")
    with pytest.raises(ConfigError, match="the generation batch, 256 = 256 x 1, is not divisible"):
        loaded(tmp_path, "{accelerators: H100:8}", text=text)
