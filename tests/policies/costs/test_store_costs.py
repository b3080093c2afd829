"""What stores cost with policies of real sizes, near and far, and what of it is not known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_orch.policies.costs.store_costs import (
    Location,
    Stored,
    checkpoint_bytes,
    tariff_of,
    usage_of_control,
    usage_of_fetch,
    usage_of_run,
    usage_of_steps,
)
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.vocabulary import Role
from tests.stand_ins.world import spec

EAST, WEST = Location("aws", "us-east-1"), Location("aws", "us-west-2")
GB = 10**9
# Qwen2.5-32B in bfloat16, published whole; 1,024 completions of 2,000 tokens.
POLICY = 65.6 * GB
STEP = Stored(steps=1, tokens=2_048_000, sent_bytes=POLICY, policy_bytes=POLICY)


def saving(every_steps: int) -> RunSpec:
    run = spec(8)
    return replace(run, grpo={**run.grpo, "save_steps": every_steps})


@pytest.mark.parametrize(
    ("store", "usd"),
    [
        (EAST, 0.032),  # 3,910 objects written, each read 8 times; no bytes are charged for
        (WEST, 0.032 + 65.6 * 0.02 + 8 * 65.6 * 0.02),
        (Location("r2"), 0.029 + 65.6 * 0.09),  # what AWS takes for bytes that leave it; R2 takes none
        (Location("gcp", "us-central1"), 0.032 + 65.6 * 0.09 + 8 * 65.6 * 0.12),
        (Location("local"), 0.0),
    ],
)
def test_a_step_of_32_billion_parameters_to_eight_nodes(store: Location, usd: float) -> None:
    use = usage_of_steps(STEP, 8, saving(10**9))
    assert tariff_of(store, EAST).usd(use) == pytest.approx(usd, rel=0.02)
    assert use.fetched_bytes == 8 * POLICY


def test_checkpoint_every_100_steps_costs_a_hundredth() -> None:
    """394 GB in float32: 12 bytes a parameter; half of that where it is trained in bfloat16."""
    assert checkpoint_bytes(POLICY, saving(1)) == pytest.approx(393.6 * GB)
    in_half = replace(saving(1), grpo={"model_init_kwargs": {"dtype": "bfloat16"}})
    assert checkpoint_bytes(POLICY, in_half) == pytest.approx(196.8 * GB)
    divided = replace(in_half, trainer=replace(in_half.trainer, accelerate={"distributed_type": "DEEPSPEED"}))
    assert checkpoint_bytes(POLICY, divided) == pytest.approx(524.8 * GB)
    adapters = replace(divided, trainer=replace(divided.trainer, accelerate=None, peft={"r": 16}))
    assert checkpoint_bytes(GB, adapters) == pytest.approx(3 * GB)
    more = usage_of_steps(STEP, 0, saving(100)).sent_bytes - usage_of_steps(STEP, 0, saving(10**9)).sent_bytes
    assert more == pytest.approx(3.936 * GB, rel=1e-3)


def test_deltas_cost_a_hundredth_and_a_node_that_joins_the_whole() -> None:
    delta = replace(STEP, sent_bytes=POLICY / 100)
    tariff = tariff_of(WEST, EAST)
    assert tariff.usd(usage_of_steps(delta, 8, saving(10**9))) == pytest.approx(0.12, rel=0.03)
    assert tariff.usd(usage_of_fetch(POLICY)) == pytest.approx(1.31, rel=0.01)


def test_day_of_controlling_costs_few_dollars_of_requests() -> None:
    usd = {machines: tariff_of(EAST, EAST).usd(usage_of_control(86400.0, machines)) for machines in (9, 101, 1001)}
    assert usd == pytest.approx({9: 2.04, 101: 2.21, 1001: 3.16}, abs=0.01)
    assert tariff_of(Location("local"), EAST).usd(usage_of_control(86400.0, 9)) == 0.0


def test_run_costs_its_steps_its_machines_starts_and_steering() -> None:
    run, tariff = saving(10**9), tariff_of(WEST, EAST)
    machines = [(Role.TRAINER, 10.0), (Role.ROLLOUT, 10.0), (Role.ROLLOUT, 5.0), (Role.ROLLOUT, 5.0)]
    parts = [
        usage_of_steps(STEP, 2.0, run),  # two nodes at a time, on average
        usage_of_control(36_000.0, 3.0),
        usage_of_fetch(checkpoint_bytes(POLICY, run)),
        usage_of_fetch(3 * POLICY),
    ]
    assert tariff.usd(usage_of_run(STEP, machines, 36_000.0, run)) == pytest.approx(sum(map(tariff.usd, parts)))
    assert usage_of_run(STEP, machines, 36_000.0, run).fetched_bytes == pytest.approx((2 + 6 + 3) * POLICY)


@pytest.mark.parametrize(
    ("store", "machine", "told"),
    [
        (
            Location("aws", "us-east-1"),
            Location("lambda", "us-east-1"),
            "the prices of lambda are unknown",
        ),
        (Location("aws"), EAST, "it is unknown whether it is in the machines' region"),
        (EAST, Location(""), "the machines' cloud is unknown"),
        (Location(""), EAST, "its provider is unknown"),
    ],
)
def test_tariff_without_a_price_gives_the_reason(store: Location, machine: Location, told: str) -> None:
    tariff = tariff_of(store, machine)
    assert told in tariff.reason
    assert tariff.sent_usd_per_gb is None
    assert tariff_of(EAST, EAST).reason == ""
