"""What a plan says of checkpoints: bytes that follow from what a checkpoint holds, their way and their price."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpo_orch.orchestrator.plan.gather import make_plan
from grpo_orch.orchestrator.plan.model import CheckpointPlan
from grpo_orch.orchestrator.plan.prices import PriceBook
from grpo_orch.orchestrator.views.plan import stored_words
from grpo_orch.policies.costs.store_costs import Location
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.sizing.shapes import shape_of
from grpo_orch.policies.weights.disk_sizes import ModelSize
from tests.generators.model_configs import CONFIGS, QWEN_2_5_7B
from tests.orchestrator.plan.recipes import spec_of

S3 = Location("aws")
BF16 = {"model_init_kwargs": {"dtype": "bfloat16"}}
ZERO3 = {"deepspeed": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}, "bf16": True}
LORA = {"r": 64, "target_modules": "all-linear"}
SIZES = {
    "1.5B": CONFIGS["Qwen/Qwen2.5-1.5B-Instruct"],
    "7B": QWEN_2_5_7B,
    "32B": CONFIGS["Qwen/Qwen2.5-32B-Instruct"],
}


def planned(size: str, peft: dict[str, Any] | None = None, store: Location = S3, **grpo: Any) -> CheckpointPlan:
    spec = spec_of("qwen-32b")
    grpo = {key: value for key, value in spec.grpo.items() if key != "model_init_kwargs"} | grpo
    spec = replace(spec, grpo=grpo, trainer=replace(spec.trainer, peft=peft))

    def find(_: RunSpec) -> ModelSize:
        params = shape_of(SIZES[size]).params
        return ModelSize(params, 2 * params, SIZES[size])

    made = make_plan(spec, find, PriceBook(), store=store).checkpoints
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("size", "peft", "grpo", "gigabytes"),
    [
        # Parameters by the models' cards; weights and AdamW's two states, 4 bytes each, or 2 where loaded so.
        ("1.5B", None, {}, 1.544 * 12),
        ("7B", None, {}, 7.616 * 12),
        ("32B", None, {}, 32.76 * 12),
        ("32B", None, BF16, 32.76 * 6),
        # ZeRO-3: weights in bfloat16, and in float32 the optimizer's copy and states.
        ("32B", None, ZERO3, 32.76 * 14),
        # LoRA, float32: rank 64 x (inputs + outputs) of seven layers, times the model's layers.
        ("1.5B", LORA, BF16, 64 * 28 * (2 * 3072 + 2 * 1792 + 3 * 10496) * 12 / 1e9),
        ("7B", LORA, BF16, 64 * 28 * (2 * 7168 + 2 * 4096 + 3 * 22528) * 12 / 1e9),
        ("32B", LORA, BF16, 64 * 64 * (2 * 10240 + 2 * 6144 + 3 * 32768) * 12 / 1e9),
    ],
)
def test_checkpoint_has_trained_weights_and_optimizer_states(
    size: str, peft: dict[str, Any] | None, grpo: dict[str, Any], gigabytes: float
) -> None:
    found = planned(size, peft, **grpo)
    assert found.size_bytes / 1e9 == pytest.approx(gigabytes, rel=1e-3)
    assert found.stored_s == pytest.approx({100: gigabytes * 10, 1000: gigabytes}, rel=1e-3)


def test_storage_costs_by_month_and_transfers_by_request() -> None:
    found = planned("32B", save_steps=50, max_steps=10_000, logging_steps=1)
    assert (found.save_steps, found.max_count) == (50, 15)
    assert found.base_bytes == 2 * shape_of(SIZES["32B"]).params
    assert found.kept_bytes == 15 * found.size_bytes + found.base_bytes
    assert found.kept_usd_per_month == pytest.approx(0.023 * (15 * 393.17 + 65.53), rel=1e-3)
    told = stored_words(replace(found, every_s=3600.0))
    assert told == (
        "393 GB every 50 steps (1:00 h), stored in 1:05 h at 100 MB/s, 6:33 min at 1,000 MB/s; "
        "at most 15 and the base model are kept, 5,963 GB, $137.15 a month"
    )


def test_own_store_is_free_and_unpriced_store_reports_it() -> None:
    own, other = planned("1.5B", store=Location("local")), planned("1.5B", store=Location(""))
    assert own.kept_usd_per_month == 0.0
    assert "month" not in stored_words(own)
    assert other.kept_usd_per_month is None
    assert stored_words(other).endswith("; the store's price is not known")


def test_run_of_unknown_length_has_a_size() -> None:
    found = planned("1.5B", max_steps=-1)
    assert (found.max_count, found.kept_bytes, found.kept_usd_per_month) == (None, None, None)
    assert "stay" not in stored_words(found)
