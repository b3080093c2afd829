"""Make a run's plan."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_orch.orchestrator.clouds.sky.records import ListPrice
from grpo_orch.orchestrator.plan.machines import (
    PROMPT_TOKENS,
    FindSize,
    Kinds,
    KnownModel,
    find_model,
    fits,
    grpo,
    kinds_with,
    needed_gpus,
    plan_machine,
    prompt_tokens,
    steps_of,
    with_deepspeed,
)
from grpo_orch.orchestrator.plan.model import (
    CheckpointPlan,
    Cost,
    KindPlan,
    LostPlan,
    MachinePlan,
    ModelPlan,
    MoneyPlan,
    Plan,
    StepPlan,
)
from grpo_orch.orchestrator.plan.pitfalls import PlannedRun, find_pitfalls
from grpo_orch.orchestrator.plan.prices import PriceBook, cloud_prices
from grpo_orch.orchestrator.plan.steps import hourly_prices, plan_nodes, plan_step, plan_sync, time_step
from grpo_orch.policies.costs import disks
from grpo_orch.policies.costs.steps import HourlyPrices
from grpo_orch.policies.costs.store_costs import GB, Location, store_price
from grpo_orch.policies.ledger.retention import STORE_BYTES_PER_S, max_checkpoints
from grpo_orch.policies.model.spec import (
    ALTERNATIVES,
    RunSpec,
    alternatives_of,
    deepspeed_file,
    generates_itself,
    model_settings,
    processes_of,
)
from grpo_orch.policies.model.vocabulary import Market, Role
from grpo_orch.policies.sizing import speed
from grpo_orch.policies.sizing.speed import gpu_named
from grpo_orch.policies.sizing.training import trained_params, training_of
from grpo_orch.policies.weights.adapters import DEFAULT_RANK
from grpo_orch.policies.weights.disk_sizes import ModelSize, checkpoint_bytes, checkpoint_bytes_each

NOWHERE = Location("")
ESTIMATED = (
    f"estimated: completions of full length, prompts of {PROMPT_TOKENS} tokens;"
    f" training at {100 * speed.MFU:.0f} % of a GPU's dense throughput,"
    f" generation at {100 * speed.BANDWIDTH_SHARE:.0f} % of its bandwidth;"
    " expect a factor of two either way (docs/plan.md)"
)


def make_plan(
    spec: RunSpec,
    find_size: FindSize,
    book: PriceBook,
    store: Location = NOWHERE,
) -> Plan:
    """Return the plan of a run.

    Args:
        spec: the run's specification.
        find_size: returns the model's size, or raises SizeUnknown.
        book: prices of machines.
        store: place of the store.
    """
    spec = with_instances(with_deepspeed(spec), book.listed)
    model = find_model(spec, find_size)
    kinds = kinds_with({price.gpu: price.gpu_memory_mib for price in book.listed if price.gpu_memory_mib})
    trainer = plan_machine(spec, model, Role.TRAINER, kinds, book.of(Role.TRAINER))
    has_nodes = not generates_itself(spec)
    rollout = plan_machine(spec, model, Role.ROLLOUT, kinds, book.of(Role.ROLLOUT)) if has_nodes else None
    sync = plan_sync(spec, model)
    timing = time_step(spec, model, trainer, rollout, sync)
    shape = timing.shape if timing is not None else None
    prices = hourly_prices(trainer, rollout, book.controller_usd_per_h)
    nodes = None if shape is None else plan_nodes(spec, shape, prices)
    count = nodes.best if nodes is not None else spec.rollout.replicas.max
    step = plan_step(spec, timing, count)
    steps = steps_of(spec)
    hours = steps * step.step_s / 3600 if steps is not None and step is not None else None
    money = plan_money(trainer, rollout, count, hours, book.controller_usd_per_h)
    usd_per_step, usd_per_million_tokens = step_costs(step, money)
    plan = Plan(
        name=spec.name,
        cloud=spec.cloud,
        storage=spec.storage,
        model=_model(spec, model),
        trainer=trainer,
        rollout=rollout,
        sync=sync,
        step=step,
        nodes=nodes,
        lost=plan_lost(spec, step, money),
        checkpoints=plan_checkpoints(spec, model, step, store),
        steps=steps,
        hours=hours,
        bought=count,
        max_usd_per_h=None if prices is None else _usd_per_h(prices, rollout.max_nodes if rollout else 0),
        usd_per_step=usd_per_step,
        usd_per_million_tokens=usd_per_million_tokens,
        disks_usd_per_h=disks_usd_per_h(spec, count if has_nodes else 0),
        money=money,
        kinds=plan_kinds(spec, model, kinds, book, trainer, rollout),
        warnings=(),
        unknown=tuple(_unknown(spec, model, book, (trainer, rollout))),
        notes=(ESTIMATED, book.source) if book.source else (ESTIMATED,),
    )
    return replace(plan, warnings=find_pitfalls(PlannedRun(spec, model, plan)))


def _model(spec: RunSpec, model: KnownModel) -> ModelPlan:
    peft = spec.trainer.peft
    method = "all weights" if peft is None else f"LoRA of rank {int(peft.get('r') or DEFAULT_RANK)}"
    optimizer = f", {spec.grpo['optim']}" if spec.grpo.get("optim") else ""
    return ModelPlan(
        name=spec.trainer.model, params=model.params, stored_bytes=model.stored_bytes, method=method + optimizer
    )


def _unknown(
    spec: RunSpec, model: KnownModel, book: PriceBook, machines: tuple[MachinePlan | None, ...]
) -> Iterator[str]:
    if model.unknown:
        yield model.unknown
    if file := deepspeed_file(spec):
        yield f"the trainer's memory: {file}, which configures sharding, is not readable here"
    for machine in machines:
        if machine is not None and machine.gpu_is_named and gpu_named(machine.gpu) is None:
            yield f"the time of a step: bandwidth and throughput of {machine.gpu} are unknown"
    if book.unknown:
        yield book.unknown
    for machine in machines:
        if machine is not None and book.listed and machine.prices.on(machine.market) is None:
            yield f"prices of the {machine.role}'s machines: {_no_price(machine)}"
    if spec.trainer.eval_dataset is not None:
        yield "the time of evaluations: eval_dataset's rows are not counted, so time and cost exclude them"
    if steps_of(spec) is None:
        epochs = grpo(spec, "num_train_epochs")
        yield f"the end of the run: {epochs:g} epochs of a dataset with uncounted rows; set grpo.max_steps"


def _no_price(machine: MachinePlan) -> str:
    if not machine.gpu_is_named:
        return "name `accelerators`, or an `instance_type` with GPUs, to find them in the catalog"
    gpus = f"{machine.gpus} x {machine.gpu}" if machine.gpus else machine.gpu
    return f"the catalog has none for {gpus}, {machine.market}, in the named places"


# GPUs of machines that run.yaml names only by `instance_type`, looked up in a price list.


def with_instances(spec: RunSpec, listed: Sequence[ListPrice]) -> RunSpec:
    """Return the run with `accelerators` added to each `instance_type` in the list.

    The number of training processes stays the number without them, because the trainer is started by run.yaml.
    """
    trainer = _with_accelerators(spec.trainer.resources, listed)
    rollout = _with_accelerators(spec.rollout.resources, listed)
    if trainer != spec.trainer.resources:
        accelerate = {**(spec.trainer.accelerate or {}), "num_processes": processes_of(spec)}
        spec = replace(spec, trainer=replace(spec.trainer, resources=trainer, accelerate=accelerate))
    return replace(spec, rollout=replace(spec.rollout, resources=rollout))


def _with_accelerators(resources: dict[str, Any], listed: Sequence[ListPrice]) -> dict[str, Any]:
    key = next((key for key in ALTERNATIVES if resources.get(key)), None)
    machines = [_with_gpus(machine, listed) for machine in alternatives_of(resources)]
    return {key: machines} if key else machines[0]


def _with_gpus(machine: dict[str, Any], listed: Sequence[ListPrice]) -> dict[str, Any]:
    kind = machine.get("instance_type")
    price = next((price for price in listed if price.instance_type == kind), None)
    if not kind or machine.get("accelerators") or price is None:
        return machine
    return {**machine, "accelerators": f"{price.gpu}:{price.gpus:g}"}


# Checkpoints: their size, upload time, number and storage cost.


def plan_checkpoints(
    spec: RunSpec, model: KnownModel, step: StepPlan | None, store: Location
) -> CheckpointPlan | None:
    """Return the plan of the run's checkpoints; None if the model's size is unknown."""
    size = _size_bytes(spec, model)
    if size is None:
        return None
    save_steps, steps = max(1, int(grpo(spec, "save_steps"))), steps_of(spec)
    logging_steps = max(1, int(grpo(spec, "logging_steps")))
    most = None if steps is None else max_checkpoints(spec.checkpoints, save_steps, logging_steps, steps)
    base = _base_bytes(spec, model)
    stay = None if most is None else most * size + base
    price = store_price(store.cloud)
    return CheckpointPlan(
        size_bytes=size,
        save_steps=save_steps,
        every_s=None if step is None else save_steps * step.step_s,
        stored_s={speed // 10**6: size / speed for speed in STORE_BYTES_PER_S},
        max_count=most,
        base_bytes=base,
        kept_bytes=stay,
        kept_usd_per_month=None if stay is None or price is None else stay / GB * price.usd_per_gb_month,
    )


def _size_bytes(spec: RunSpec, model: KnownModel) -> int | None:
    """Return a checkpoint's size: exact if the model's shape is known, else the upper bound used for disks."""
    if model.shape is not None:
        return checkpoint_bytes_each(spec) * trained_params(
            model.shape, training_of(spec, model.shape, prompt_tokens(spec))
        )
    if model.params is None or model.stored_bytes is None:
        return None
    return checkpoint_bytes(spec, ModelSize(model.params, model.stored_bytes, model.config))


def _base_bytes(spec: RunSpec, model: KnownModel) -> int:
    """Return the size of the base model if the store holds it: a model from the hub, on cloud machines; else 0."""
    name = spec.trainer.model
    is_folder = name.startswith((".", "/", "~")) or Path(spec.workdir, name).is_dir()
    if spec.cloud != "sky" or is_folder or model_settings(spec.grpo).get("trust_remote_code"):
        return 0
    return model.stored_bytes or 0


# Costs on each market, and the cost of repeating lost steps.
WAYS = (
    ("all on demand", Market.ON_DEMAND, Market.ON_DEMAND),
    ("rollout on spot", Market.ON_DEMAND, Market.SPOT),
    ("all on spot", Market.SPOT, Market.SPOT),
)


def plan_money(
    trainer: MachinePlan,
    rollout: MachinePlan | None,
    nodes: int,
    hours: float | None,
    controller_usd_per_h: float,
) -> tuple[MoneyPlan, ...]:
    """Return the cost of a trainer and `nodes` rollout nodes by choice of markets; `used` marks run.yaml's."""
    wanted = (trainer.market, rollout.market if rollout is not None else trainer.market)
    ways = [(name, (a, b)) for name, a, b in WAYS if rollout is not None or a is b]
    if wanted not in [markets for _, markets in ways]:
        ways.append(("trainer on spot", wanted))
    found = []
    for name, markets in ways:
        prices, cost = hourly_prices(trainer, rollout, controller_usd_per_h, markets), None
        if prices is not None:
            usd_per_h = _usd_per_h(prices, nodes)
            cost = Cost(usd_per_h, 24 * usd_per_h, None if hours is None else hours * usd_per_h)
        found.append(
            MoneyPlan(name=name, used=markets == wanted, trainer=markets[0], rollout=markets[1], cost=cost)
        )
    return tuple(found)


