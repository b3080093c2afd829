"""Assemble an evaluator like `tasks.trainer.assemble` a trainer: same model, prompts and rewards, no training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import structlog
from transformers import PrinterCallback
from transformers.utils.logging import disable_progress_bar

from grpo_orch.policies.model.spec import generates_itself
from grpo_orch.policies.serving.wire import Batch, Completion
from grpo_orch.tasks.completions.gateway_client import GatewayClient, Generated
from grpo_orch.tasks.completions.refused_prompts import RefusedPrompts
from grpo_orch.tasks.completions.rollout_source import CompletionClient, RolloutSource
from grpo_orch.tasks.trainer.assemble import build_trainer, grpo_config, policy_publisher
from grpo_orch.tasks.trainer.preflight import check_prompts, check_rewards
from grpo_orch.tasks.trainer.start import Start
from grpo_orch.tasks.trainer.turns import check_turns, guarded_turns, load_turns
from grpo_orch.tasks.trainer.user_data import load_data
from grpo_orch.tasks.trainer.user_objects import (
    BadSpec,
    Reward,
    guarded_rewards,
    is_out_of_memory,
    load_rewards,
)
from grpo_orch.tasks.trl.fleet_client import FleetClient
from grpo_orch.tasks.trl.own_generation import OwnGeneration
from grpo_orch.tasks.trl.skipped_prompts import ReplacedPrompts
from grpo_orch.tasks.trl.trl_grpo import FleetGRPOTrainer

log = structlog.get_logger()

ROWS_MAX = 1 << 40  # of a stream without a limit


@dataclass(frozen=True, slots=True)
class Evaluator:
    """An assembled evaluator.

    Attributes:
        rewards: the run's reward functions by TRL's name, including those of environments.
        timeout_s: limit for one call of a reward function.
    """

    trainer: FleetGRPOTrainer
    rows: list[dict[str, Any]]
    rewards: Mapping[str, Reward]
    timeout_s: float

    def load(self, number: int, folder: Path | None) -> None:
        """Set policy `number`, a step of its own: the weights in a checkpoint's folder; None: the present ones."""
        if folder is not None:
            self.trainer.load_weights(folder)
        self.trainer.model.eval()
        self.trainer.state.global_step = number


def assemble_evaluator(start: Start, rows: int | None) -> Evaluator:
    """Load the base model and the objects named in run.yaml. Raises BadSpec for errors only the user can fix.

    Args:
        start: start settings of the evaluation's own run.
        rows: evaluate only the first N rows of the dataset; None: all.
    """
    disable_progress_bar()
    datasets.disable_progress_bars()
    spec, trainer_spec = start.spec, start.spec.trainer
    config = grpo_config(spec, Path(start.env.workdir) / "trl", evaluates=False)
    rewards, turns = load_rewards(trainer_spec, start.workdir), load_turns(trainer_spec, start.workdir)
    data = load_data("the evaluation's dataset", trainer_spec.dataset, start.workdir, rows or ROWS_MAX)
    check_prompts(data.firsts)
    started = check_turns(turns, data.firsts, config.num_generations, start.limited)
    check_rewards(rewards, trainer_spec.reward_funcs, data.firsts, config, start.limited, started)
    selected = data.rows if rows is None else data.rows.select(range(min(rows, len(data.rows))))
    own_generation = OwnGeneration(start.env.node, start.check_stop) if generates_itself(spec) else None
    client = FleetClient(_source(start, config, own_generation))
    trainer = build_trainer(
        start,
        client,
        config,
        ReplacedPrompts(),
        reward_funcs=guarded_rewards(rewards, spec),
        train_dataset=selected,
        **guarded_turns(turns, spec),
    )
    if own_generation is not None:
        own_generation.attach(trainer)
    client.attach(trainer, own_generation or policy_publisher(start, trainer), start.env.timeline)
    client.on_policy_gone = _refuse_gone
    trainer.remove_callback(PrinterCallback)
    rewards_by_name = dict(zip(trainer.reward_func_names, trainer.reward_funcs, strict=True))
    return Evaluator(trainer, list(selected), rewards_by_name, spec.policies.reward_timeout_s)


def _source(start: Start, config: Any, own_generation: OwnGeneration | None) -> RolloutSource:
    env, store, spec = start.env, start.store, start.spec
    generator: CompletionClient = (
        GatewayClient(store, env.token, start.heartbeat, start.leaving.check)
        if own_generation is None
        else InPieces(own_generation, config.per_device_eval_batch_size)
    )
    return RolloutSource(
        store,
        generator,
        start.heartbeat,
        start.costs,
        RefusedPrompts(spec.policies.on_bad_prompt, start.costs),
        by=env.precedence,
        run_seed=config.seed,
        deadline_s=spec.rollout.deadline_s,
        recovery=spec.rollout.recovery,
    )


class InPieces:
    """Completes a batch with the trainer's own model, in pieces that fit its memory.

    The piece size is halved when memory runs out.
    """

    def __init__(self, own_generation: OwnGeneration, size: int) -> None:
        self._own, self._size = own_generation, size

    def complete(self, batch: Batch) -> Generated:
        completions: list[Completion] = []
        while (done := len(completions)) < len(batch.requests):
            requests = batch.requests[done : done + self._size]
            try:
                completions += self._own.complete(replace(batch, requests=requests)).completions
            except (RuntimeError, MemoryError) as error:
                if self._size == 1 or not is_out_of_memory(error):
                    raise
                self._size //= 2
                log.warning("out_of_memory", prompts_at_once=self._size)
        return Generated(completions, discarded=0, wait_s=0.0)


def _refuse_gone(*_: int) -> None:
    raise BadSpec("the policy's weights compute no number: no node would serve them")
