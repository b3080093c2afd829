"""The detector's truth table: what trips it, what it watches, what leaves it alone, and how far back it goes.

How well it does on many random runs is in `test_divergence_score`.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.store.codec import from_json, to_json
from policies.detect.divergence import TASK_HINT, Detector, Health, Point, Verdict, follow, trip_at
from policies.detect.symptoms import as_factor

Values = dict[str, float | None]
Metric = Callable[[int], float | None]

ONSET = 200
STEPS = 320


def level(value: float, sigma: float = 0.15, seed: int = 0) -> Metric:
    """Log-normal noise around a level; one step always has the same noise."""
    return lambda step: value * math.exp(random.Random(f"{seed} {step}").gauss(0.0, sigma))


def after(onset: int, before: Metric, then: Metric) -> Metric:
    """The one up to the step, the other from the next step on: what the update of that step did."""
    return lambda step: then(step) if step > onset else before(step)


def between(first: int, last: int, usual: Metric, then: Metric) -> Metric:
    return lambda step: then(step) if first <= step <= last else usual(step)


def growing(value: float, doubling_steps: float, onset: int = ONSET) -> Metric:
    noise = level(value)
    return lambda step: (noise(step) or 0.0) * 2 ** (max(0, step - onset) / doubling_steps)


CALM: dict[str, Metric] = {
    "kl": level(0.08),
    "loss": level(0.003),
    "grad_norm": level(0.4, 0.4, seed=1),
    "reward": lambda step: 0.5 + random.Random(step).gauss(0.0, 0.05),
    "entropy": level(0.6, seed=2),
    "completions/mean_length": level(220.0, seed=3),
    "completions/clipped_ratio": lambda _: 0.05,
}
FALLEN: Metric = lambda _: 0.02  # noqa: E731  # a reward


def run(steps: int = STEPS, gap: int = 1, **changed: Metric | None) -> list[Point]:
    """A calm run except for these metrics; None: not logged. `__` stands for a slash."""
    metrics = {**CALM, **{name.replace("__", "/"): metric for name, metric in changed.items()}}
    return [
        Point(step, {name: metric(step) for name, metric in metrics.items() if metric is not None})
        for step in range(gap, steps + 1, gap)
    ]


def verdicts(points: Iterable[Point], limit: float | None = None) -> list[Verdict]:
    detector, found = Detector(), []
    for point in points:
        detector = follow(detector, point, limit)
        found.append(detector.verdict)
    return found


def trip(points: Iterable[Point], limit: float | None = None) -> Verdict:
    last = verdicts(points, limit)[-1]
    assert last.health is Health.TRIPPED
    return last


HEALTHY: dict[str, list[Point]] = {
    "calm": run(),
    "concave by a thousand": run(1500, kl=lambda step: 0.4 * (1 - math.exp(-step / 400)) + 1e-5),
    "in proportion to the steps": run(2000, kl=lambda step: 1e-3 * step),
    "begins at 3": run(kl=level(3.0, 0.3)),
    "tiny": run(kl=level(1e-5, 0.5)),
    "single wild points": run(kl=lambda step: 80.0 if step % 23 == 0 else 0.05),
    "three wild points in a row": run(kl=lambda step: 900.0 if step % 40 in (1, 2, 3) else 0.05),
    "four wild points of seven": run(kl=lambda step: 90.0 if step in (101, 102, 103, 105) else 0.05),
    "the KL goes on for a while when the reward has come": run(
        kl=lambda step: 0.03 + 1.0 / (1 + math.exp((ONSET - step) / 8)),
        reward=lambda step: 0.1 + 0.7 / (1 + math.exp((ONSET - 40 - step) / 6)),
    ),
    "the entropy fell long before the reward": run(
        430, entropy=after(60, level(0.6), level(0.002)), reward=after(400, lambda _: 0.6, FALLEN)
    ),
    "three in a row not finite": run(kl=between(100, 102, level(0.05), lambda _: None)),
    "one in three not finite": run(kl=lambda step: None if step % 3 else 0.05, grad_norm=lambda _: None, steps=16),
    "the mean of the KL overflows, gradients do not": run(kl=after(ONSET, level(0.08), lambda _: None)),
    "the search for a loss scale": run(grad_norm=between(1, 14, level(0.4), lambda _: None)),
    "a format is learnt": run(
        kl=lambda step: 0.002 + 0.3 / (1 + math.exp((ONSET - step) / 8)),
        reward=lambda step: 0.1 + 0.7 / (1 + math.exp((ONSET - step) / 8)),
        entropy=lambda step: 0.8 - 0.6 / (1 + math.exp((ONSET - step) / 8)),
        completions__mean_length=lambda step: 300 - 220 / (1 + math.exp((ONSET - step) / 8)),
    ),
    "a reward falls and recovers": run(reward=between(200, 230, lambda _: 0.6, FALLEN)),
    "gradients alone explode": run(grad_norm=after(ONSET, level(0.4), level(80.0))),
    "no reference, zeros are logged": run(kl=lambda _: 0.0),
    "all groups of one reward": run(grad_norm=lambda step: 0.0 if step < ONSET else 0.5),
    "little is logged": [Point(step, {"loss": 0.1}) for step in range(1, 300)],
    "nothing is logged": [Point(step, {}) for step in range(1, 300)],
}


@pytest.mark.parametrize("points", HEALTHY.values(), ids=HEALTHY)
def test_what_does_not_trip(points: list[Point]) -> None:
    assert Health.TRIPPED not in {verdict.health for verdict in verdicts(points)}


@pytest.mark.parametrize(
    "name",
    ["calm", "concave by a thousand", "begins at 3", "no reference, zeros are logged", "all groups of one reward"],
)
def test_what_is_not_even_watched(name: str) -> None:
    assert {verdict.health for verdict in verdicts(HEALTHY[name])} == {Health.HEALTHY}


# name: the run, in how many points it must trip
DIVERGING: dict[str, tuple[list[Point], int]] = {
    "cliff": (run(kl=after(ONSET, level(0.08), level(30.0))), 7),
    "cliff, rewards rising": (
        run(kl=after(ONSET, level(0.08), level(300.0)), reward=lambda step: 0.2 + step / 500),
        7,
    ),
    "far beyond what a rising reward can pay for": (
        run(kl=lambda step: min(40.0, growing(3.5, 25)(step) or 0.0), reward=lambda step: step / 500),
        120,
    ),
    "gradients explode while rewards rise": (
        run(
            kl=after(ONSET, level(0.006), level(6.0)),
            grad_norm=after(ONSET, level(1.0), level(160.0)),
            reward=lambda step: step / 500,
        ),
        9,
    ),
    "ramp": (run(kl=growing(0.08, 12)), 75),
    "slow ramp": (run(kl=growing(0.08, 25)), 120),
    "begins at 3 and runs away": (run(kl=growing(3.0, 8)), 45),
    "only the KL is logged": ([Point(p.step, {"kl": p.values["kl"]}) for p in run(kl=growing(0.08, 12))], 75),
    "swings": (run(kl=lambda step: (growing(0.08, 10)(step) or 0.0) * (1 + 0.9 * math.sin(step / 3))), 80),
    "KL not finite": (run(kl=after(ONSET, level(0.08), lambda _: None), grad_norm=None), 4),
    "KL infinite": (run(kl=after(ONSET, level(0.08), lambda _: math.inf), grad_norm=None), 4),
    "KL and gradients not finite": (
        run(kl=after(ONSET, level(0.08), lambda _: None), grad_norm=after(ONSET, level(0.4), lambda _: None)),
        4,
    ),
    "KL not finite, gradients of groups that are alike": (
        run(kl=after(ONSET, level(0.08), lambda _: None), grad_norm=after(ONSET, level(0.4), lambda _: 0.0)),
        4,
    ),
    "loss not finite": (run(loss=after(ONSET, level(0.08), lambda _: math.nan)), 4),
    "gradients not finite": (run(grad_norm=after(ONSET, level(0.08), lambda _: None)), 17),
    "gradients never finite": (run(60, grad_norm=lambda _: math.nan), 0),
    "no KL: rewards and entropy fall": (
        run(kl=None, reward=after(ONSET, lambda _: 0.6, FALLEN), entropy=after(ONSET, level(0.6), level(0.01))),
        9,
    ),
    "no KL: gradients explode, rewards fall": (
        run(kl=None, reward=after(ONSET, lambda _: 0.6, FALLEN), grad_norm=after(ONSET, level(0.4), level(9.0))),
        9,
    ),
    "calm KL: answers without end": (
        run(
            reward=after(ONSET, lambda _: 0.6, FALLEN),
            completions__mean_length=after(ONSET, level(220.0), level(900.0)),
            completions__clipped_ratio=after(ONSET, lambda _: 0.05, lambda _: 0.99),
        ),
        9,
    ),
    "calm KL: rewards fall and the entropy is a quarter": (
        run(reward=after(ONSET, lambda _: 0.6, FALLEN), entropy=after(ONSET, level(0.6, 0.05), level(0.13, 0.05))),
        26,
    ),
}


@pytest.mark.parametrize(("points", "within"), DIVERGING.values(), ids=DIVERGING)
def test_what_trips_and_how_soon(points: list[Point], within: int) -> None:
    found = trip(points)
    assert found.tripped_step is not None
    assert found.onset_step is not None
    if within:
        assert ONSET < found.tripped_step <= ONSET + within
        assert 100 <= found.onset_step <= ONSET


@pytest.mark.parametrize("gap", [10, 20])
@pytest.mark.parametrize("then", [level(30.0), growing(0.4, 40)])
def test_few_points_of_many_steps_each_do_as_well(gap: int, then: Metric) -> None:
    found = trip(run(900, gap, kl=after(ONSET, level(0.08, 0.05), then)))
    assert found.onset_step is not None
    assert ONSET - 8 * gap <= found.onset_step <= ONSET


def test_the_users_limit_is_above_the_runs_own_start_and_holds_for_a_plateau() -> None:
    plateau = run(1200, kl=lambda step: 2.0 + 0.9 * (1 - math.exp(-step / 300)))
    assert verdicts(plateau, 1.0)[-1].health is Health.HEALTHY
    found = trip(plateau, 0.7)
    assert found.evidence == ("KL 2.71, over the limit of 0.7 above its start of 2.01",)
    assert found.onset_step is not None
    assert found.onset_step < 100  # it never was calm: where the KL was above a quarter of what it may
    spiked = run(kl=lambda step: 90.0 if step % 9 in (1, 2) else 0.05)
    assert verdicts(spiked, 0.5)[-1].health is Health.HEALTHY


def test_what_confirms_makes_it_trip_sooner() -> None:
    ramp = growing(0.08, 12)
    alone, fallen = trip(run(kl=ramp)), after(ONSET + 10, lambda _: 0.6, FALLEN)
    one = trip(run(kl=ramp, reward=fallen))
    two = trip(run(kl=ramp, reward=fallen, grad_norm=after(ONSET + 10, level(0.4), level(9.0))))
    assert alone.tripped_step is not None
    assert one.tripped_step is not None
    assert two.tripped_step is not None
    assert two.tripped_step < one.tripped_step < alone.tripped_step
    assert [len(found.evidence) for found in (alone, one)] == [1, 3]  # the last is the hint at harder tasks


@pytest.mark.parametrize(
    "off",
    [
        {"reward": after(ONSET, lambda _: 0.6, FALLEN)},
        {"kl": after(ONSET, level(0.01), level(0.6))},
    ],
    ids=["reward", "KL"],
)
def test_one_thing_alone_is_watched_and_says_since_when(off: dict[str, Metric]) -> None:
    found = verdicts(run(ONSET + 36, 1, **off))
    assert {verdict.health for verdict in found[: ONSET - 1]} == {Health.HEALTHY}
    watched = [verdict for verdict in found if verdict.health is Health.WATCH]
    assert len(watched) > 30
    onsets = [verdict.onset_step or 0 for verdict in watched]
    assert onsets == sorted(onsets, reverse=True)  # it moves back or not at all
    assert ONSET - 10 <= onsets[0] <= ONSET
    assert all(len(verdict.evidence) == 1 for verdict in watched)


def test_watching_ends_with_the_recovery() -> None:
    found = verdicts(run(kl=between(200, 230, level(0.01), level(0.6))))
    watched = [verdict.step for verdict in found if verdict.health is Health.WATCH]
    assert watched == [*range(watched[0], watched[-1] + 1)]
    assert 200 <= watched[0] <= 206
    assert 230 <= watched[-1] <= 250
    assert found[-1] == Verdict(step=STEPS)


def test_what_comes_and_goes_is_watched_as_one() -> None:
    found = verdicts(run(250, kl=lambda step: 0.6 if step > ONSET and step % 14 < 10 else 0.01))
    watched = [verdict for verdict in found if verdict.health is Health.WATCH]
    assert [verdict.step for verdict in watched] == [*range(watched[0].step, 251)]
    onsets = [verdict.onset_step or 0 for verdict in watched]
    assert ONSET - 20 <= onsets[-1] <= onsets[0] <= ONSET + 1


def test_the_onset_is_that_of_the_first_thing_when_another_takes_over() -> None:
    found = verdicts(run(reward=between(200, 240, lambda _: 0.6, FALLEN), kl=after(235, level(0.01), level(0.6))))
    assert any(sentence.startswith("KL 0.") for sentence in found[-1].evidence)
    assert (found[-1].onset_step or 0) <= ONSET


def test_a_trip_stays_whatever_comes_then() -> None:
    points = run(kl=between(ONSET, 230, level(0.08), level(50.0)))
    found = trip(points)
    assert found.step == STEPS
    assert replace(found, step=0) == replace(verdicts(points[:260])[-1], step=0)
    detector = Detector()
    for point in points:
        detector = follow(detector, point)
    assert detector.points == len(points)


def test_a_step_that_is_not_later_is_ignored() -> None:
    detector = follow(Detector(), Point(5, {"kl": 0.1}))
    assert follow(detector, Point(5, {"kl": None})) is detector
    assert follow(detector, Point(4, {"kl": 9.0})) is detector


def test_the_evidence_says_what_is_seen_in_numbers() -> None:
    cut = after(ONSET, lambda _: 0.02, lambda _: 0.95)
    found = trip(
        run(
            kl=after(ONSET, lambda _: 0.05, lambda _: 2.0),
            reward=after(ONSET, lambda _: 0.6, lambda _: 0.1),
            entropy=after(ONSET, lambda _: 0.6, lambda _: 0.06),
            completions__clipped_ratio=cut,
            frac_reward_zero_std=cut,
        )
    )
    kl, *others = found.evidence
    assert re.fullmatch(r"KL 2, 3\d times its calm level of 0\.05\d at step 20\d", kl)
    assert any(re.fullmatch(r"reward 0\.\d+, fallen from 0\.\d+ since step 2\d\d", one) for one in others)
    assert any(
        re.match(r"95% of the completions are cut at their longest, at most \d+% at step 20\d", one)
        for one in others
    )
    assert any(
        re.match(r"entropy 0\.06, 1/\d\.\d of its calm level of 0\.\d+ at step 20\d", one) for one in others
    )
    gone = trip(run(kl=after(ONSET, level(0.08), lambda _: None), grad_norm=None))
    assert gone.evidence == ("kl was not finite for 4 points in a row",)
    assert gone.onset_step == ONSET - 1  # the last point with a value may hold some that were none


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (1.04, "1.0"),
        (1.43, "1.4"),
        (9.96, "10"),
        (41.2, "41"),
        (270.0, "270"),
        (1_449.0, "1,400"),
        (2.7e6, "2,700,000"),
    ],
)
def test_a_factor_is_said_as_people_say_it(factor: float, words: str) -> None:
    assert as_factor(factor, 1.0) == f"{words} times"
    assert as_factor(1.0, factor * 1.0001) == f"1/{words} of"


WILD = st.one_of(
    st.none(), st.floats(), st.floats(0.0, 1.0), st.sampled_from([0.0, 1e300, -1e300, 5e-324, math.nan, math.inf])
)
NAMES = ["kl", "loss", *CALM, "frac_reward_zero_std", "sampling/sampling_logp_difference/mean", "eval_reward", "x"]


@given(st.lists(st.tuples(st.integers(-3, 40), st.dictionaries(st.sampled_from(NAMES), WILD)), max_size=60))
@settings(max_examples=150, deadline=None)
def test_nothing_that_is_logged_raises_and_a_store_in_between_changes_nothing(
    logged: list[tuple[int, Values]],
) -> None:
    straight = stored = Detector()
    step = 0
    for gap, values in logged:
        step += gap
        straight, stored = follow(straight, Point(step, values), 0.5), follow(stored, Point(step, values), 0.5)
        stored = from_json(to_json(stored), Detector, "stored")
        assert stored == straight
    onset = straight.verdict.onset_step
    assert onset is None or 1 <= onset <= max(1, straight.verdict.step)
    assert (straight.verdict.health is Health.TRIPPED) == (straight.verdict.tripped_step is not None)
    assert bool(straight.verdict.evidence) == (straight.verdict.health is not Health.HEALTHY)


@pytest.mark.parametrize("name", ["ramp", "slow ramp", "swings", "calm KL: answers without end"])
def test_a_store_in_between_changes_nothing_in_a_run_that_diverges(name: str) -> None:
    straight = stored = Detector()
    for point in DIVERGING[name][0]:
        straight, stored = follow(straight, point), follow(from_json(to_json(stored), Detector, "stored"), point)
        assert stored == straight
    assert straight.verdict.health is Health.TRIPPED


def test_ten_thousand_points_are_remembered_in_a_few_kilobytes() -> None:
    detector = Detector()
    for point in run(10_000):
        detector = follow(detector, point)
    assert detector.verdict == Verdict(step=10_000)
    assert len(to_json(detector)) < 12_000


@pytest.mark.parametrize(("watched_since", "onset_step"), [(None, 7), (5, 5), (9, 7)])
def test_what_no_point_tells_trips_it_too_from_the_first_step_that_may_be_to_blame(
    watched_since: int | None, onset_step: int
) -> None:
    before = Verdict() if watched_since is None else Verdict(Health.WATCH, 9, watched_since)
    tripped = trip_at(Detector(before, 10), 12, 7, "gone")
    assert tripped.verdict == Verdict(Health.TRIPPED, 12, onset_step, 12, ("gone",))
    assert trip_at(tripped, 13, 13, "again") == tripped
    assert follow(tripped, Point(13, {"kl": 0.1})).verdict.health is Health.TRIPPED


def test_gradients_alone_are_no_symptom() -> None:
    found = verdicts(run(ONSET + 36, 1, grad_norm=after(ONSET, level(0.4), level(20.0))))
    assert {verdict.health for verdict in found} == {Health.HEALTHY}


def test_no_symptom_without_a_full_window_of_past() -> None:
    grad_norm, entropy = after(1, level(0.4), level(9.0)), after(1, level(0.6), level(0.01))
    found = verdicts(run(13, 1, grad_norm=grad_norm, entropy=entropy))
    assert {verdict.health for verdict in found} == {Health.HEALTHY}


@pytest.mark.parametrize("name", ["loss", "kl", "reward", "grad_norm"])
def test_nulls_in_a_column_without_numbers_are_ignored(name: str) -> None:
    found = verdicts(run(60, 1, **{name: lambda _: None}))
    assert {verdict.health for verdict in found} == {Health.HEALTHY}


def test_nulls_after_numbers_trip() -> None:
    assert trip(run(loss=lambda step: 0.01 if step < ONSET else None)).tripped_step == ONSET + 3


def test_loss_that_is_nan_from_the_start_trips() -> None:
    assert trip(run(loss=lambda _: math.nan)).tripped_step == 4


def test_run_that_learnt_is_not_dated_to_its_start() -> None:
    """Everything else left its past at the first step; the reward then rose for 60 steps and was lost."""
    lost = after(100, lambda step: min(0.9, 0.1 + step / 75), lambda _: 0.05)
    verdict = trip(run(200, 1, reward=lost, loss=lambda step: 0.01 if step < 130 else math.nan))
    assert verdict.onset_step is not None
    assert 60 <= verdict.onset_step <= 130


def staged(step: int) -> float:
    """A curriculum: the first task is learnt, and the next one is too hard for a long time."""
    return min(0.8, 0.1 + step / 100) if step <= 100 else 0.1


def test_declared_task_changes_do_not_trip() -> None:
    points = run(300, 1, reward=staged)
    undeclared = trip(points)
    assert undeclared.health is Health.TRIPPED
    assert undeclared.evidence[-1] == TASK_HINT
    detector = Detector()
    for point in points:
        detector = follow(detector, point, None, (101,))
    assert detector.verdict.health is Health.HEALTHY
