"""Puts a trainer together: the user's model, data and rewards, TRL's trainer, and what ties it to the run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
from transformers import PrinterCallback, set_seed
from transformers.trainer import OPTIMIZER_NAME
from transformers.utils import SAFE_WEIGHTS_NAME as WEIGHTS_NAME
from transformers.utils.logging import disable_progress_bar

from checkpoint.records.documents import RunRecord
from checkpoint.store.run_store import Store
from checkpoint.stream.manifest import files_below
from checkpoint.stream.spool import Spool
from policies.detect.divergence import Detector
from policies.model.node_contract import SPOOL
from policies.model.spec import RunSpec
from policies.model.timelines import Fork, forked_spec
from tasks.completions.gateway_client import GatewayClient
from tasks.completions.refused_prompts import RefusedPrompts
from tasks.completions.rollout_source import RolloutSource
from tasks.machine.leaving import Leaving
from tasks.machine.node_env import NodeEnv
from tasks.machine.spooling import NoRoom, make_spool
from tasks.storing.heartbeat import Heartbeat
from tasks.storing.publish import PolicyPublisher
from tasks.storing.saving import BASE_MODEL, Checkpoints, Restored, read_history
from tasks.storing.step_costs import StepCosts
from tasks.trainer import callbacks
from tasks.trainer.user_objects import (
    BadSpec,
    first_line,
    load_dataset,
    load_reward_functions,
    local_folder,
    model_path,
    passes,
)
from tasks.trl import trl_grpo
from tasks.trl.fleet_client import FleetClient
from tasks.trl.skipped_prompts import Replaced, Walk, replacements, walk_of

BEHIND_SAVES = 10  # without `checkpoints.max_behind_steps`: how many saves the store may be behind


def assemble(
    env: NodeEnv,
    record: RunRecord,
    store: Store,
    heartbeat: Heartbeat,
    leaving: Leaving,
    restored: Restored | None,
    forks: Sequence[Fork] = (),
) -> tuple[Any, Spool]:
    """Return a trainer that is ready to train, and its spool. Raises BadSpec for what only the user can repair.

    Args:
        record: the run's, with its specification as it is on timeline 0.
        forks: how the other timelines began.
    """
    spec = _spec_on(record.spec, forks, env.timeline)
    disable_progress_bar()  # a log file has no use for them
    datasets.disable_progress_bars()
    workdir = Path(spec.workdir)
    wanted = spec.trainer
    evaluates = wanted.eval_dataset is not None
    config = _config(spec, Path(env.workdir) / SPOOL, evaluates=evaluates)
    rewards = load_reward_functions(wanted.reward_funcs, workdir)
    train_set = load_dataset("trainer.dataset", wanted.dataset, workdir)
    eval_set = wanted.eval_dataset and load_dataset("trainer.eval_dataset", wanted.eval_dataset, workdir)
    costs = StepCosts()
    refused = RefusedPrompts(spec.policies.on_bad_prompt, costs)
    rollouts = RolloutSource(
        store,
        GatewayClient(store, env.token, heartbeat, leaving.check),
        heartbeat,
        costs,
        refused,
        by=env.precedence,
        run_seed=config.seed,
        deadline_s=spec.rollout.deadline_s,
        recovery=spec.rollout.recovery,
    )
    replaced = _replaced_prompts(record.spec, forks, env.timeline, len(train_set))
    client = FleetClient(rollouts)
    base_model = restored.base_model if restored is not None else None
    model = model_path(wanted, workdir) if base_model is None else str(base_model)
    set_seed(config.seed)  # before the model: new adapters are drawn at random, and a restart must draw the same
    try:
        trainer = trl_grpo.FleetGRPOTrainer(
            client,
            costs,
            env.timeline,
            replaced,
            model=model,
            reward_funcs=rewards,
            args=config,
            train_dataset=train_set,
            eval_dataset=eval_set,
            peft_config=_peft_config(wanted.peft),
        )
    except (OSError, ValueError, TypeError) as error:
        if passes(error):
            raise
        raise BadSpec(f"trainer.model {wanted.model}, with the settings of `grpo`: {first_line(error)}") from error
    if trl_grpo.shards_reference(trainer):
        raise BadSpec("grpo.sync_ref_model: a reference model in shards (FSDP, ZeRO stage 3) survives no restart")
    config_of_model = trl_grpo.plain_model(trainer.model).config
    # Of each process its own: they start together, and each begins with an empty one.
    scratch = Path(env.workdir) / f"policy-{config.process_index}"
    publisher = PolicyPublisher(store, config_of_model, scratch, env.precedence)
    refused.row_of = trainer.row_of
    client.attach(trainer, publisher, env.timeline)
    trainer.remove_callback(PrinterCallback)  # MetricsCallback says in a line what it prints in thirty
    leave_if_due = functools.partial(trainer.leave_if_due, in_step=True)
    trainer.add_callback(callbacks.CheckpointCallback(lambda: trainer.save_is_due, leave_if_due))
    spool = _spool(Path(env.workdir), spec, trainer)
    if trainer.is_world_process_zero():
        record = replace(record, spec=spec)
        _add_first(trainer, client, spool, env, record, store, heartbeat, leaving, costs, restored)
    return trainer, spool


def _add_first(
    trainer: Any,
    client: FleetClient,
    spool: Spool,
    env: NodeEnv,
    record: RunRecord,
    store: Store,
    heartbeat: Heartbeat,
    leaving: Leaving,
    costs: StepCosts,
    restored: Restored | None,
) -> None:
    """What the first process alone does: checkpoints, heartbeat, metrics, resume state."""
    spec = record.spec
    base_model = restored.base_model if restored is not None else None
    kept = read_history(restored.folder) if restored is not None else None
    guard = callbacks.GuardCallback(heartbeat, spec.policies.kl, Detector() if kept is None else kept.detector)
    client.when_gone = guard.policy_is_gone
    history = callbacks.ResumeStateCallback(
        store, env.timeline, spec.policies.resume_state_steps, kept, lambda: guard.detector
    )
    checkpoints = Checkpoints(
        spool,
        heartbeat,
        record,
        env.timeline,
        meta={"node": env.node, "attempt": str(env.attempt)},
        frozen=_frozen(trainer, base_model or local_folder(spec.trainer, Path(spec.workdir))),
        max_behind_steps=spec.checkpoints.max_behind_steps or BEHIND_SAVES * int(trainer.args.save_steps),
        history=history.state,
    )
    trainer.attach(checkpoints, leaving)
    trainer.add_callback(callbacks.HeartbeatCallback(heartbeat, checkpoints, leaving))
    trainer.add_callback(callbacks.MetricsCallback(store, costs, env.timeline, env.attempt))
    # Behind the row: what the guard judges by is in the store before it ends the trainer.
    trainer.add_callback(guard)
    trainer.add_callback(history)


def _spool(workdir: Path, spec: RunSpec, trainer: Any) -> Spool:
    """The machine's spool; in it, memory for the two files of a checkpoint that are large."""
    weights_bytes, optimizer_bytes = trl_grpo.checkpoint_bytes(trainer)
    try:
        with trainer.accelerator.main_process_first():  # it makes the spool, the others find it
            spool = make_spool(workdir, spec.checkpoints, weights_bytes + optimizer_bytes)
    except NoRoom as error:
        raise BadSpec(str(error)) from error
    if trainer.is_world_process_zero():
        spool.prepare({WEIGHTS_NAME: weights_bytes, OPTIMIZER_NAME: optimizer_bytes})
    return spool


