"""From completions to scores and verdicts: what the run's own reward functions say of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blake3 import blake3

from checkpoint.records.evaluations import SCHEMA, Evaluated, Scored, evaluated
from checkpoint.store.run_store import Store
from policies.evaluation.judging import told_readable, verdict
from policies.model.vocabulary import Evaluation
from tasks.evaluating.assemble import Evaluator
from tasks.rewards.guard import FAULTS, BadReward, RewardTimedOut, call_alone, interrupted
from tasks.rewards.guard import said as said_of
from tasks.trainer.user_objects import BadSpec, Reward
from tasks.trl.trl_evaluating import Made

Judged = tuple[Evaluated, list[Scored]]


def evaluate(evaluator: Evaluator, subject: str) -> Judged:
    """Complete all prompts with the policy that is loaded, and score them. Raises BadReward and what a generate
    call raises."""
    trainer, rows = evaluator.trainer, evaluator.rows
    made = trainer.completions_of(rows)
    scores = trainer.scores_of(rows, made)
    judge = judge_of(evaluator.rewards)
    said, forms = _said(evaluator, judge, made), forms_of(evaluator.rewards, judge)
    by_form = [[one[name] for one in scores] for name in forms]
    readable = told_readable(len(rows), said, by_form)
    full = float(getattr(evaluator.rewards[judge], "full", 1.0))
    verdicts = [verdict(one[judge], full, told) for one, told in zip(scores, readable, strict=True)]
    told = evaluator.rewards.keys()
    columns = zip(made.prompts, made.completions, scores, verdicts, made.ids, strict=True)
    samples = [
        Scored(row, prompt, completion, dict(of_one), judged, len(ids))
        for row, (prompt, completion, of_one, judged, ids) in enumerate(columns)
    ]
    weights = trainer.reward_weights.tolist()
    summary = Evaluated(
        schema=SCHEMA,
        subject=subject,
        scores={name: [one[name] for one in scores] for name in told},
        weights=dict(zip(told, weights, strict=True)),
        judged_by=judge,
        readable_by=judge if said is not None else ", ".join(forms),
        verdicts=[str(one) for one in verdicts],
        tokens=[len(ids) for ids in made.ids],
        cut=sum(map(trainer.is_cut, made.ids)),
        rows=digest_of(rows),
    )
    return summary, samples


def refuse_other_rows(store: Store, evaluation: Evaluation, evaluator: Evaluator) -> None:
    """Raise BadSpec where the problems are not those that other policies of the evaluation have completed, as of a
    file that has changed meanwhile: no row could be compared."""
    here = digest_of(evaluator.rows)
    for subject in evaluation.subjects:
        found = evaluated(subject.name).read(store)
        if found is not None and found.rows != here:
            message = f"the problems are others than those that {subject.name} was evaluated on"
            raise BadSpec(f"{message}; `grpo-orch eval {evaluation.of}` evaluates all of it on these")


def digest_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of their prompts, in order."""
    return blake3(repr([row["prompt"] for row in rows]).encode()).hexdigest(16)


def judge_of(rewards: Mapping[str, Reward]) -> str:
    """The function that tells right from wrong: the first that says what it can read, else the first that is not
    about form alone."""
    says = [name for name, one in rewards.items() if hasattr(one, "readable")]
    others = [name for name, one in rewards.items() if not hasattr(one, "is_form")]
    return (says or others or list(rewards))[0]


def forms_of(rewards: Mapping[str, Reward], judge: str) -> list[str]:
    """The functions that look at the form."""
    return [name for name, one in rewards.items() if hasattr(one, "is_form") and name != judge]


def _said(evaluator: Evaluator, judge: str, made: Made) -> list[bool] | None:
    """Whether each completion could be read, by the function that judges; None where it does not say."""
    says: Any = getattr(evaluator.rewards[judge], "readable", None)
    if says is None:
        return None
    rows, given = evaluator.rows, ("prompt", "completion", "completion_ids")
    columns = {key: [row[key] for row in rows] for key in rows[0] if key not in given}
    given_to = {"prompts": made.prompts, "completions": made.completions, "completion_ids": made.ids, **columns}
    try:
        with interrupted(evaluator.timeout_s, judge):
            found = [bool(one) for one in call_alone(says, given_to)]
    except (RewardTimedOut, *FAULTS) as error:
        raise BadReward(f"what {judge} says of which completions can be read {said_of(error)}") from error
    if len(found) != len(rows):
        raise BadReward(f"{judge} says of {len(found)} of {len(rows)} completions whether they can be read")
    return found
