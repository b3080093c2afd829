"""A completion that hangs, eats memory or ends its worker has a failure's score, and the others have theirs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from grpo_orch.tasks.rewards.in_workers import RewardRaised, in_workers, with_arguments
from grpo_orch.tasks.rewards.pool import NoWorker
from tests.budget import HANG_S
from tests.tasks.rewards.scores import by_deed, needy, waits


def scores(*texts: str, **told: Any) -> list[float | None]:
    return by_deed(["p"] * len(texts), texts, right=["yes"] * len(texts), **told)


@pytest.fixture
def log() -> Iterator[list[Any]]:
    with capture_logs() as entries:
        yield entries


def test_many_are_scored_in_order() -> None:
    texts = ["yes" if index % 3 else "no" for index in range(500)]
    assert scores(*texts) == [float(text == "yes") for text in texts]


@pytest.mark.parametrize("deed", ["hang", "end", "kill", "memory", "nest"])
def test_what_ends_or_holds_a_worker_fails_alone_and_is_named(deed: str, log: list[Any]) -> None:
    said: list[tuple[str, float]] = []
    found = scores("yes", "none", deed, "yes", "no", log_metric=lambda name, value: said.append((name, value)))
    assert found == [1.0, None, 0.0, 1.0, 0.0]
    named, summed = log
    assert (named["function"], named["sample"], named["completion"]) == ("by_deed", 2, f"'{deed}'")
    assert summed == {
        "event": "rewards_failed",
        "log_level": "warning",
        "function": "by_deed",
        "failed": 1,
        "of": 5,
    }
    assert said == [("reward_failures/by_deed", 1.0)]


def test_memory_that_one_completion_keeps_costs_no_other() -> None:
    assert scores("much", "keep", "much", "much") == [1.0, 0.0, 1.0, 1.0]
    assert scores("much") == [1.0]


def test_what_waits_for_ever_is_ended_by_the_clock() -> None:
    assert waits(["p"], ["x"]) == [0.0]
    patient: Any = in_workers(limit_s=HANG_S)(waits.score)  # type: ignore[attr-defined]  # held there for workers
    assert patient(["p"], [""]) == [1.0], "it is what waits that takes long"


@pytest.mark.parametrize(("text", "says"), [("raise", "ValueError: no such answer"), ("nan", "it returned nan")])
def test_what_raises_is_told_with_its_sample(text: str, says: str) -> None:
    with pytest.raises(RewardRaised, match=rf"^by_deed: {says}.*; sample 1, '{text}'$"):
        scores("yes", text)
    assert scores("yes") == [1.0], "what was half done is forgotten"


def test_nothing_that_is_printed_is_taken_for_a_score() -> None:
    assert scores("print", "yes") == [0.0, 1.0]


def test_workers_know_no_secret_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    assert scores("secret") == [0.0]
    first, second = scores("pid"), scores("pid")
    assert first == second != [float(os.getpid())]


def test_a_worker_that_was_killed_between_two_calls_fails_no_sample() -> None:
    (pid,) = scores("pid")
    assert pid is not None
    os.kill(int(pid), 9)
    os.waitid(os.P_PID, int(pid), os.WEXITED | os.WNOWAIT)
    assert scores("yes", "no") == [1.0, 0.0]


def test_any_text_reaches_a_worker() -> None:
    hostile = ["\ud800", "\0", "{" * 10_000_000, "[" * 100_000, "\u2028\n\r", '"]}', "__import__('os')._exit(1)"]
    assert scores(*hostile, "yes") == [0.0] * len(hostile) + [1.0]


def test_a_column_or_an_argument_that_is_missing_is_named() -> None:
    with pytest.raises(TypeError, match="by_deed needs a column or an argument `right`"):
        by_deed(["p"], ["yes"])


def test_arguments_stand_before_columns() -> None:
    given = with_arguments(by_deed, {"right": "no", "bonus": 0.5})
    assert given(prompts=["p"], completions=["no"], right=["yes"]) == [1.5]
    assert given.__name__ == "by_deed"
    with pytest.raises(TypeError, match="by_deed takes no argument `bonbon`"):
        with_arguments(by_deed, {"bonbon": 1})


def test_a_package_that_is_missing_is_named() -> None:
    with pytest.raises(NoWorker, match=r"^needy: ModuleNotFoundError: No module named 'no_such_module'$"):
        needy(["p"], ["x"])
