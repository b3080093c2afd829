"""A run's plan, put together."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.clouds.sky.sdk.types import ListPrice
from orchestrator.plan.costs import disks_usd_per_h, most_usd_per_h, plan_kinds, plan_lost, plan_money, step_costs
from orchestrator.plan.deepspeed_file import unread_deepspeed, with_deepspeed
from orchestrator.plan.machines import kinds_with, plan_machine
from orchestrator.plan.measured import Measured
from orchestrator.plan.model import CheckpointPlan, DeadlinePlan, MachinePlan, ModelPlan, Plan, StepPlan
from orchestrator.plan.models import FindSize, KnownModel, know_model
from orchestrator.plan.pitfalls import Seen, find_pitfalls
from orchestrator.plan.prices import PriceBook
from orchestrator.plan.steps import hourly_prices, plan_nodes, plan_step, plan_syncs, time_step
from orchestrator.plan.workload import PROMPT_TOKENS, grpo, prompt_tokens, steps_of
from policies.control.fleet.deadline import BOOT_S
from policies.fleet.deadline import Course, nodes_for, time_of
from policies.fleet.how_many import StepShape
from policies.fleet.list_prices import store_price
from policies.fleet.store_costs import GB, Place, of_send
from policies.model.processes import ALTERNATIVES, alternatives_of
from policies.model.spec import RunSpec, generates_itself, model_settings, processes_of
from policies.model.vocabulary import Role
from policies.sizing import speed
from policies.sizing.adapter import trained_params
from policies.sizing.gpus import gpu_named
from policies.sizing.storing import STORE_BYTES_PER_S, most_kept
from policies.sizing.training import training_of
from policies.weights.adapters import DEFAULT_RANK
from policies.weights.disks import ModelSize, checkpoint_bytes, checkpoint_bytes_each

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


# A plan against `policies.fleet.deadline`: how many nodes keep it, and when the run is expected to end.


def plan_deadline(spec: RunSpec, shape: StepShape | None, pays: int, now_s: float) -> DeadlinePlan | None:
    """Return what the deadline takes of a run that begins now; None where it has none.

    Args:
        spec: the run's.
        shape: of a step; None where nobody can tell.
        pays: rollout nodes that there would be without a deadline.
        now_s: seconds since the epoch.
    """
    named, steps = spec.policies.fleet.deadline, steps_of(spec)
    if named is None:
        return None
    deadline_s, most = time_of(named), max(1, spec.rollout.replicas.max)
    if shape is None or steps is None:
        return DeadlinePlan(deadline_s=deadline_s, nodes=max(1, pays), end_s=None, kept=None)
    begins_s = now_s + BOOT_S
    course = Course(begins_s, begins_s, deadline_s, BOOT_S, 0, steps)
    nodes = max(1, pays, nodes_for(course, shape, most))
    kept = course.end_s(shape, nodes) <= deadline_s
    end_s = course.end_s(shape, nodes if kept else most)
    return DeadlinePlan(deadline_s=deadline_s, nodes=nodes, end_s=end_s, kept=kept)


# GPUs of machines that run.yaml names by their `instance_type` alone: a price list tells which they have.


def with_instances(spec: RunSpec, listed: Sequence[ListPrice]) -> RunSpec:
    """Return the run with `accelerators` beside each `instance_type` that the list knows.

    Its nodes find these GPUs when they start. As many processes train as run.yaml says without them: a trainer is
    started by what is written there.
    """
    trainer = _named(spec.trainer.resources, listed)
    rollout = _named(spec.rollout.resources, listed)
    if trainer != spec.trainer.resources:
        accelerate = {**(spec.trainer.accelerate or {}), "num_processes": processes_of(spec)}
        spec = replace(spec, trainer=replace(spec.trainer, resources=trainer, accelerate=accelerate))
    return replace(spec, rollout=replace(spec.rollout, resources=rollout))


def _named(resources: dict[str, Any], listed: Sequence[ListPrice]) -> dict[str, Any]:
    several = next((key for key in ALTERNATIVES if resources.get(key)), None)
    found = [_with_gpus(one, listed) for one in alternatives_of(resources)]
    return {several: found} if several else found[0]


def _with_gpus(machine: dict[str, Any], listed: Sequence[ListPrice]) -> dict[str, Any]:
    kind = machine.get("instance_type")
    of_kind = next((one for one in listed if one.instance_type == kind), None)
    if not kind or machine.get("accelerators") or of_kind is None:
        return machine
    return {**machine, "accelerators": f"{of_kind.gpu}:{of_kind.gpus:g}"}


# What a run keeps of itself: how large a checkpoint is, how long it is on its way, what stays and costs.


def plan_checkpoints(
    spec: RunSpec, model: KnownModel, step: StepPlan | None, store: Place
) -> CheckpointPlan | None:
    """Return what the run's checkpoints take; None where the model's size is not known."""
    size = _size_bytes(spec, model)
    if size is None:
        return None
    save_steps, steps = max(1, int(grpo(spec, "save_steps"))), steps_of(spec)
    logging_steps = max(1, int(grpo(spec, "logging_steps")))
    most = None if steps is None else most_kept(spec.checkpoints, save_steps, logging_steps, steps)
    base = _base_bytes(spec, model)
    stay = None if most is None else most * size + base
    price = store_price(store.cloud)
    return CheckpointPlan(
        size_bytes=size,
        save_steps=save_steps,
        every_s=None if step is None else save_steps * step.step_s,
        stored_s={speed // 10**6: size / speed for speed in STORE_BYTES_PER_S},
        most=most,
        base_bytes=base,
        stay_bytes=stay,
        stay_usd_per_month=None if stay is None or price is None else stay / GB * price.usd_per_gb_month,
        sent_usd=None if price is None else of_send(size).puts * price.put_usd,
    )


def _size_bytes(spec: RunSpec, model: KnownModel) -> int | None:
    """Exact where the model's shape is known; else what a disk is asked for by, which adapters do not fill."""
    if model.shape is not None:
        return checkpoint_bytes_each(spec) * trained_params(
            model.shape, training_of(spec, model.shape, prompt_tokens(spec))
        )
    if model.params is None or model.stored_bytes is None:
        return None
    return checkpoint_bytes(spec, ModelSize(model.params, model.stored_bytes, model.config))


def _base_bytes(spec: RunSpec, model: KnownModel) -> int:
    """Of the base model, if it comes through the store: the hub's, where machines share nothing else."""
    name = spec.trainer.model
    is_folder = name.startswith((".", "/", "~")) or Path(spec.workdir, name).is_dir()
    if spec.cloud != "sky" or is_folder or model_settings(spec.grpo).get("trust_remote_code"):
        return 0
    return model.stored_bytes or 0
