"""Assemble an evaluator like `tasks.trainer.assemble` a trainer, and score what it completes.

It has the trainer's model, prompts and rewards, and does not train.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import structlog
from blake3 import blake3
from transformers import PrinterCallback
from transformers.utils.logging import disable_progress_bar

from grpo_orch.checkpoint.records.evaluations import SCHEMA, EvaluationResult, ScoredSample, evaluated
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.evaluation.judging import readability, verdict
from grpo_orch.policies.model.spec import generates_itself
from grpo_orch.policies.model.vocabulary import Evaluation
from grpo_orch.policies.serving.wire import Batch, Completion
from grpo_orch.tasks.completions.gateway_client import GatewayClient, Generated
from grpo_orch.tasks.completions.refused_prompts import RefusedPrompts
from grpo_orch.tasks.completions.rollout_source import CompletionClient, RolloutSource
from grpo_orch.tasks.rewards.user_calls import (
    FAULTS,
    BadReward,
    RewardTimedOut,
    call_alone,
    describe_error,
    interrupted,
)
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
from grpo_orch.tasks.trl.trl_grpo import FleetGRPOTrainer, Made

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


# Scores and verdicts, by the run's own reward functions.


def evaluate(evaluator: Evaluator, subject: str) -> tuple[EvaluationResult, list[ScoredSample]]:
    """Complete all prompts with the loaded policy and score them.

    Raises BadReward and the errors of a generate call.
    """
    trainer, rows = evaluator.trainer, evaluator.rows
    made = trainer.complete(rows)
    scores = scores_of(trainer, rows, made)
    judge = judge_of(evaluator.rewards)
    reported = readable_by_judge(evaluator, judge, made)
    forms = [name for name, reward in evaluator.rewards.items() if hasattr(reward, "is_form") and name != judge]
    by_form = [[row_scores[name] for row_scores in scores] for name in forms]
    readable = readability(len(rows), reported, by_form)
    full = float(getattr(evaluator.rewards[judge], "full", 1.0))
    verdicts = [
        verdict(row_scores[judge], full, is_readable)
        for row_scores, is_readable in zip(scores, readable, strict=True)
    ]
    columns = zip(made.prompts, made.completions, scores, verdicts, made.ids, strict=True)
    samples = [
        ScoredSample(row, prompt, completion, dict(row_scores), judged, len(ids))
        for row, (prompt, completion, row_scores, judged, ids) in enumerate(columns)
    ]
    summary = EvaluationResult(
        schema=SCHEMA,
        subject=subject,
        scores={name: [row_scores[name] for row_scores in scores] for name in evaluator.rewards},
        judged_by=judge,
        readable_by=judge if reported is not None else ", ".join(forms),
        verdicts=[str(judged) for judged in verdicts],
        tokens=[len(ids) for ids in made.ids],
        cut=sum(is_cut(trainer, ids) for ids in made.ids),
        rows=digest_of(rows),
    )
    return summary, samples


def scores_of(trainer: Any, rows: list[dict[str, Any]], made: Made) -> list[dict[str, float | None]]:
    """Return each completion's scores by function name; None where a function gives none."""
    names, scores = trainer.reward_func_names, trainer.score(rows, made).tolist()
    return [
        {name: None if math.isnan(score) else score for name, score in zip(names, row, strict=True)}
        for row in scores
    ]


def is_cut(trainer: Any, ids: list[int]) -> bool:
    """Whether a completion reached its maximum length without ending. A completion may also end without an end
    token, at a stop text of `grpo.generation_kwargs`."""
    longest = (trainer.args.generation_kwargs or {}).get("max_tokens") or trainer.args.max_completion_length
    return len(ids) >= longest and ids[-1] not in trainer.eos_token_ids


def refuse_other_rows(store: Store, evaluation: Evaluation, evaluator: Evaluator) -> None:
    """Raise BadSpec if the problems differ from those that other policies of the evaluation completed.

    For example, their file has changed meanwhile. The rows could not be compared.
    """
    digest = digest_of(evaluator.rows)
    for subject in evaluation.subjects:
        earlier = evaluated(subject.name).read(store)
        if earlier is not None and earlier.rows != digest:
            message = f"the problems are others than those that {subject.name} was evaluated on"
            raise BadSpec(f"{message}; `grpo-orch eval {evaluation.of}` evaluates all of it on these")


def digest_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a digest of the rows' prompts, in order."""
    return blake3(repr([row["prompt"] for row in rows]).encode()).hexdigest(16)


def judge_of(rewards: Mapping[str, Reward]) -> str:
    """Return the name of the function that grades the answers.

    This is the first with `readable`, else the first that does not only check the form, else the first.
    """
    with_readable = [name for name, reward in rewards.items() if hasattr(reward, "readable")]
    others = [name for name, reward in rewards.items() if not hasattr(reward, "is_form")]
    return (with_readable or others or list(rewards))[0]


def readable_by_judge(evaluator: Evaluator, judge: str, made: Made) -> list[bool] | None:
    """Return whether each completion was readable for `judge`; None if that function does not report it."""
    function: Any = getattr(evaluator.rewards[judge], "readable", None)
    if function is None:
        return None
    rows, reserved = evaluator.rows, ("prompt", "completion", "completion_ids")
    columns = {key: [row[key] for row in rows] for key in rows[0] if key not in reserved}
    arguments = {"prompts": made.prompts, "completions": made.completions, "completion_ids": made.ids, **columns}
    try:
        with interrupted(evaluator.timeout_s, judge):
            readable = [bool(value) for value in call_alone(function, arguments)]
    except (RewardTimedOut, *FAULTS) as error:
        raise BadReward(f"what {judge} says of which completions can be read {describe_error(error)}") from error
    if len(readable) != len(rows):
        raise BadReward(f"{judge} says of {len(readable)} of {len(rows)} completions whether they can be read")
    return readable
