"""What a rollback changes, what each change does, and what is changed when memory runs out: truth tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_orch.orchestrator import config
from grpo_orch.policies.control.rollback import changes_on_rollback, changes_to_save_memory
from grpo_orch.policies.model.loss import (
    DEFAULT_LOSS,
    TRL_DEFAULTS,
    effects,
    is_on_policy,
    pieces_keep_gradient,
    value_of,
)
from grpo_orch.policies.model.spec import OnRollback, fixes_accumulation
from tests.stand_ins.world import spec

BETA = {"beta": 0.04, "learning_rate": 1e-5}
ALWAYS = {"beta": 0.08, "learning_rate": 5e-6}

# what it shows, grpo, what a rollback with the default factors changes
CHANGES: list[tuple[str, dict[str, Any], dict[str, float]]] = [
    ("TRL's defaults: no KL term, on-policy", {}, {"learning_rate": 5e-7}),
    ("with a KL term", BETA, ALWAYS),
    ("two iterations clip a ratio", {**BETA, "num_iterations": 2}, {**ALWAYS, "epsilon": 0.1}),
    (
        "and so do several updates for one generation",
        {
            **BETA,
            "steps_per_generation": 8,
            "gradient_accumulation_steps": 4,
            "epsilon": 0.3,
            "epsilon_high": 0.28,
        },
        {**ALWAYS, "epsilon": 0.15, "epsilon_high": 0.14},
    ),
    ("but not one", {**BETA, "steps_per_generation": 4, "gradient_accumulation_steps": 4}, ALWAYS),
    (
        "by the generation's size",
        {**BETA, "generation_batch_size": 64, "gradient_accumulation_steps": 4},
        {**ALWAYS, "epsilon": 0.1},
    ),
    ("which one step takes", {**BETA, "generation_batch_size": 64, "gradient_accumulation_steps": 8}, ALWAYS),
    *[
        (f"{loss} clips", {**BETA, "num_iterations": 2, "loss_type": loss}, {**ALWAYS, "epsilon": 0.1})
        for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
    ],
    ("sapo has no epsilon", {**BETA, "num_iterations": 2, "loss_type": "sapo"}, ALWAYS),
    ("nor has vespo", {**BETA, "num_iterations": 2, "loss_type": "vespo"}, ALWAYS),
    (
        "cispo's cap on weights comes nearer to 1, and is not halved",
        {**BETA, "num_iterations": 2, "loss_type": "cispo", "epsilon_high": 5.0},
        {**ALWAYS, "epsilon_high": 3.0},
    ),
    ("on-policy it caps nothing", {**BETA, "loss_type": "cispo", "epsilon_high": 5.0}, ALWAYS),
    ("and a cap below 1 is but a factor", {**BETA, "num_iterations": 2, "loss_type": "cispo"}, ALWAYS),
]


@pytest.mark.parametrize("case", CHANGES, ids=[case[0] for case in CHANGES])
def test_changes_of_a_rollback(case: tuple[str, dict[str, Any], dict[str, float]]) -> None:
    _, grpo, changed = case
    found = changes_on_rollback(grpo, OnRollback())
    assert found == changed
    assert not [text for text in effects(found, grpo, 1).values() if text.startswith("nothing")]


def test_several_processes_share_a_generation() -> None:
    grpo = {"generation_batch_size": 64, "gradient_accumulation_steps": 2}
    assert [is_on_policy(grpo, processes) for processes in (1, 2, 4)] == [False, False, True]
    assert "epsilon" in changes_on_rollback(grpo, OnRollback(), 2)
    assert "epsilon" not in changes_on_rollback(grpo, OnRollback(), 4)


@pytest.mark.parametrize(
    ("changes", "before", "does_nothing"),
    [
        ({"epsilon": 0.1}, {}, True),
        ({"epsilon": 0.1}, {"num_iterations": 2}, False),
        ({"epsilon": 0.1}, {"loss_type": "sapo"}, True),
        ({"epsilon_high": 3.0}, {"loss_type": "cispo"}, True),
        ({"epsilon_high": 3.0}, {"loss_type": "cispo", "num_iterations": 2}, False),
        ({"epsilon": 0.1}, {"loss_type": "cispo", "epsilon_high": 5.0}, True),
        ({"learning_rate": 5e-7, "beta": 0.08}, {}, False),
    ],
)
def test_change_without_effect_is_reported(
    changes: dict[str, float], before: dict[str, Any], does_nothing: bool
) -> None:
    assert {text.startswith("nothing") for text in effects(changes, before, 1).values()} == {does_nothing}


# what it shows, grpo, what is changed
SMALLER: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = [
    ("TRL's defaults", {}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
    (
        "an odd batch, with its steps for a generation",
        {"per_device_train_batch_size": 9, "gradient_accumulation_steps": 2, "steps_per_generation": 8},
        {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 6, "steps_per_generation": 24},
    ),
    (
        "what sets the generation's size stays",
        {"per_device_train_batch_size": 2, "generation_batch_size": 32},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
    ),
    (
        "one at a time: checkpointing",
        {"per_device_train_batch_size": 1, "gradient_checkpointing": False},
        {"gradient_checkpointing": True},
    ),
    (
        "bnpo's gradient is the batch's: checkpointing first",
        {"loss_type": "bnpo", "gradient_checkpointing": False},
        {"gradient_checkpointing": True},
    ),
    (
        "then it, too",
        {"loss_type": "bnpo"},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    ),
    (
        "then the group, and as many prompts",
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16, "generation_batch_size": 32},
        {"num_generations": 4, "gradient_accumulation_steps": 8, "generation_batch_size": 16},
    ),
    (
        "no group under four",
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "num_generations": 4},
        None,
    ),
]


@pytest.mark.parametrize("case", SMALLER, ids=[case[0] for case in SMALLER])
def test_changes_that_save_memory(case: tuple[str, dict[str, Any], dict[str, Any] | None]) -> None:
    _, grpo, changed = case
    assert changes_to_save_memory(grpo) == changed


@pytest.mark.parametrize(
    ("accelerate", "fixed"),
    [
        (None, False),
        ({"num_processes": 2}, False),
        ({"deepspeed_config": {"zero_stage": 3}}, False),
        ({"deepspeed_config": {"gradient_accumulation_steps": "auto"}}, False),
        ({"deepspeed_config": {"gradient_accumulation_steps": 4}}, True),
    ],
)
def test_accumulation_set_in_deepspeed_config_stays(accelerate: dict[str, Any] | None, fixed: bool) -> None:
    base = spec()
    assert fixes_accumulation(replace(base, trainer=replace(base.trainer, accelerate=accelerate))) == fixed
    plain = {"gradient_checkpointing": False}
    assert changes_to_save_memory(plain, accumulates=False) == {"gradient_checkpointing": True}
    assert changes_to_save_memory({}, accumulates=False) is None


@given(
    batch=st.integers(1, 48),
    accumulation=st.integers(1, 12),
    group=st.integers(2, 16),
    extra=st.sampled_from([{}, {"steps_per_generation": 12}, {"generation_batch_size": 4 * 48 * 16}]),
)
def test_objective_stays_until_last_and_then_run_ends(
    batch: int, accumulation: int, group: int, extra: dict[str, int]
) -> None:
    grpo: dict[str, Any] = {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "num_generations": group,
        "gradient_checkpointing": False,
        **extra,
    }
    assert pieces_keep_gradient(grpo)
    for _ in range(40):
        changes = changes_to_save_memory(grpo)
        if changes is None:
            break
        before, grpo = grpo, {**grpo, **changes}
        of_step = [
            value_of(one, "per_device_train_batch_size") * value_of(one, "gradient_accumulation_steps")
            for one in (before, grpo)
        ]
        if "num_generations" in changes:
            assert grpo["per_device_train_batch_size"] == 1
            assert of_step[0] == 2 * of_step[1]
        else:
            assert of_step[0] == of_step[1]
    assert changes_to_save_memory(grpo) is None


def test_defaults_equal_trls() -> None:
    keys = json.loads((Path(config.__file__).parent / "tables" / "grpo_keys.json").read_text())["keys"]
    assert {key: keys[key]["default"] for key in TRL_DEFAULTS} == dict(TRL_DEFAULTS)
    assert keys["loss_type"]["default"] == DEFAULT_LOSS
