"""Estimate the time of a step: generation, training, and sending weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

from grpo_orch.orchestrator.plan.machines import KnownModel, active_params, grpo, passes_of, work_of
from grpo_orch.orchestrator.plan.model import MachinePlan, NodesPlan, StepPlan, SyncPlan
from grpo_orch.policies.costs.steps import HourlyPrices, StepShape, best_count, optimum, step_usd
from grpo_orch.policies.model.gpus import engine_gpus
from grpo_orch.policies.model.spec import RunSpec, generates_itself, may_overlap, processes_of
from grpo_orch.policies.model.vocabulary import Market
from grpo_orch.policies.sizing import speed
from grpo_orch.policies.sizing.engine import engine_of
from grpo_orch.policies.sizing.shapes import Shape
from grpo_orch.policies.sizing.speed import gpu_named
from grpo_orch.policies.sizing.training import adapter_params, lora_of, training_of
from grpo_orch.policies.weights.adapters import adapter_obstacle, engine_type
from grpo_orch.policies.weights.tensors import WIDTH, served_types

USUAL_LINK = speed.LINKS_GBIT_PER_S[0]  # a step is estimated with the slowest link
SHOWN_NODES = 8


@dataclass(frozen=True, slots=True)
class Timing:
    """The parts of a step, in seconds."""

    train_s: float
    sync_s: float
    alone_s: float  # generation that nodes cannot share: a single completion, or all if the trainer generates
    shared_node_s: float  # generation that nodes share: node-seconds
    overlaps: bool = False  # nodes generate while the trainer trains on earlier steps

    @property
    def shape(self) -> StepShape:
        if self.overlaps:
            return StepShape(self.train_s + self.sync_s, self.shared_node_s, ahead_s=self.alone_s)
        return StepShape(self.train_s + self.sync_s + self.alone_s, self.shared_node_s)


def plan_sync(spec: RunSpec, model: KnownModel) -> SyncPlan | None:
    """Return how weights are sent: an adapter alone, or a delta of all. None if none are sent, or if unknown."""
    if generates_itself(spec) or model.params is None:
        return None
    width = WIDTH[served_types(spec.rollout.vllm, model.config).to or "BF16"]
    whole, links = float(width * model.params), speed.LINKS_GBIT_PER_S
    adapter = _adapter_bytes(spec, model)
    if spec.trainer.peft is not None and not adapter_obstacle(spec, model.config) and adapter is not None:
        seconds = {link: speed.full_transfer_s(adapter, link) for link in links}
        return SyncPlan(form="adapter", size_bytes=adapter, share=adapter / whole, seconds=seconds)
    share = speed.delta_share(float(grpo(spec, "learning_rate")))
    return SyncPlan(
        form="delta",
        size_bytes=share * whole,
        share=share,
        seconds={link: speed.delta_transfer_s(whole, share, link) for link in links},
    )


def _adapter_bytes(spec: RunSpec, model: KnownModel) -> float | None:
    """Return the adapter's size in the engines' type or, if that is unknown, in float32, its type in training."""
    lora = lora_of(spec.trainer.peft, model.shape) if model.shape is not None else None
    if lora is None or model.shape is None:
        return None
    return float(WIDTH[engine_type(spec, model.config) or "F32"] * adapter_params(model.shape, lora))


def time_step(
    spec: RunSpec,
    model: KnownModel,
    trainer: MachinePlan,
    rollout: MachinePlan | None,
    sync: SyncPlan | None,
) -> Timing | None:
    """Estimate a step; None if the model's shape or the speed of its GPUs is unknown."""
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
    sync_s = sync.seconds[USUAL_LINK] if sync is not None else 0.0
    shared = speed.shared_by_nodes(engine, work, engines)
    return Timing(train_s, sync_s, *shared, overlaps=spec.rollout.max_staleness > 0)


