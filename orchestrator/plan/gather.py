"""A run's plan, put together."""

from __future__ import annotations

import time
from collections.abc import Iterator

from orchestrator.plan.costs import disks_usd_per_h, most_usd_per_h, plan_kinds, plan_lost, plan_money, step_costs
from orchestrator.plan.deadline import plan_deadline
from orchestrator.plan.deepspeed_file import unread_deepspeed, with_deepspeed
from orchestrator.plan.instances import with_instances
from orchestrator.plan.machines import kinds_with, plan_machine
from orchestrator.plan.measured import Measured
from orchestrator.plan.model import MachinePlan, ModelPlan, Plan
from orchestrator.plan.models import FindSize, KnownModel, know_model
from orchestrator.plan.pitfalls import Seen, find_pitfalls
from orchestrator.plan.prices import PriceBook
from orchestrator.plan.steps import hourly_prices, plan_nodes, plan_step, plan_syncs, time_step
from orchestrator.plan.storing import plan_checkpoints
from orchestrator.plan.workload import PROMPT_TOKENS, grpo, steps_of
from policies.fleet.store_costs import Place
from policies.model.spec import RunSpec, generates_itself
from policies.model.vocabulary import Role
from policies.sizing import speed
from policies.sizing.gpus import gpu_named
from policies.weights.adapters import DEFAULT_RANK

NOWHERE = Place("")
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
    measured: Measured | None = None,
    unread: str = "",
    store: Place = NOWHERE,
) -> Plan:
    """Return the plan of a run.

    Args:
        spec: of a valid run.yaml.
        find_size: how large the model is; raises NotKnown.
        book: what its machines cost.
        measured: what the run's own log tells, where there is one.
        unread: what could not be read for it, in a line.
        store: where its store is.
    """
    spec = with_instances(with_deepspeed(spec), book.listed)
    model = know_model(spec, find_size)
    kinds = kinds_with({one.gpu: one.gpu_memory_mib for one in book.listed if one.gpu_memory_mib})
    trainer = plan_machine(spec, model, Role.TRAINER, kinds, book.of(Role.TRAINER))
    apart = not generates_itself(spec)
    rollout = plan_machine(spec, model, Role.ROLLOUT, kinds, book.of(Role.ROLLOUT)) if apart else None
    syncs = plan_syncs(spec, model, measured)
    timing = time_step(spec, model, trainer, rollout, syncs)
    estimated = None if timing is None else timing.shape
    shape = measured.shape if measured is not None and measured.shape is not None else estimated
    nodes = (
        None if shape is None else plan_nodes(spec, shape, hourly_prices(trainer, rollout, book.beside_usd_per_h))
    )
    count = nodes.best if nodes is not None else spec.rollout.replicas.max
    deadline = plan_deadline(spec, shape, count, time.time())
    count = count if deadline is None or generates_itself(spec) else deadline.nodes
    step = plan_step(spec, timing, count, measured)
    steps = steps_of(spec)
    hours = steps * step.step_s / 3600 if steps is not None and step is not None else None
    money = plan_money(trainer, rollout, count, hours, book.beside_usd_per_h)
    lost = plan_lost(spec, step, money)
    usd_per_step, usd_per_million_tokens = step_costs(step, money)
    return Plan(
        name=spec.name,
        cloud=spec.cloud,
        storage=spec.storage,
        model=_model(spec, model),
        trainer=trainer,
        rollout=rollout,
        syncs=syncs,
        step=step,
        nodes=nodes,
        lost=lost,
        checkpoints=plan_checkpoints(spec, model, step, store),
        steps=steps,
        hours=hours,
        deadline=deadline,
        bought=count,
        most_usd_per_h=most_usd_per_h(trainer, rollout, book.beside_usd_per_h),
        usd_per_step=usd_per_step,
        usd_per_million_tokens=usd_per_million_tokens,
        disks_usd_per_h=disks_usd_per_h(spec, count if apart else 0),
        money=money,
        kinds=plan_kinds(spec, model, kinds, book, trainer, rollout),
        warnings=find_pitfalls(Seen(spec, model, trainer, rollout, syncs, step, lost, money)),
        unknown=tuple(_unknown(spec, model, book, unread, (trainer, rollout))),
        notes=tuple(_notes(measured, book)),
    )


def _model(spec: RunSpec, model: KnownModel) -> ModelPlan:
    peft = spec.trainer.peft
    method = "all weights" if peft is None else f"LoRA of rank {int(peft.get('r') or DEFAULT_RANK)}"
    optimizer = f", {spec.grpo['optim']}" if spec.grpo.get("optim") else ""
    return ModelPlan(
        name=spec.trainer.model, params=model.params, stored_bytes=model.stored_bytes, method=method + optimizer
    )


def _unknown(
    spec: RunSpec, model: KnownModel, book: PriceBook, unread: str, machines: tuple[MachinePlan | None, ...]
) -> Iterator[str]:
    if model.unknown:
        yield model.unknown
    if file := unread_deepspeed(spec):
        yield f"the trainer's memory: {file} says how its weights are divided, and cannot be read from here"
    for machine in machines:
        if machine is not None and machine.gpu_is_named and gpu_named(machine.gpu) is None:
            yield f"how long a step takes: of {machine.gpu} neither bandwidth nor throughput is known"
    if book.unknown:
        yield book.unknown
    for machine in machines:
        if machine is not None and book.listed and machine.prices.on(machine.market) is None:
            yield f"prices of the {machine.role}'s machines: {_no_price(machine)}"
    if unread:
        yield unread
    if spec.trainer.eval_dataset is not None:
        yield "what evaluations take: eval_dataset's rows are not counted; neither time nor dollars have them"
    if steps_of(spec) is None:
        epochs = grpo(spec, "num_train_epochs")
        yield f"the end: {epochs:g} epochs of a dataset whose rows nobody has counted; set grpo.max_steps"


def _no_price(machine: MachinePlan) -> str:
    if not machine.gpu_is_named:
        return "the catalog is searched by `accelerators` or an `instance_type` with GPUs, and none is named"
    what = f"{machine.gpus} x {machine.gpu}" if machine.gpus else machine.gpu
    return f"the catalog has none for {what}, {machine.market}, at the places that are named"


def _notes(measured: Measured | None, book: PriceBook) -> Iterator[str]:
    if measured is not None:
        yield f"measured: the run's last {measured.steps} logged steps"
    yield ESTIMATED
    if book.source:
        yield book.source