def _usd_per_h(prices: HourlyPrices, nodes: int) -> float:
    return prices.other_usd_per_h + nodes * prices.node_usd_per_h


def step_costs(step: StepPlan | None, money: tuple[MoneyPlan, ...]) -> tuple[float | None, float | None]:
    """Return USD per step and per million trained tokens on run.yaml's markets; None if unknown."""
    used = _used_cost(money)
    if step is None or used is None:
        return None, None
    usd, tokens = used.usd_per_h * step.step_s / 3600, step.completions * step.completion_tokens
    return usd, usd / tokens * 1e6 if tokens else None


def disks_usd_per_h(spec: RunSpec, nodes: int) -> float:
    """Return USD per hour of the disks of a trainer and `nodes` rollout nodes, for the most expensive allowed."""
    return disks.usd_per_h(spec, Role.TRAINER, None) + nodes * disks.usd_per_h(spec, Role.ROLLOUT, None)


def plan_lost(spec: RunSpec, step: StepPlan | None, money: tuple[MoneyPlan, ...]) -> LostPlan | None:
    """Return the work repeated after the loss of the trainer: only training, because completions are stored.

    Exception, not counted: completions that the trainer was generating itself.
    """
    if step is None:
        return None
    again_s = step.train_s
    steps = min(int(grpo(spec, "save_steps")), steps_of(spec) or sys.maxsize)
    used = _used_cost(money)
    usd = None if used is None else again_s * used.usd_per_h / 3600  # all machines, for as long as it trains
    return LostPlan(
        step_s=again_s,
        step_usd=usd,
        max_steps=steps,
        max_s=steps * again_s,
        max_usd=None if usd is None else steps * usd,
    )


