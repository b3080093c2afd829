"""What a step takes: as the run's own log has it, else by estimate; generation, training, the weights' way."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median

from checkpoint.records import metrics
from checkpoint.records.metrics import (
    StepTiming,
    logged,
    median_timing,
    read_metrics,
    step_times,
    step_timings,
)
from checkpoint.store import layout
from checkpoint.store.run_store import Store
from orchestrator.plan.machines import KnownModel, active_params, grpo, passes_of, work_of
from orchestrator.plan.model import MachinePlan, NodesPlan, StepPlan, SyncPlan
from policies.costs.steps import HourlyPrices, StepShape, best_count, optimum, shape_of, usd_a_step
from policies.ledger.accounting import surviving_rows
from policies.model.gpus import engine_gpus
from policies.model.spec import RunSpec, generates_itself, may_overlap, processes_of
from policies.sizing import speed
from policies.sizing.engine import engine_of
from policies.sizing.shapes import Shape
from policies.sizing.speed import gpu_named
from policies.sizing.training import adapter_params, lora_of, training_of
from policies.weights.adapters import engine_type, why_whole
from policies.weights.tensors import WIDTH, served_types

LAST_STEPS = 50  # completions change their length as a run goes on
COMPLETION_TOKENS = "completions/mean_length"  # TRL's


@dataclass(frozen=True, slots=True)
class Measured:
    """Of the last LAST_STEPS logged steps. None: it was not logged.

    Attributes:
        steps: over how many.
        step_s: the median, from one logged step to the next.
        timing: the medians of what trainer and nodes do in it.
        shape: what of a step nodes share, by the rule that the controller buys by.
        completion_tokens: of a completion, on average.
        sent_share: bytes that went to the store, of those that the published weights have.
    """

    steps: int
    step_s: float
    timing: StepTiming | None = None
    shape: StepShape | None = None
    completion_tokens: float | None = None
    sent_share: float | None = None


def measure(store: Store) -> Measured | None:
    """Read the log of the run in this store; None where there is no run, or it has not made two steps.

    Raises StoreError.
    """
    if store.get_or_none(layout.RUN) is None:
        return None
    rows = surviving_rows(read_metrics(store))
    rows = [one for one in rows if one.timeline == rows[-1].timeline][-LAST_STEPS - 1 :]
    gaps = [(after.time_s - before.time_s) / (after.step - before.step) for before, after in pairwise(rows)]
    if not gaps:
        return None
    timed, lengths = step_times(rows), logged(rows[1:], COMPLETION_TOKENS)
    sent, whole = (sum(logged(rows[1:], name)) for name in (metrics.PUBLISHED_BYTES, metrics.WEIGHTS_BYTES))
    return Measured(
        steps=len(gaps),
        step_s=median(gaps),
        timing=median_timing(timing for _, timing in step_timings(rows)),
        shape=shape_of(timed),
        completion_tokens=mean(lengths) if lengths else None,
        sent_share=sent / whole if whole else None,
    )


# Estimates.

USUAL_LINK = speed.LINKS_GBIT_PER_S[0]  # a step is counted with the slowest
SHOWN_NODES = 8
Parts = tuple[float | None, float | None, float | None]


@dataclass(frozen=True, slots=True)
class Timing:
    """A step's seconds: those that no further node shortens, and those that nodes share, by what they are."""

    train_s: float
    sync_s: float
    alone_s: float  # of generation: one completion by itself, or all of it where the trainer generates
    shared_node_s: float
    overlaps: bool = False  # completions are made while the trainer is at work on earlier steps

    @property
    def shape(self) -> StepShape:
        if self.overlaps:
            return StepShape(self.train_s + self.sync_s, self.shared_node_s, ahead_s=self.alone_s)
        return StepShape(self.train_s + self.sync_s + self.alone_s, self.shared_node_s)


