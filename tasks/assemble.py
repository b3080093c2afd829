"""Puts a trainer together: the user's model, data and rewards, TRL's trainer, and what ties it to the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
from transformers import PrinterCallback, set_seed
from transformers.utils.logging import disable_progress_bar

from checkpoint.store import Store
from policies.spec import RunSpec
from tasks import callbacks, trl_grpo
from tasks.gateway_client import GatewayClient
from tasks.heartbeat import Heartbeat
from tasks.node_env import NodeEnv
from tasks.publish import PolicyPublisher
from tasks.rollout_source import RolloutSource
from tasks.step_costs import StepCosts
from tasks.user_objects import BadSpec, first_line, load_dataset, load_reward_functions, model_path, passes


def assemble(env: NodeEnv, spec: RunSpec, store: Store, heartbeat: Heartbeat, output_dir: Path) -> Any:
    """Return a trainer that is ready to train. Raises BadSpec for what only the user can repair."""
    disable_progress_bar()  # a log file has no use for them
    datasets.disable_progress_bars()
    workdir = Path(spec.workdir)
    wanted = spec.trainer
    evaluates = wanted.eval_dataset is not None
    config = _config(spec, output_dir, evaluates=evaluates)
    rewards = load_reward_functions(wanted.reward_funcs, workdir)
    train_set = load_dataset("trainer.dataset", wanted.dataset, workdir)
    eval_set = wanted.eval_dataset and load_dataset("trainer.eval_dataset", wanted.eval_dataset, workdir)
    costs = StepCosts()
    rollouts = RolloutSource(
        store,
        GatewayClient(store, env.token, heartbeat),
        heartbeat,
        costs,
        run_seed=config.seed,
        deadline_s=spec.rollout.deadline_s,
    )
    client = trl_grpo.FleetClient(rollouts)
    set_seed(config.seed)  # before the model: new adapters are drawn at random, and a restart must draw the same
    try:
        trainer = trl_grpo.FleetGRPOTrainer(
            client,
            costs,
            model=model_path(wanted, workdir),
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
    publisher = PolicyPublisher(store, trl_grpo.plain_model(trainer.model).config, Path(env.workdir) / "policy")
    client.attach(trainer, publisher, env.timeline)
    trainer.remove_callback(PrinterCallback)  # MetricsCallback says in a line what it prints in thirty
    if trainer.is_world_process_zero():
        for callback in _callbacks(env, spec, store, heartbeat, costs):
            trainer.add_callback(callback)
    return trainer


def _callbacks(env: NodeEnv, spec: RunSpec, store: Store, heartbeat: Heartbeat, costs: StepCosts) -> list[Any]:
    meta = {"node": env.node, "attempt": str(env.attempt)}
    return [
        callbacks.HeartbeatCallback(heartbeat),
        callbacks.MetricsCallback(store, costs, env.timeline, env.attempt),
        callbacks.ResumeStateCallback(store, env.timeline, spec.policies.resume_state_steps),
        callbacks.CheckpointCallback(store, heartbeat, env.timeline, meta),
    ]


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