def _own_engine(spec: RunSpec, shape: Shape, trainer: MachinePlan) -> speed.Engine:
    """Return a trainer process as an engine that generates with transformers, with the weights as loaded."""
    training = training_of(spec, shape, 0)
    return replace(
        _engine_on(trainer, shape, training.weight_bytes, training.compute_bytes),
        token_floor_s=shape.layers * speed.EAGER_LAYER_S,
    )


def _engine(spec: RunSpec, model: KnownModel, rollout: MachinePlan) -> speed.Engine | None:
    shape, work = model.shape, work_of(spec)
    if gpu_named(rollout.gpu) is None or shape is None:
        return None
    serving = engine_of(spec, shape, model.config)
    held = None
    if rollout.cache_tokens is not None:
        held = int(rollout.cache_tokens // (work.prompt_tokens + work.completion_tokens))
    engine = _engine_on(rollout, shape, serving.weight_bytes, serving.cache_bytes)
    return replace(engine, gpus=engine_gpus(spec.rollout.vllm), sequences_max=held)


def _engine_on(machine: MachinePlan, shape: Shape, weight_bytes: int, cache_bytes: int) -> speed.Engine:
    """Return an engine on one of the machine's GPUs, with these bytes per element of weights and cache."""
    gpu, experts = gpu_named(machine.gpu), shape.experts
    assert gpu is not None  # checked by the caller
    return speed.Engine(
        gpus=1,
        bandwidth_gb_per_s=gpu.bandwidth_gb_per_s,
        tflops=gpu.tflops,
        weights_bytes=shape.text_params * weight_bytes,
        kv_bytes=shape.layers * shape.cached * cache_bytes,
        params=active_params(shape),
        experts_bytes=shape.routed_params * weight_bytes,
        experts_share=1.0 if experts is None else min(1.0, experts.chosen / max(1, experts.count)),
    )


def hourly_prices(
    trainer: MachinePlan,
    rollout: MachinePlan | None,
    controller_usd_per_h: float,
    markets: tuple[Market, Market] | None = None,
) -> HourlyPrices | None:
    """Return the machines' prices on these markets, by default run.yaml's; None if a price is unknown."""
    fixed = trainer.prices.on(markets[0] if markets else trainer.market)
    node = rollout.prices.on(markets[1] if markets else rollout.market) if rollout is not None else 0.0
    return None if fixed is None or node is None else HourlyPrices(fixed + controller_usd_per_h, node)


def plan_nodes(spec: RunSpec, shape: StepShape, prices: HourlyPrices | None) -> NodesPlan | None:
    """Return the cheapest number of rollout nodes; None for a run without rollout nodes."""
    if generates_itself(spec):
        return None
    least, most = max(1, spec.rollout.replicas.min), spec.rollout.replicas.max
    priced = prices if prices is not None and prices.known else None
    best = best_count(shape, priced, least, most) if priced is not None else most
    shown = sorted({*range(least, min(most, least + SHOWN_NODES - 1) + 1), best, most})
    steps = tuple(
        (count, shape.seconds(count), None if priced is None else step_usd(shape, priced, count))
        for count in shown
    )
    return NodesPlan(best=best, exact=None if priced is None else optimum(shape, priced), steps=steps)


def plan_step(spec: RunSpec, timing: Timing | None, nodes: int) -> StepPlan | None:
    """Return a step with `nodes` rollout nodes; None if its time is unknown."""
    if timing is None:
        return None
    sequential_s = overlapped_s = None
    generate_s = timing.alone_s + timing.shared_node_s / max(1, nodes)
    if may_overlap(spec):
        sequential_s = generate_s + timing.train_s + timing.sync_s
        overlapped_s = max(generate_s, timing.train_s) + timing.sync_s
    work = work_of(spec)
    return StepPlan(
        completions=work.generated,
        prompt_tokens=work.prompt_tokens,
        completion_tokens=work.completion_tokens,
        generate_s=generate_s,
        train_s=timing.train_s,
        sync_s=timing.sync_s,
        step_s=timing.shape.seconds(max(1, nodes)),
        nodes=nodes,
        max_staleness=spec.rollout.max_staleness,
        sequential_s=sequential_s,
        overlapped_s=overlapped_s,
    )