def _used_cost(money: tuple[MoneyPlan, ...]) -> Cost | None:
    return next((way.cost for way in money if way.used), None)


def plan_kinds(
    spec: RunSpec,
    model: KnownModel,
    kinds: Kinds,
    book: PriceBook,
    trainer: MachinePlan,
    rollout: MachinePlan | None,
) -> tuple[KindPlan, ...]:
    """Return each kind of GPU that is large enough for a role, smallest first; empty if unknown."""
    if model.shape is None or grpo(spec, "use_cpu"):
        return ()
    found = []
    for gpu in sorted(kinds.values(), key=lambda gpu: (gpu.memory_mib, gpu.name)):
        for_trainer = needed_gpus(spec, Role.TRAINER) if fits(spec, model, Role.TRAINER, gpu) else None
        fits_rollout = rollout is not None and fits(spec, model, Role.ROLLOUT, gpu)
        for_rollout = needed_gpus(spec, Role.ROLLOUT) if fits_rollout else None
        if for_trainer is None and for_rollout is None:
            continue
        trainer_prices = cloud_prices(book.listed, gpu.name, for_trainer, trainer.market) if for_trainer else ()
        rollout_prices = (
            cloud_prices(book.listed, gpu.name, for_rollout, rollout.market) if rollout and for_rollout else ()
        )
        found.append(
            KindPlan(
                gpu=gpu.name,
                memory_bytes=gpu.memory_bytes,
                trainer_gpus=for_trainer,
                rollout_gpus=for_rollout,
                trainer_prices=trainer_prices,
                rollout_prices=rollout_prices,
            )
        )
    return tuple(found)
