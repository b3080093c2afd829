"""Correct, wrong, unreadable: the truth table."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from grpo_orch.policies.evaluation.evaluation_spec import as_run
from grpo_orch.policies.evaluation.judging import Verdict, readability, verdict
from grpo_orch.policies.model.spec import (
    Dataset,
    Rehearsal,
    Replicas,
    RolloutSpec,
    RunSpec,
    TrainerSpec,
)


@pytest.mark.parametrize(
    ("score", "readable", "expected"),
    [
        (1.0, True, Verdict.CORRECT),
        (1.0, False, Verdict.CORRECT),  # who scores knows best
        (1.0, None, Verdict.CORRECT),
        (0.9, True, Verdict.WRONG),
        (0.0, None, Verdict.WRONG),
        (0.0, False, Verdict.UNREADABLE),
        (None, True, Verdict.UNSCORED),
    ],
)
def test_a_completion_is_judged(score: float | None, readable: bool | None, expected: Verdict) -> None:
    assert verdict(score, 1.0, readable) is expected


def test_correct_is_the_full_score_of_the_function() -> None:
    assert verdict(1.0, 2.0, True) is Verdict.WRONG
    assert verdict(2.0, 2.0, True) is Verdict.CORRECT
    for full in (0.1, 0.7, 0.9, 1.1, 1e6 + 0.3):
        (kept,) = struct.unpack("f", struct.pack("f", full))  # as TRL keeps it
        assert verdict(kept, full, True) is Verdict.CORRECT
    assert verdict(0.8999, 0.9, True) is Verdict.WRONG


def test_judge_reports_readability_before_form_functions() -> None:
    forms: list[list[float | None]] = [[1.0, 1.0, 0.5], [1.0, 0.0, None]]
    assert readability(3, [False, True, True], forms) == [False, True, True]
    assert readability(3, None, forms) == [True, False, False]
    assert readability(3, None, []) == [None] * 3


@pytest.mark.parametrize("kwargs", [{"temperature": 0.3, "stop": ["x"]}, '{"temperature": 0.3, "stop": ["x"]}'])
def test_evaluation_is_greedy_and_keeps_what_scores_depend_on(kwargs: Any) -> None:
    spec = RunSpec(
        name="run",
        storage="s3://bucket/run",
        trainer=TrainerSpec(
            model="m", dataset=Dataset(path="d"), reward_funcs=("r.f",), accelerate={"num_processes": 2}
        ),
        grpo={
            "temperature": 0.7,
            "max_completion_length": 77,
            "deepspeed": "zero.json",
            "trust_remote_code": True,
            "beta": 0.1,
            "generation_kwargs": kwargs,
        },
        rollout=RolloutSpec(replicas=Replicas(min=2, max=2)),
        rehearse=Rehearsal(),
    )
    made = as_run(spec, "s3://bucket/run/evaluations/x", Dataset(path="held-out"))
    assert (made.grpo["temperature"], made.grpo["max_completion_length"], made.grpo["beta"]) == (0.0, 77, 0.0)
    assert made.grpo["generation_kwargs"] == {"stop": ["x"]}
    assert made.grpo["use_cpu"] is True  # two processes may hold what one GPU does not
    assert "deepspeed" not in made.grpo
    assert made.grpo["trust_remote_code"] is True  # without it the model is not loaded
    assert made.trainer.accelerate is None
    assert made.trainer.dataset == Dataset(path="held-out")
    assert made.rollout == spec.rollout
    assert (made.rehearse, made.name) == (None, "run-eval")