def plan_syncs(spec: RunSpec, model: KnownModel, measured: Measured | None) -> tuple[SyncPlan, ...]:
    """The forms in which weights may travel, the one that this run uses marked; none where nothing travels."""
    if generates_itself(spec) or model.params is None:
        return ()
    width = WIDTH[served_types(spec.rollout.vllm, model.config).to or "BF16"]
    whole, rate = float(width * model.params), float(grpo(spec, "learning_rate"))
    adapter = _adapter_bytes(spec, model)
    alone = spec.trainer.peft is not None and not why_whole(spec, model.config) and adapter is not None
    share = speed.delta_share(rate)
    sent = measured.sent_share if measured is not None and measured.sent_share is not None and not alone else None
    share = share if sent is None else sent
    links = speed.LINKS_GBIT_PER_S
    forms = [
        SyncPlan(
            form="all weights",
            used=False,
            size_bytes=whole,
            share=1.0,
            seconds={link: speed.whole_s(whole, link) for link in links},
        ),
        SyncPlan(
            form="delta",
            used=not alone,
            size_bytes=share * whole,
            share=share,
            seconds={link: speed.delta_s(whole, share, link) for link in links},
            source="estimated" if sent is None else "measured",
        ),
    ]
    if adapter is not None:
        seconds = {link: speed.whole_s(adapter, link) for link in links}
        forms.append(
            SyncPlan(form="adapter", used=alone, size_bytes=adapter, share=adapter / whole, seconds=seconds)
        )
    return tuple(forms)


def _adapter_bytes(spec: RunSpec, model: KnownModel) -> float | None:
    """In the type that engines round it to, or, where that is not certain, in float32, as it is trained."""
    lora = lora_of(spec.trainer.peft, model.shape) if model.shape is not None else None
    if lora is None or model.shape is None:
        return None
    return float(WIDTH[engine_type(spec, model.config) or "F32"] * adapter_params(model.shape, lora))


