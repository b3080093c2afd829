"""What a plan comes to in dollars, on each market, and what a lost step costs again."""

from __future__ import annotations

import sys

from orchestrator.plan.machines import Kinds, fits, needed_gpus
from orchestrator.plan.model import KindPlan, LostPlan, MachinePlan, MoneyPlan, StepPlan
from orchestrator.plan.models import KnownModel
from orchestrator.plan.prices import PriceBook, cloud_prices
from orchestrator.plan.workload import grpo, steps_of
from policies.fleet import disks
from policies.model.spec import RunSpec
from policies.model.vocabulary import Market, Role
from policies.sizing.money import Prices, again_usd, cost, hourly

WAYS = (
    ("all on demand", Market.ON_DEMAND, Market.ON_DEMAND),
    ("rollout on spot", Market.ON_DEMAND, Market.SPOT),
    ("all on spot", Market.SPOT, Market.SPOT),
)


def plan_money(
    trainer: MachinePlan, rollout: MachinePlan | None, nodes: int, hours: float | None, beside_usd_per_h: float
) -> tuple[MoneyPlan, ...]:
    """Each way of buying a trainer and so many rollout nodes, run.yaml's marked; what is beside them on top."""
    wanted = (trainer.market, rollout.market if rollout is not None else trainer.market)
    ways = [(name, (a, b)) for name, a, b in WAYS if rollout is not None or a is b]
    if wanted not in [markets for _, markets in ways]:
        ways.append(("trainer on spot", wanted))
    node = rollout.prices if rollout is not None else Prices()
    found = []
    for name, markets in ways:
        per_h = hourly(trainer.prices, node, nodes if rollout is not None else 0, markets, beside_usd_per_h)
        priced = None if per_h is None else cost(per_h, hours)
        found.append(
            MoneyPlan(name=name, used=markets == wanted, trainer=markets[0], rollout=markets[1], cost=priced)
        )
    return tuple(found)


def most_usd_per_h(trainer: MachinePlan, rollout: MachinePlan | None, beside_usd_per_h: float) -> float | None:
    """USD an hour of all machines that run.yaml allows, on the markets that it has them on."""
    if rollout is None:
        return hourly(trainer.prices, Prices(), 0, (trainer.market, trainer.market), beside_usd_per_h)
    markets = (trainer.market, rollout.market)
    return hourly(trainer.prices, rollout.prices, rollout.most, markets, beside_usd_per_h)


def step_costs(step: StepPlan | None, money: tuple[MoneyPlan, ...]) -> tuple[float | None, float | None]:
    """USD of a step, and of a million trained tokens, as run.yaml buys; None where a price or the time is not
    known."""
    used = next((one.cost for one in money if one.used), None)
    if step is None or used is None:
        return None, None
    usd, tokens = used.usd_per_h * step.step_s / 3600, step.completions * step.completion_tokens
    return usd, usd / tokens * 1e6 if tokens else None


def disks_usd_per_h(spec: RunSpec, nodes: int) -> float:
    """USD an hour of the disks of a trainer and so many rollout nodes, the dearest that they may have."""
    return disks.usd_per_h(spec, Role.TRAINER, None) + nodes * disks.usd_per_h(spec, Role.ROLLOUT, None)


def plan_lost(spec: RunSpec, step: StepPlan | None, money: tuple[MoneyPlan, ...]) -> LostPlan | None:
    """What is made again after the trainer's loss. Completions are stored, unless the trainer's own were in the
    air: only training is done again."""
    if step is None:
        return None
    again_s = step.step_s if step.train_s is None else step.train_s
    steps = min(int(grpo(spec, "save_steps")), steps_of(spec) or sys.maxsize)
    used = next((one.cost for one in money if one.used), None)
    usd = None if used is None else again_usd(again_s, used.usd_per_h)
    return LostPlan(
        step_s=again_s,
        step_usd=usd,
        steps_most=steps,
        most_s=steps * again_s,
        most_usd=None if usd is None else steps * usd,
    )


def plan_kinds(
    spec: RunSpec,
    model: KnownModel,
    kinds: Kinds,
    book: PriceBook,
    trainer: MachinePlan,
    rollout: MachinePlan | None,
) -> tuple[KindPlan, ...]:
    """Every kind of GPU that is large enough for a role, the smallest first; none where nobody can tell."""
    if model.shape is None or grpo(spec, "use_cpu"):
        return ()
    found = []
    for gpu in sorted(kinds.all.values(), key=lambda one: (one.memory_mib, one.name)):
        for_trainer = needed_gpus(spec, Role.TRAINER) if fits(spec, model, Role.TRAINER, gpu) else None
        apart = rollout is not None and fits(spec, model, Role.ROLLOUT, gpu)
        for_rollout = needed_gpus(spec, Role.ROLLOUT) if apart else None
        if for_trainer is None and for_rollout is None:
            continue
        of_trainer = cloud_prices(book.listed, gpu.name, for_trainer, trainer.market) if for_trainer else ()
        of_rollout = (
            cloud_prices(book.listed, gpu.name, for_rollout, rollout.market) if rollout and for_rollout else ()
        )
        found.append(
            KindPlan(
                gpu=gpu.name,
                memory_bytes=gpu.memory_bytes,
                trainer_gpus=for_trainer,
                rollout_gpus=for_rollout,
                trainer_prices=of_trainer,
                rollout_prices=of_rollout,
            )
        )
    return tuple(found)