def _spec_on(spec: RunSpec, forks: Sequence[Fork], timeline: int) -> RunSpec:
    return forked_spec(spec, next((fork for fork in forks if fork.timeline == timeline), None))


def _replaced_prompts(spec: RunSpec, forks: Sequence[Fork], timeline: int, prompts: int) -> Replaced:
    """Which prompts the timeline takes in the place of which; an earlier one had as many processes as this."""

    def walk(of_timeline: int) -> Walk:
        return walk_of(_config(_spec_on(spec, forks, of_timeline), Path(), evaluates=False), prompts)

    return replacements(forks, timeline, walk)


def _frozen(trainer: Any, base_model: Path | None) -> dict[str, Path]:
    """The files of the model that training began from, where a restart needs it: for the KL, or under adapters."""
    needed = trainer.beta != 0 or hasattr(trainer.model, "get_base_model")
    if base_model is None or not needed:
        return {}
    return {f"{BASE_MODEL}/{name}": path for name, path in files_below(base_model)}


def _config(spec: RunSpec, output_dir: Path, *, evaluates: bool) -> Any:
    try:
        return trl_grpo.build_config(spec.grpo, output_dir, evaluates=evaluates)
    except (ValueError, TypeError) as error:
        raise BadSpec(f"grpo: {first_line(error).removeprefix('GRPOConfig.__init__() ')}") from error


def _peft_config(values: dict[str, Any] | None) -> Any:
    if values is None:
        return None
    from peft import LoraConfig

    try:
        return LoraConfig(**values)
    except (ValueError, TypeError) as error:
        raise BadSpec(f"trainer.peft: {first_line(error).removeprefix('LoraConfig.__init__() ')}") from error
