"""Puts an evaluator together, as `tasks.trainer.assemble` does a trainer: the same model, prompts and rewards, and
nothing that trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import structlog
from transformers import PrinterCallback, set_seed
from transformers.utils.logging import disable_progress_bar

from policies.model.spec import generates_itself
from policies.serving.wire import Batch, Completion
from tasks.completions.gateway_client import GatewayClient, Generated
from tasks.completions.refused_prompts import RefusedPrompts
from tasks.completions.rollout_source import RolloutSource
from tasks.evaluating.keeping import Completes, Keeping
from tasks.trainer.assemble import grpo_config, lora_config, policy_publisher
from tasks.trainer.preflight import check_prompts, check_rewards
from tasks.trainer.start import Start
from tasks.trainer.turns import check_turns, guarded_turns, load_turns
from tasks.trainer.user_data import load_data
from tasks.trainer.user_objects import (
    BadSpec,
    Reward,
    first_line,
    guarded_rewards,
    is_out_of_memory,
    load_rewards,
    model_path,
    passes,
)
from tasks.trl.fleet_client import FleetClient
from tasks.trl.own_generation import OwnGeneration
from tasks.trl.skipped_prompts import ReplacedPrompts
from tasks.trl.trl_evaluating import EvaluatingTrainer

log = structlog.get_logger()

ROWS_MAX = 1 << 40  # of a stream without a limit of its own


@dataclass(frozen=True, slots=True)
class Evaluator:
    """What evaluates. `rewards` are the run's functions by the name that TRL has for them, those that environments
    have among them; `timeout_s` is for one call of one of them."""

    trainer: EvaluatingTrainer
    rows: list[dict[str, Any]]
    rewards: Mapping[str, Reward]
    timeout_s: float


def assemble_evaluator(start: Start, rows: int | None) -> Evaluator:
    """Load what run.yaml names, and the base model. Raises BadSpec for what only the user can repair.

    Args:
        start: of the evaluation's own run.
        rows: how many of the dataset's, from the first on; None: all.
    """
    disable_progress_bar()
    datasets.disable_progress_bars()
    spec, wanted = start.spec, start.spec.trainer
    config = grpo_config(spec, Path(start.env.workdir) / "trl", evaluates=False)
    rewards, turns = load_rewards(wanted, start.workdir), load_turns(wanted, start.workdir)
    data = load_data("the evaluation's dataset", wanted.dataset, start.workdir, rows or ROWS_MAX)
    check_prompts(data.firsts)
    begun = check_turns(turns, data.firsts, config.num_generations, start.limited)
    check_rewards(rewards, wanted.reward_funcs, data.firsts, config, start.limited, begun)
    chosen = data.rows if rows is None else data.rows.select(range(min(rows, len(data.rows))))
    own = OwnGeneration(start.env.node, start.may_go_on) if generates_itself(spec) else None
    client = FleetClient(_source(start, config, own))
    set_seed(config.seed)
    try:
        trainer = EvaluatingTrainer(
            client,
            start.costs,
            start.env.timeline,
            ReplacedPrompts(),
            model=model_path(wanted, start.workdir) if start.base_model is None else str(start.base_model),
            reward_funcs=guarded_rewards(rewards, spec),
            args=config,
            train_dataset=chosen,
            peft_config=lora_config(wanted.peft),
            **guarded_turns(turns, spec),
        )
    except (OSError, ValueError, TypeError, ImportError) as error:
        if passes(error):
            raise
        raise BadSpec(f"trainer.model {wanted.model}, with the settings of `grpo`: {first_line(error)}") from error
    if own is not None:
        own.attach(trainer)
    client.attach(trainer, own or policy_publisher(start, trainer), start.env.timeline)
    client.on_policy_gone = _refuse_gone
    trainer.remove_callback(PrinterCallback)
    named = dict(zip(trainer.reward_func_names, trainer.reward_funcs, strict=True))
    return Evaluator(trainer, list(chosen), named, spec.policies.reward_timeout_s)


def _source(start: Start, config: Any, own: OwnGeneration | None) -> RolloutSource:
    env, store, spec = start.env, start.store, start.spec
    makes: Completes = (
        GatewayClient(store, env.token, start.heartbeat, start.leaving.check)
        if own is None
        else _InPieces(own, config.per_device_eval_batch_size)
    )
    return RolloutSource(
        store,
        Keeping(store, env.precedence, makes),
        start.heartbeat,
        start.costs,
        RefusedPrompts(spec.policies.on_bad_prompt, start.costs),
        by=env.precedence,
        run_seed=config.seed,
        deadline_s=spec.rollout.deadline_s,
        recovery=spec.rollout.recovery,
    )


class _InPieces:
    """The trainer's own model, a piece of a batch at a time: what it has room for, and what is stored by then.
    Pieces are halved while there is no room for one."""

    def __init__(self, own: OwnGeneration, size: int) -> None:
        self._own, self._size = own, size

    def complete(self, batch: Batch, arrived: Callable[[Completion], None]) -> Generated:
        made: list[Completion] = []
        while len(made) < len(batch.requests):
            requests = batch.requests[len(made) : len(made) + self._size]
            try:
                piece = self._own.complete(replace(batch, requests=requests)).completions
            except (RuntimeError, MemoryError) as error:
                if self._size == 1 or not is_out_of_memory(error):
                    raise
                self._size //= 2
                log.warning("out_of_memory", prompts_at_once=self._size)
                continue
            made += piece
            for one in piece:
                arrived(one)
        return Generated(made, discarded=0, wait_s=0.0)


def _refuse_gone(*_: int) -> None:
    raise BadSpec("the policy's weights compute no number: no node would serve them")
