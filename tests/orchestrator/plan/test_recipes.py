"""The plans of the recipes: what somebody who knows the hardware works out by hand."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import TypeVar

import pytest
from rich.console import Console

from grpo_orch.orchestrator.plan.gather import make_plan
from grpo_orch.orchestrator.plan.model import Cost, MachinePlan, Plan, Prices
from grpo_orch.orchestrator.plan.prices import PriceBook
from grpo_orch.orchestrator.views.plan import render
from grpo_orch.policies.model.spec import Replicas
from grpo_orch.policies.model.vocabulary import Role
from grpo_orch.policies.sizing.memory import GIB
from tests.orchestrator.plan.recipes import plan_of, size_of, spec_of

T = TypeVar("T")


def gib(machine: MachinePlan | None, part: str = "") -> float:
    """Of a part, or of all of them."""
    held = there(machine)
    return (held.memory[part] if part else held.memory_bytes or 0) / GIB


def there(value: T | None) -> T:
    assert value is not None
    return value


def used(plan: Plan) -> Cost:
    (cost,) = [way.cost for way in plan.money if way.used]
    return there(cost)


def test_32b_with_an_adapter_on_one_h200() -> None:
    """65.5 GB of bfloat16; rank 64 on all linear layers is 537 million parameters, 2.1 GB in float32,
    and half of it on its way."""
    plan = plan_of(spec_of("qwen-32b"))
    assert plan.model.params == 32_763_876_352
    assert (plan.trainer.gpu, plan.trainer.fits) == ("H200", True)
    assert gib(plan.trainer, "weights") == gib(plan.rollout, "weights") == pytest.approx(61.0, abs=0.1)
    assert gib(plan.trainer, "adapter") == pytest.approx(2.0, abs=0.05)
    assert (there(plan.sync).form, there(plan.sync).size_bytes) == ("adapter", 536_870_912 * 2)
    assert there(plan.sync).seconds[10] < 5
    fitting = {one.gpu: (one.trainer_gpus, one.rollout_gpus) for one in plan.kinds}
    assert fitting["H200"] == fitting["B200"] == (1, 1)
    assert not {"L4", "A10G", "L40S"} & fitting.keys()
    assert fitting.get("H100", (None, 1)) == (None, 1)  # 61 GiB of weights leave a trainer too little of 80


def test_its_step_and_how_many_nodes_pay() -> None:
    """Reading 65.5 GB 512 times at 0.7 of 4.8 TB/s is 10 s, whoever reads; of what is beside it, keys and values
    of 64 sequences, and their prompts, a second node takes half."""
    plan = plan_of(spec_of("qwen-32b"))
    assert there(plan.step).generate_s == pytest.approx(12, abs=1.0)
    assert there(plan.step).train_s == pytest.approx(
        (10 * 32e9 + 6 * 4 * 1024 * 5120 * 64) * 64 * 1024 / (0.3 * 989e12), rel=0.005
    )
    assert there(plan.nodes).best == plan.bought == 1
    assert there(there(plan.nodes).exact) < 1
    (one, _, one_usd), (two, _, two_usd) = there(plan.nodes).steps
    assert (one, two) == (1, 2)
    assert there(one_usd) < there(two_usd)


def test_its_dollars_on_each_market() -> None:
    """A trainer on demand for 3.96 with a spot node for 2.10: 6.06 an hour. The cheapest place counts."""
    plan = plan_of(spec_of("qwen-32b"))
    ways = {one.name: one.cost.usd_per_h for one in plan.money if one.cost is not None}
    assert ways == pytest.approx({"all on demand": 7.92, "rollout on spot": 6.06, "all on spot": 4.20})
    assert [one.name for one in plan.money if one.used] == ["rollout on spot"]
    assert used(plan).usd_per_day == pytest.approx(24 * 6.06)
    assert used(plan).to_end_usd == pytest.approx(6.06 * 1000 * there(plan.step).step_s / 3600)
    assert plan.usd_per_step == pytest.approx(6.06 * there(plan.step).step_s / 3600)
    tokens = there(plan.step).completions * there(plan.step).completion_tokens
    assert plan.usd_per_million_tokens == pytest.approx(6.06 * there(plan.step).step_s / 3600 / tokens * 1e6)
    assert plan.disks_usd_per_h > 0
    assert there(plan.lost).max_s == pytest.approx(50 * there(plan.step).train_s)
    assert there(plan.lost).step_usd == pytest.approx(6.06 * there(plan.lost).step_s / 3600)
    kinds = {one.gpu: one for one in plan.kinds}
    assert [one.cloud for one in kinds["H200"].trainer_prices] == ["aws", "gcp"]
    assert [one.cloud for one in kinds["H200"].rollout_prices] == ["gcp", "aws"]
    assert "azure" in "".join(plan.unknown)


@pytest.mark.parametrize(
    ("resources", "words"),
    [
        (
            {"accelerators": "MI300X:1"},
            ["bandwidth and throughput of MI300X are unknown", "has none for 1 x MI300X, spot"],
        ),
        ({"accelerators": "H200:2"}, ["has none for 2 x H200, spot"]),
        ({"instance_type": "p5.48xlarge"}, ["name `accelerators`, or an `instance_type` with GPUs"]),
        ({"accelerators": "H200:1"}, []),
    ],
)
def test_unpriced_or_untimed_plan_reports_it(resources: dict[str, str], words: list[str]) -> None:
    spec = spec_of("qwen-32b")
    told = plan_of(replace(spec, rollout=replace(spec.rollout, resources=resources))).unknown
    assert len(told) == len(words) + 1  # and one cloud's list, always
    assert all(any(one in line for line in told) for one in words)


def test_machine_named_by_type_has_the_gpus_of_the_catalog() -> None:
    spec, machine = spec_of("qwen-32b"), {"instance_type": "p5en.48xlarge"}
    named = replace(
        spec,
        trainer=replace(spec.trainer, resources=machine),
        rollout=replace(spec.rollout, resources={"any_of": [{**machine, "infra": "aws/us-east-1"}]}),
    )
    plan = plan_of(named)
    for planned in (plan.trainer, plan.rollout):
        assert planned is not None
        assert (planned.gpu, planned.gpus, planned.gpu_is_named) == ("H200", 8, True)
        assert planned.prices == Prices(31.0, 14.0)
    assert there(plan.step).train_s == there(plan_of(spec).step).train_s, (
        "as many processes train as without the list"
    )
    assert not [line for line in plan.unknown if line.startswith("prices of")]


def test_a_full_1_5b_fits_80_gb_and_no_card_of_24() -> None:
    """16 bytes a parameter, 23 GiB, and activations."""
    plan = plan_of(spec_of("math-two-gpus"))
    held = sum(gib(plan.trainer, part) for part in ("weights", "gradients", "optimizer"))
    assert held == pytest.approx(23.0, abs=0.1)
    fitting = {one.gpu: one.trainer_gpus for one in plan.kinds}
    assert fitting["A100-80GB"] == fitting["H100"] == 1
    assert all(fitting.get(name) is None for name in ("L4", "A10G", "RTX4090"))
    assert there(plan.sync).form == "delta"
    assert not any(one.cost is not None and one.cost.usd_per_h for one in plan.money)


def test_adapter_of_1_5b_with_cpu_optimizer_fits_an_l4() -> None:
    plan = plan_of(spec_of("gsm8k-zero2"))
    assert plan.trainer.fits
    assert "optimizer" not in plan.trainer.memory
    assert plan.trainer.host
    assert used(plan).usd_per_h == pytest.approx(0.70 + 0.30)


def test_llama_with_an_eight_bit_optimizer_fits_a_card_of_24_gb() -> None:
    plan = plan_of(spec_of("llama-one-card"))
    fitting = {one.gpu: one.trainer_gpus for one in plan.kinds}
    assert fitting["RTX3090"] == fitting["RTX4090"] == 1
    assert gib(plan.trainer, "optimizer") < 0.6 * gib(plan.trainer, "weights")
    assert (plan.rollout, plan.sync, plan.nodes) == (None, None, None)
    assert there(plan.step).generate_s == pytest.approx(
        256 * 16 * 0.001, rel=0.1
    )  # each layer of each token is started


def test_many_nodes_pay_if_generation_dominates() -> None:
    spec = spec_of("qwen-32b")
    grpo = {**spec.grpo, "per_device_train_batch_size": 64, "gradient_accumulation_steps": 32, "beta": 0.0}
    long = replace(spec, grpo=grpo | {"max_completion_length": 3500})
    wide = replace(long, rollout=replace(long.rollout, replicas=Replicas(min=1, max=16)))
    plan = plan_of(wide)
    assert 1 <= there(plan.nodes).best == plan.bought <= 16
    cheapest = min(there(plan.nodes).steps, key=lambda one: one[2] or 0)
    assert cheapest[0] == there(plan.nodes).best


def overlap_of(plan: Plan) -> str | None:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(render(plan))
    found = re.search(r"^overlap +(.*?) *$", console.export_text(), re.MULTILINE)
    return None if found is None else found[1]


def test_plan_shows_the_gain_of_overlap() -> None:
    spec = spec_of("qwen-32b")
    words = "with rollout.max_staleness: 1 a step would take about 1:14 min instead of 1:27 min"
    assert overlap_of(plan_of(spec)) == words
    stale = replace(spec, rollout=replace(spec.rollout, max_staleness=2))
    words = "with rollout.max_staleness: 2 a step takes 1:14 min instead of about 1:27 min"
    assert overlap_of(plan_of(stale)) == words
    estimated = there(plan_of(spec).step)
    assert estimated.sequential_s == pytest.approx(estimated.step_s)
    shorter_s = min(estimated.generate_s, estimated.train_s)
    assert estimated.overlapped_s == pytest.approx(estimated.step_s - shorter_s)
    alone = replace(spec, rollout=replace(spec.rollout, replicas=Replicas(min=0, max=0)))
    assert overlap_of(plan_of(alone)) is None


def test_unavailable_machine_is_one_line_and_rest_is_planned() -> None:
    spec = spec_of("qwen-32b")
    nobodys = replace(spec, trainer=replace(spec.trainer, model="nobody/nothing"))
    plan = plan_of(nobodys)
    assert plan.model.params is None
    assert (plan.step, plan.hours, plan.kinds, plan.trainer.memory) == (None, None, (), {})
    assert [line for line in plan.unknown if "nobody/nothing" in line] == [
        "nobody/nothing: its size is unknown (it is nobody's)"
    ]
    assert {one.name for one in plan.money if one.cost is not None} >= {"rollout on spot"}
    strange = make_plan(spec, lambda one: replace(size_of(one), config={"model_type": "mamba"}), PriceBook())
    assert strange.model.params == 32_763_876_352
    assert any("mamba" in line for line in strange.unknown)
    assert there(strange.sync).size_bytes == there(strange.sync).share * 2 * 32_763_876_352
    endless = replace(spec, grpo={name: value for name, value in spec.grpo.items() if name != "max_steps"})
    plan = plan_of(endless)
    assert plan.hours is None
    assert all(one.cost is not None and one.cost.to_end_usd is None for one in plan.money)
    assert any("max_steps" in line for line in plan.unknown)


def test_all_purchasable_resources_and_extras_are_priced() -> None:
    """Trainer and node at 3.96 and 2.10, two nodes at most, one of which pays, and a controller at 0.50."""
    prices = {Role.TRAINER: Prices(3.96, 2.38), Role.ROLLOUT: Prices(4.40, 2.10)}
    book = PriceBook(prices, controller_usd_per_h=0.50)
    plan = make_plan(spec_of("qwen-32b"), size_of, book)
    assert plan.bought == 1
    assert used(plan).usd_per_h == pytest.approx(3.96 + 2.10 + 0.50)
    assert plan.max_usd_per_h == pytest.approx(3.96 + 2 * 2.10 + 0.50)


def test_spot_trainer_with_on_demand_nodes_is_its_own_plan() -> None:
    spec = spec_of("qwen-32b")
    bought = replace(
        spec,
        trainer=replace(spec.trainer, resources={"accelerators": "H200:1", "use_spot": True}),
        rollout=replace(spec.rollout, resources={"accelerators": "H200:1", "use_spot": False}),
    )
    plan = plan_of(bought)
    assert [one.name for one in plan.money if one.used] == ["trainer on spot"]
    assert used(plan).usd_per_h == pytest.approx(2.10 + 3.96)


def test_one_machine_has_gpus_of_one_kind() -> None:
    """An engine of 1.5B would fit a T4; beside it the trainer, which takes 30 GiB, has the same kind."""
    spec = spec_of("math-two-gpus")
    plan = plan_of(spec)
    assert (plan.trainer.gpu, there(plan.rollout).gpu) == ("RTX5090", "RTX5090")
    apart = plan_of(replace(spec, cloud="sky"))
    assert 0 < (there(apart.rollout).gpu_bytes or 0) < (apart.trainer.gpu_bytes or 0)
