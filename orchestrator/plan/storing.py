"""What a run keeps of itself: how large a checkpoint is, how long it is on its way, what stays and costs."""

from __future__ import annotations

from pathlib import Path

from orchestrator.plan.model import CheckpointPlan, StepPlan
from orchestrator.plan.models import KnownModel
from orchestrator.plan.workload import grpo, prompt_tokens, steps_of
from policies.fleet.list_prices import store_price
from policies.fleet.store_costs import GB, Place, of_send
from policies.model.spec import RunSpec, model_settings
from policies.sizing.adapter import trained_params
from policies.sizing.storing import STORE_BYTES_PER_S, most_kept
from policies.sizing.training import training_of
from policies.weights.disks import ModelSize, checkpoint_bytes, checkpoint_bytes_each


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
