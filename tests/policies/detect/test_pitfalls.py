"""The pitfalls: each from what is logged, told once, and again only after it was gone or 200 steps later."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint.records.metrics import (
    NONFINITE,
    PROMPTS_REFUSED,
    REFUSED_LIMIT,
    REFUSED_ROW,
    REFUSED_TOKENS,
    STALENESS,
    WAIT_S,
)
from grpo_orch.policies.detect import pitfalls
from grpo_orch.policies.detect.divergence import Detector, Health, Point, follow
from grpo_orch.policies.detect.pitfalls import NO_REWARD, UNREWARDED_MAX, Pitfall, Pitfalls, find_pitfalls

Values = dict[str, float | None]
ZERO_STD, CLIPPED = "frac_reward_zero_std", "completions/clipped_ratio"
DIFFERENCE = "sampling/sampling_logp_difference/mean"


def told(points: Iterable[Point]) -> list[Pitfall]:
    state, found = Pitfalls(), list[Pitfall]()
    for point in points:
        state, new = find_pitfalls(state, point)
        found += new
    return found


def logged(steps: int, values: Callable[[int], Values], gap: int = 1) -> list[Point]:
    return [Point(step, values(step)) for step in range(gap, steps + 1, gap)]


def seen(steps: int, values: Callable[[int], Values], gap: int = 1) -> list[tuple[str, int]]:
    return [(one.kind, one.step) for one in told(logged(steps, values, gap))]


def evaluated(
    training: Callable[[int], float], held_out: Callable[[int], float | None]
) -> Callable[[int], Values]:
    """An evaluation every ten steps, in the row of its step."""
    return lambda step: {
        "reward": training(step),
        **({"eval_reward": held_out(step)} if step % 10 == 0 else {}),
    }


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("no_signal", {ZERO_STD: 0.95}),
        ("stale_sampling", {DIFFERENCE: 0.4}),
        ("completions_cut", {CLIPPED: 0.6}),
    ],
)
def test_what_stands_high_is_told_after_sixteen_points_less_two(kind: str, values: Values) -> None:
    assert seen(60, lambda _: values) == [(kind, 14)]
    assert seen(600, lambda _: values, gap=20) == [(kind, 280), (kind, 480)]
    assert seen(60, lambda step: {} if step % 2 else values) == [(kind, 28)]


@pytest.mark.parametrize("name", [ZERO_STD, DIFFERENCE, CLIPPED])
def test_what_stands_lower_or_is_high_now_and_then_is_not_told(name: str) -> None:
    usual = {ZERO_STD: 0.85, DIFFERENCE: 0.05, CLIPPED: 0.4}[name]
    assert seen(300, lambda _: {name: usual}) == []
    assert seen(300, lambda step: {name: usual if step % 4 == 0 else 1.0}) == []
    assert seen(300, lambda _: {name: None}) == []


# Measured between policies of one run that lie so many updates apart (`benchmarks/recordings/sampling_by_age.py`).
RECORDED = json.loads((Path(__file__).parents[2] / "recordings" / "sampling_by_age.json").read_text())
LEARNS, BREAKS = RECORDED[:4], RECORDED[4:]
ENGINES = 0.05  # two engines on one policy, in bfloat16


def sampled(run: dict[str, Any], age: int, staleness: int) -> Callable[[int], Values]:
    """What a run logs that is sampled from policies of that age, while it reports a staleness."""
    found = run["difference"][str(age)]
    return lambda step: {DIFFERENCE: (found[step - 1] or 0.0) + ENGINES, STALENESS: float(staleness)}


@pytest.mark.parametrize("age", [1, 2, 4, 8])
@pytest.mark.parametrize("run", LEARNS, ids=lambda run: f"{run['regime']}-{run['learning_rate']:g}")
def test_overlapped_run_that_learns_is_not_stale(run: dict[str, Any], age: int) -> None:
    assert seen(len(run["rows"]), sampled(run, age, staleness=age)) == []


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_nodes_with_much_older_policies_are_noticed(staleness: int) -> None:
    fast = BREAKS[-1]  # an update moves it by 0.14
    found = seen(len(fast["rows"]), sampled(fast, 8, staleness))
    assert [kind for kind, _ in found] == ["stale_sampling"]


def test_threshold_grows_by_what_the_recorded_staleness_explains() -> None:
    def at(difference: float, staleness: float) -> list[tuple[str, int]]:
        return seen(60, lambda _: {DIFFERENCE: difference, STALENESS: staleness})

    assert at(0.31, 0.0) == at(0.36, 1.0) == at(0.41, 2.0) == [("stale_sampling", 14)]
    assert at(0.34, 1.0) == at(0.39, 2.0) == at(0.49, 4.0) == []
    (found,) = told(logged(60, lambda _: {DIFFERENCE: 0.9, STALENESS: 2.0}))
    assert "differ by 0.8 in the log-probability of a token, more than the run's staleness explains" in found.text


@pytest.mark.parametrize("age", [1, 2])
def test_guard_judges_an_overlapped_run_as_one_in_turns(age: int) -> None:
    """The recorded differences change neither a verdict nor its step."""
    for run in RECORDED:
        verdicts = []
        for known in (False, True):
            detector = Detector()
            for row in run["rows"]:
                values = {name: value for name, value in row.items() if name != "step"}
                values |= sampled(run, age, age)(row["step"]) if known else {}
                detector = follow(detector, Point(row["step"], values))
            verdicts.append((detector.verdict.health, detector.verdict.tripped_step))
        assert verdicts[0] == verdicts[1], run["regime"]
        assert (verdicts[0][0] is Health.HEALTHY) == (run in LEARNS)


def test_it_is_told_again_after_200_steps_or_after_it_was_gone() -> None:
    assert seen(420, lambda _: {CLIPPED: 0.9}) == [("completions_cut", at) for at in (14, 214, 414)]
    gone_for_12 = seen(90, lambda step: {CLIPPED: 0.1 if 40 < step <= 52 else 0.9})
    assert gone_for_12 == [("completions_cut", 14), ("completions_cut", 66)]
    gone_for_6 = seen(90, lambda step: {CLIPPED: 0.1 if 40 < step <= 46 else 0.9})
    assert gone_for_6 == [("completions_cut", 14)]


@pytest.mark.parametrize("gap", [1, 10])
def test_waiting_is_a_share_of_the_time_of_the_steps(gap: int) -> None:
    # The wait is summed over the steps of a point, the time of a step is their mean.
    assert seen(30 * gap, lambda _: {WAIT_S: 3.0 * gap, "step_time": 10.0}, gap) == [("waiting", 17 * gap)]
    assert seen(40 * gap, lambda _: {WAIT_S: 2.0 * gap, "step_time": 10.0}, gap) == []
    assert seen(40 * gap, lambda _: {WAIT_S: 0.0, "step_time": 0.0}, gap) == []
    assert seen(40 * gap, lambda step: {WAIT_S: 12.0 if step == 20 * gap else 0.0, "step_time": 10.0}, gap) == []


def test_a_reward_that_rises_while_the_held_out_one_does_not() -> None:
    rising: Callable[[int], float] = lambda step: step / 100  # noqa: E731
    flat: Callable[[int], float] = lambda _: 0.4  # noqa: E731
    assert seen(60, evaluated(rising, flat)) == [("overfitting", 40)]
    assert seen(60, evaluated(rising, lambda step: 0.4 - step / 500)) == [("overfitting", 40)]
    assert seen(60, evaluated(rising, lambda step: step / 300)) == []
    assert seen(60, evaluated(flat, flat)) == []
    assert seen(60, evaluated(lambda step: -step / 100, flat)) == []
    assert seen(60, evaluated(rising, lambda _: None)) == []
    assert seen(39, evaluated(rising, flat)) == []
    assert seen(60, lambda step: {"eval_reward": 0.4} if step % 10 == 0 else {}) == []


def test_refused_prompts_are_told_at_once_with_their_numbers() -> None:
    numbers: Values = {PROMPTS_REFUSED: 2.0, REFUSED_ROW: 1234.0, REFUSED_TOKENS: 5000.0, REFUSED_LIMIT: 4096.0}
    (one,) = told(logged(30, lambda step: numbers if step in (3, 9) else {}))
    assert (one.kind, one.step) == ("prompts_refused", 3)
    assert one.text.startswith(
        "all rollout nodes rejected 2 prompts in the last 3 points, and these were skipped; the last is row 1234 "
        "of the dataset, 5000 tokens (a sequence may have 4096): shorten or remove such prompts"
    )
    assert [step for _, step in seen(600, lambda _: numbers)] == [1, 201, 401]
    assert [step for _, step in seen(60, lambda step: numbers if step in (3, 40) else {})] == [3, 40]
    (bare,) = told(logged(1, lambda _: {PROMPTS_REFUSED: 1.0}))
    assert "the last is in an unknown row: shorten" in bare.text


def test_a_step_that_is_not_later_is_ignored() -> None:
    state, _ = find_pitfalls(Pitfalls(), Point(5, {CLIPPED: 1.0}))
    assert find_pitfalls(state, Point(5, {CLIPPED: 1.0})) == (state, ())


def test_step_without_any_reward_is_noticed_at_once() -> None:
    def values(step: int) -> Values:
        return {NO_REWARD: 1.0} if step in (3, 4, 8) else {"reward": 0.5}

    found = told(logged(9, values))
    assert [(one.kind, one.step) for one in found] == [("no_reward", 3), ("no_reward", 8)]
    assert f"the run stops after {UNREWARDED_MAX} such steps in a row" in found[0].text


def test_its_names_are_the_stores() -> None:
    assert (pitfalls.WAIT_S, pitfalls.STALENESS) == (WAIT_S, STALENESS)
    ours = (pitfalls.PROMPTS_REFUSED, pitfalls.REFUSED_ROW, pitfalls.REFUSED_TOKENS, pitfalls.REFUSED_LIMIT)
    assert ours == (PROMPTS_REFUSED, REFUSED_ROW, REFUSED_TOKENS, REFUSED_LIMIT)
    assert f"{NONFINITE}reward" == NO_REWARD