def time_step(
    spec: RunSpec,
    model: KnownModel,
    trainer: MachinePlan,
    rollout: MachinePlan | None,
    syncs: tuple[SyncPlan, ...],
) -> Timing | None:
    """Estimate a step; None where the model's shape or the speed of its GPUs is not known."""
    gpu = gpu_named(trainer.gpu)
    if model.shape is None or gpu is None:
        return None
    params, work = active_params(model.shape), work_of(spec)
    train_s = speed.train_s(
        params, work, passes_of(spec), processes_of(spec), gpu.tflops, model.shape.attention_flops
    )
    if rollout is None:
        return Timing(
            train_s, 0.0, speed.generate_s(_own_engine(spec, model.shape, trainer), work, processes_of(spec)), 0.0
        )
    if (engine := _engine(spec, model, rollout)) is None:
        return None
    engines = max(1, rollout.gpus // engine_gpus(spec.rollout.vllm))
    used = next((one for one in syncs if one.used), None)
    sync_s = used.seconds[USUAL_LINK] if used else 0.0
    shared = speed.shared_by_nodes(engine, work, engines)
    return Timing(train_s, sync_s, *shared, overlaps=spec.rollout.max_staleness > 0)


def _own_engine(spec: RunSpec, shape: Shape, trainer: MachinePlan) -> speed.Engine:
    """One process of the trainer's as it generates, with transformers, the weights as they are loaded."""
    gpu, training = gpu_named(trainer.gpu), training_of(spec, shape, 0)
    assert gpu is not None  # its speed was asked for before
    return speed.Engine(
        gpus=1,
        bandwidth_gb_per_s=gpu.bandwidth_gb_per_s,
        tflops=gpu.tflops,
        weights_bytes=shape.text_params * training.weight_bytes,
        kv_bytes=shape.layers * shape.cached * training.compute_bytes,
        params=active_params(shape),
        token_floor_s=shape.layers * speed.EAGER_LAYER_S,
        experts_bytes=shape.routed_params * training.weight_bytes,
        experts_share=_chosen_share(shape),
    )


def _engine(spec: RunSpec, model: KnownModel, rollout: MachinePlan) -> speed.Engine | None:
    gpu, shape = gpu_named(rollout.gpu), model.shape
    if gpu is None or shape is None:
        return None
    serving = engine_of(spec, shape, model.config)
    work = work_of(spec)
    held = None
    if rollout.cache_tokens is not None:
        held = int(rollout.cache_tokens // (work.prompt_tokens + work.completion_tokens))
    return speed.Engine(
        gpus=engine_gpus(spec.rollout.vllm),
        bandwidth_gb_per_s=gpu.bandwidth_gb_per_s,
        tflops=gpu.tflops,
        weights_bytes=shape.text_params * serving.weight_bytes,
        kv_bytes=shape.layers * shape.cached * serving.cache_bytes,
        params=active_params(shape),
        sequences_max=held,
        experts_bytes=shape.routed_params * serving.weight_bytes,
        experts_share=_chosen_share(shape),
    )


def _chosen_share(shape: Shape) -> float:
    """Of the experts, those that a token is sent to."""
    return 1.0 if shape.experts is None else min(1.0, shape.experts.chosen / max(1, shape.experts.count))


def hourly_prices(
    trainer: MachinePlan, rollout: MachinePlan | None, controller_usd_per_h: float
) -> HourlyPrices | None:
    """What the machines cost on the markets that run.yaml has them on; None where a price is not known."""
    beside = trainer.prices.on(trainer.market)
    node = rollout.prices.on(rollout.market) if rollout is not None else 0.0
    return None if beside is None or node is None else HourlyPrices(beside + controller_usd_per_h, node)


def plan_nodes(spec: RunSpec, shape: StepShape, prices: HourlyPrices | None) -> NodesPlan | None:
    """How many rollout nodes pay; None where there are none."""
    if generates_itself(spec):
        return None
    least, most = max(1, spec.rollout.replicas.min), spec.rollout.replicas.max
    priced = prices if prices is not None and prices.known else None
    best = best_count(shape, priced, least, most) if priced is not None else most
    shown = sorted({*range(least, min(most, least + SHOWN_NODES - 1) + 1), best, most})
    steps = tuple(
        (count, shape.seconds(count), None if priced is None else usd_a_step(shape, priced, count))
        for count in shown
    )
    return NodesPlan(best=best, exact=None if priced is None else optimum(shape, priced), steps=steps)


def plan_step(spec: RunSpec, timing: Timing | None, nodes: int, measured: Measured | None) -> StepPlan | None:
    """A step with so many nodes: as the run's own log has it, else as estimated; None where neither is known."""
    if measured is not None:
        return _measured_step(spec, timing, nodes, measured)
    if timing is None:
        return None
    generate_s = timing.alone_s + timing.shared_node_s / max(1, nodes)
    step_s = timing.shape.seconds(max(1, nodes))
    return _step_plan(spec, (generate_s, timing.train_s, timing.sync_s), step_s, nodes, None)


def _measured_step(spec: RunSpec, timing: Timing | None, nodes: int, measured: Measured) -> StepPlan:
    """Where the log does not tell generation, an estimate divides the step between it and all else."""
    if measured.timing is not None:
        found = measured.timing
        parts: Parts = (found.generate_s, found.train_s, found.sync_s)
    elif timing is not None:
        generate_s = timing.alone_s + timing.shared_node_s / max(1, nodes)
        generate_s *= measured.step_s / timing.shape.seconds(max(1, nodes))
        parts = (generate_s, max(0.0, measured.step_s - generate_s), None)
    else:
        parts = (None, None, None)
    return _step_plan(spec, parts, measured.step_s, nodes, measured)


def _step_plan(spec: RunSpec, parts: Parts, step_s: float, nodes: int, measured: Measured | None) -> StepPlan:
    """A step of so many seconds with so many nodes; `parts` are generation, training and the weights' way."""
    work = work_of(spec, None if measured is None else measured.completion_tokens)
    generate_s, train_s, sync_s = parts
    in_turns_s = overlapped_s = None
    if may_overlap(spec) and generate_s is not None and train_s is not None and sync_s is not None:
        in_turns_s, overlapped_s = generate_s + train_s + sync_s, max(generate_s, train_s) + sync_s
    return StepPlan(
        completions=work.generated,
        prompt_tokens=work.prompt_tokens,
        completion_tokens=work.completion_tokens,
        generate_s=generate_s,
        train_s=train_s,
        sync_s=sync_s,
        step_s=step_s,
        nodes=nodes,
        max_staleness=spec.rollout.max_staleness,
        in_turns_s=in_turns_s,
        overlapped_s=overlapped_s,
        source="estimated" if measured is None else "measured",
    )
