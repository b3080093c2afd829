"""Turn completions into scores and verdicts with the run's own reward functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from blake3 import blake3

from grpo_orch.checkpoint.records.evaluations import SCHEMA, EvaluationResult, ScoredSample, evaluated
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.evaluation.judging import readability, verdict
from grpo_orch.policies.model.vocabulary import Evaluation
from grpo_orch.tasks.evaluating.assemble_evaluator import Evaluator
from grpo_orch.tasks.rewards.user_calls import (
    FAULTS,
    BadReward,
    RewardTimedOut,
    call_alone,
    describe_error,
    interrupted,
)
from grpo_orch.tasks.trainer.user_objects import BadSpec, Reward
from grpo_orch.tasks.trl.trl_grpo import Made

Judged = tuple[EvaluationResult, list[ScoredSample]]


def evaluate(evaluator: Evaluator, subject: str) -> Judged:
    """Complete all prompts with the loaded policy and score them.

    Raises BadReward and the errors of a generate call.
    """
    trainer, rows = evaluator.trainer, evaluator.rows
    made = trainer.complete(rows)
    scores = scores_of(trainer, rows, made)
    judge = judge_of(evaluator.rewards)
    reported = readable_by_judge(evaluator, judge, made)
    forms = forms_of(evaluator.rewards, judge)
    by_form = [[row_scores[name] for row_scores in scores] for name in forms]
    readable = readability(len(rows), reported, by_form)
    full = float(getattr(evaluator.rewards[judge], "full", 1.0))
    verdicts = [
        verdict(row_scores[judge], full, is_readable)
        for row_scores, is_readable in zip(scores, readable, strict=True)
    ]
    names = evaluator.rewards.keys()
    columns = zip(made.prompts, made.completions, scores, verdicts, made.ids, strict=True)
    samples = [
        ScoredSample(row, prompt, completion, dict(row_scores), judged, len(ids))
        for row, (prompt, completion, row_scores, judged, ids) in enumerate(columns)
    ]
    weights = trainer.reward_weights.tolist()
    summary = EvaluationResult(
        schema=SCHEMA,
        subject=subject,
        scores={name: [row_scores[name] for row_scores in scores] for name in names},
        weights=dict(zip(names, weights, strict=True)),
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


def forms_of(rewards: Mapping[str, Reward], judge: str) -> list[str]:
    """Return the names of the functions that check the form."""
    return [name for name, reward in rewards.items() if hasattr(reward, "is_form") and name != judge]


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
