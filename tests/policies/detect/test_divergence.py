"""The detector's truth table: what trips it, what it watches, what leaves it alone, and how far back it goes.

How well it does on many runs is in `test_families` and `tests/recordings`; that nothing makes it raise, in
`test_totality`.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_orch.checkpoint.store.codec import to_json
from grpo_orch.policies.detect.divergence import TASK_HINT, Detector, Health, Point, Verdict, follow, trip_at
from tests.policies.detect.runs import (
    LOST,
    NULLS,
    ONSET,
    STEPS,
    Metric,
    after,
    always,
    between,
    ends,
    growing,
    learnt,
    level,
    reward,
    rising,
    run,
    sigmoid,
    trip,
    verdicts,
)

RISES = reward(0.3, 0.5, 0.03)
RIGHT, WRONG = reward(0.4, sigma=0.03), reward(0.05, sigma=0.03)
SMALL_KL = after(ONSET, level(0.05, 0.05), level(0.3, 0.05))  # not enough alone
ALL = always(1.0)

# Not tripped at any step; True: not even watched.
HEALTHY: dict[str, tuple[list[Point], bool]] = {
    "calm": (run(), True),
    "concave by a thousand": (run(1500, kl=lambda step: 0.4 * (1 - math.exp(-step / 400)) + 1e-5), True),
    "in proportion to the steps": (run(2000, kl=lambda step: 1e-3 * step), False),
    "begins at 3": (run(kl=level(3.0, 0.3)), True),
    "tiny": (run(kl=level(1e-5, 0.5)), False),
    "single wild points": (run(kl=lambda step: 80.0 if step % 23 == 0 else 0.05), False),
    "three wild points in a row": (run(kl=lambda step: 900.0 if step % 40 in (1, 2, 3) else 0.05), False),
    "four wild points of seven": (run(kl=lambda step: 90.0 if step in (101, 102, 103, 105) else 0.05), False),
    "the KL goes on for a while when the reward has come": (
        run(kl=sigmoid(0.03, 1.0), reward=sigmoid(0.1, 0.7, ONSET - 40, 6)),
        False,
    ),
    "the entropy fell long before the reward": (
        run(430, entropy=after(60, level(0.6), level(0.002)), reward=after(400, always(0.6), always(0.02))),
        False,
    ),
    "three in a row not finite": (run(kl=between(100, 102, level(0.05), always(None))), False),
    "one in three not finite": (
        run(kl=lambda step: None if step % 3 else 0.05, grad_norm=always(None), steps=16),
        False,
    ),
    "the mean of the KL overflows, gradients do not": (run(kl=NULLS), False),
    "the search for a loss scale": (run(grad_norm=between(1, 14, level(0.4), always(None))), False),
    "a format is learnt": (
        run(
            kl=sigmoid(0.002, 0.3),
            reward=sigmoid(0.1, 0.7),
            entropy=sigmoid(0.8, -0.6),
            completions__mean_length=sigmoid(300, -220),
        ),
        False,
    ),
    "a reward falls and recovers": (run(reward=between(200, 230, always(0.6), always(0.02))), False),
    "gradients alone explode": (run(grad_norm=after(ONSET, level(0.4), level(80.0))), True),
    "no full window of past": (
        run(13, grad_norm=after(1, level(0.4), level(9.0)), entropy=after(1, level(0.6), level(0.01))),
        True,
    ),
    "no reference, zeros are logged": (run(kl=always(0.0)), True),
    "all groups of one reward": (run(grad_norm=lambda step: 0.0 if step < ONSET else 0.5), True),
    "little is logged": ([Point(step, {"loss": 0.1}) for step in range(1, 300)], False),
    "nothing is logged": ([Point(step, {}) for step in range(1, 300)], False),
    "only nulls": (run(60, kl=always(None), loss=always(None), reward=always(None), grad_norm=always(None)), True),
    "an adapter begins at nothing": (
        run(kl=lambda step: 0.0005 + 0.6 * min(1.0, max(0, step - 60) / 40), reward=reward(0.3)),
        False,
    ),
    "and its reward dips": (  # the KL is its past by then
        run(
            kl=lambda step: 0.0005 + 0.6 * min(1.0, max(0, step - 60) / 40),
            reward=lambda step: 0.1 if 250 <= step < 280 else reward(0.6)(step),
        ),
        False,
    ),
}


@pytest.mark.parametrize(("points", "unwatched"), HEALTHY.values(), ids=HEALTHY)
def test_healthy_runs_do_not_trip(points: list[Point], unwatched: bool) -> None:
    found = {verdict.health for verdict in verdicts(points)}
    assert Health.TRIPPED not in found
    assert found == {Health.HEALTHY} or not unwatched


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
    "KL not finite": (run(kl=NULLS, grad_norm=None), 4),
    "KL infinite": (run(kl=after(ONSET, level(0.08), always(math.inf)), grad_norm=None), 4),
    "KL and gradients not finite": (run(kl=NULLS, grad_norm=after(ONSET, level(0.4), always(None))), 4),
    "KL not finite, gradients of groups that are alike": (
        run(kl=NULLS, grad_norm=after(ONSET, level(0.4), always(0.0))),
        4,
    ),
    "loss not finite": (run(loss=after(ONSET, level(0.08), always(math.nan))), 4),
    "loss not logged any more": (run(loss=after(ONSET, always(0.01), always(None))), 4),
    "gradients not finite": (run(grad_norm=NULLS), 17),
    "no KL: rewards and entropy fall": (
        run(kl=None, reward=LOST, entropy=after(ONSET, level(0.6), level(0.01))),
        9,
    ),
    "no KL: gradients explode, rewards fall": (
        run(kl=None, reward=LOST, grad_norm=after(ONSET, level(0.4), level(9.0))),
        9,
    ),
    "calm KL: answers without end": (
        run(
            reward=LOST,
            completions__mean_length=after(ONSET, level(220.0), level(900.0)),
            completions__clipped_ratio=after(ONSET, always(0.05), always(0.99)),
        ),
        9,
    ),
    "calm KL: rewards fall and the entropy is a quarter": (
        run(reward=LOST, entropy=after(ONSET, level(0.6, 0.05), level(0.13, 0.05))),
        26,
    ),
    "a small KL, but tenfold": (run(kl=after(ONSET, level(0.004), level(0.04)), reward=LOST), 30),
    "all is lost for good, and nothing beside it": (
        run(reward=lambda step: learnt(step if step <= ONSET else 0)),
        100,
    ),
    "an onset long after a weak sign": (
        run(kl=after(ONSET, level(0.08), level(6.0)), entropy=after(8, level(0.9, 0.02), level(0.25, 0.02))),
        15,
    ),
    "a reward that is tricked, with a KL": (
        run(kl=after(ONSET, level(0.05), level(0.6)), reward=RISES, witness__right=after(ONSET, RIGHT, WRONG)),
        15,
    ),
}


@pytest.mark.parametrize(("points", "within"), DIVERGING.values(), ids=DIVERGING)
def test_diverging_runs_trip_in_time(points: list[Point], within: int) -> None:
    found = trip(points)
    assert found.tripped_step is not None
    assert found.onset_step is not None
    assert ONSET < found.tripped_step <= ONSET + within
    assert 100 <= found.onset_step <= ONSET


# The step at which it trips where something is wrong from the start.
BORN_BROKEN: dict[str, tuple[list[Point], int | None]] = {
    "gradients never finite": (run(60, grad_norm=always(math.nan)), 17),
    "a loss that is NaN": (run(loss=always(math.nan)), 4),
    "a KL beyond any reference": (run(60, kl=level(3000.0)), 7),
    "another reference": (run(60, kl=level(8.0)), None),
    "another reference, and nothing is earned": (
        run(
            60,
            kl=level(8.0),
            reward=always(0.02),
            completions__clipped_ratio=ALL,
            frac_reward_zero_std=ALL,
        ),
        7,
    ),
    "it learns to end": (
        run(
            100,
            kl=None,
            reward=learnt,
            completions__clipped_ratio=after(30, ALL, always(0.3)),
            frac_reward_zero_std=after(30, ALL, always(0.3)),
        ),
        None,
    ),
    "a task that is mastered": (
        run(100, kl=None, reward=learnt, completions__clipped_ratio=ALL, frac_reward_zero_std=ALL),
        None,
    ),
}


@pytest.mark.parametrize(("points", "tripped_step"), BORN_BROKEN.values(), ids=BORN_BROKEN)
def test_run_broken_from_its_start_needs_no_past(points: list[Point], tripped_step: int | None) -> None:
    assert verdicts(points)[-1].tripped_step == tripped_step


def test_run_that_never_learns_trips_within_hundred_points() -> None:
    mute = run(100, kl=None, reward=always(0.02), completions__clipped_ratio=ALL, frac_reward_zero_std=ALL)
    assert 40 < (trip(mute).tripped_step or 0) < 100


def regained(by: float) -> dict[str, Metric]:
    """A reward that fell with the entropy, and rises again by so much."""
    back: Metric = lambda step: learnt(0) + 0.1 + by * min(1.0, (step - ONSET) / 30)  # noqa: E731
    up: Metric = lambda step: 0.2 * 4 ** min(1.0, (step - ONSET) / 10)  # noqa: E731
    return {"reward": after(ONSET, learnt, back), "entropy": after(ONSET, level(0.2, 0.05), up)}


def lost(by: float) -> dict[str, Metric | None]:
    """The entropy goes, and with it this part of the reward; no KL is logged."""
    fell: Metric = lambda step: learnt(step) - by * (step > ONSET)  # noqa: E731
    return {"kl": None, "entropy": after(ONSET, level(0.6, 0.05), level(0.01, 0.05)), "reward": fell}


def harder(**brings: Metric) -> dict[str, Metric]:
    """Harder data: the reward is lower at once, and these metrics are others."""
    usual: dict[str, Metric] = {"entropy": level(0.6, 0.05), "completions__mean_length": level(220.0, 0.05)}
    usual |= {"kl": level(0.08), "completions__clipped_ratio": always(0.05)}
    changed = {name: after(ONSET, metric, brings.get(name, metric)) for name, metric in usual.items()}
    return {**changed, "reward": after(ONSET, learnt, reward(0.12, sigma=0.03))}


def endless(cut: float) -> dict[str, Metric]:
    """A sure gain at 1.5 nats, with this share of the answers cut."""
    ratio = after(ONSET + 10, always(0.05), always(cut))
    return {"kl": rising(1.5, 20), "reward": reward(0.3, 0.6), "completions__clipped_ratio": ratio}


def signed(sign: float) -> Metric:
    calm: Metric = lambda step: random.Random(f"k{step}").gauss(-0.002, 0.004)  # noqa: E731
    return after(ONSET, calm, lambda step: sign * min(40.0, 3.0 ** ((step - ONSET) / 4)))


SUMMED: dict[str, Any] = {"kl": None, "completions__mean_length": level(200.0, 0.05)}
WILDER, LONGER = level(1.8, 0.05), level(450.0, 0.05)
EXPLODES = {"kl": None, "grad_norm": after(ONSET, level(0.4), level(40.0))}
DULL = after(ONSET, level(0.6, 0.05), level(0.05, 0.05))

# What it shows, a run that does not trip, and what must be otherwise for it to trip.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "only a sure gain pays": (
        {"kl": rising(2.2, 20), "reward": reward(0.3, 0.6)},
        {"kl": rising(2.2, 20), "reward": reward(0.3, 0.03)},
    ),
    "no gain is worth twenty nats": (
        {"kl": rising(1.5, 20), "reward": reward(0.0, 1.0, 1e-4)},
        {"kl": after(ONSET, level(0.05), level(25.0)), "reward": reward(0.0, 1.0, 1e-4)},
    ),
    "a harder task that is learnt": (
        {"reward": lambda step: learnt(step if step <= ONSET else step - ONSET)},
        {"reward": lambda step: learnt(step if step <= ONSET else 0)},
    ),
    "a strong signal lowers the bar of the KL to a ninth": (
        {"kl": SMALL_KL, "entropy": after(ONSET, level(0.6, 0.05), level(0.1, 0.05))},
        {"kl": SMALL_KL, "entropy": after(ONSET, level(0.6, 0.05), level(0.01, 0.05))},
    ),
    "a reward that rises again": (regained(0.25), regained(0.0)),
    "a reward that keeps most of what it gained": (lost(0.15), lost(0.4)),
    "harder data: wilder answers, or nothing else": (harder(entropy=WILDER), harder()),
    "harder data: longer answers, or ones without end": (
        harder(completions__mean_length=LONGER),
        harder(completions__mean_length=LONGER, completions__clipped_ratio=always(0.95)),
    ),
    "harder data: wilder, and another policy": (
        harder(entropy=WILDER),
        harder(entropy=WILDER, kl=level(0.3)),
    ),
    "harder data: wilder, or one answer": (harder(entropy=WILDER), harder(entropy=level(0.1, 0.05))),
    "no gain pays by answers that grow without end": (endless(0.05), endless(0.95)),
    "exploding gradients need two others": (
        {**EXPLODES, "entropy": DULL},
        {**EXPLODES, "entropy": DULL, "completions__mean_length": after(ONSET, level(220.0, 0.05), level(20.0))},
    ),
    "a witness that falls beside a reward that does not rise": (
        {"reward": reward(0.3), "witness__right": after(ONSET, RIGHT, WRONG)},
        {"reward": RISES, "witness__right": after(ONSET, RIGHT, WRONG)},
    ),
    "no gain of a tricked reward pays": (
        {"kl": after(ONSET, level(0.05), level(0.6)), "reward": RISES, "witness__right": RIGHT},
        {"reward": RISES, "witness__right": after(ONSET, RIGHT, WRONG)},
    ),
    "a signed estimate rises": ({"kl": signed(0.0)}, {"kl": signed(1.0)}),
    "a signed estimate sinks": ({"kl": signed(0.0)}, {"kl": signed(-1.0)}),
    "a sum over the sequence is judged by the token": (
        {**SUMMED, "kl_sequence": level(25.0)},
        {**SUMMED, "kl_sequence": after(ONSET, level(25.0), level(900.0))},
    ),
    "a sum where no length is logged": (
        {**SUMMED, "completions__mean_length": None, "kl_sequence": level(25.0)},
        {**SUMMED, "completions__mean_length": None, "kl_sequence": after(ONSET, level(25.0), level(900.0))},
    ),
    **{
        f"{name} lowers the bar of the KL, from {calm:g}": (
            {"kl": SMALL_KL, name: level(calm, 0.02)},
            {"kl": SMALL_KL, name: after(ONSET, level(calm, 0.02), level(broken, 0.02))},
        )
        for name, calm, broken in (
            ("grad_norm", 0.4, 40.0),
            ("entropy", 0.6, 0.01),
            ("entropy", 0.1, 4.0),
            ("completions__mean_length", 200.0, 4000.0),
            ("completions__mean_length", 220.0, 5.0),
            ("completions__clipped_ratio", 0.05, 0.97),
            ("frac_reward_zero_std", 0.1, 0.97),
            ("sampling__sampling_logp_difference__mean", 0.01, 2.0),
        )
    },
}


@pytest.mark.parametrize(("stays", "trips"), PAIRS.values(), ids=PAIRS)
def test_signals_that_separate_a_trip_from_none(stays: dict[str, Any], trips: dict[str, Any]) -> None:
    assert ends(run(**stays)) is not Health.TRIPPED
    assert ends(run(**trips)) is Health.TRIPPED


@pytest.mark.parametrize("changed", [{"kl": SMALL_KL}, lost(0.35)], ids=["KL", "reward"])
def test_drift_long_before_is_not_the_onset(changed: dict[str, Any]) -> None:
    for earlier, trips in ((40, False), (0, True)):
        entropy = after(ONSET - earlier, level(0.6, 0.05), level(0.01, 0.05))
        assert (ends(run(ONSET + 35, **{**changed, "entropy": entropy})) is Health.TRIPPED) == trips


@pytest.mark.parametrize("gap", [10, 20])
@pytest.mark.parametrize("then", [level(30.0), growing(0.4, 40)])
def test_few_points_of_many_steps_each_do_as_well(gap: int, then: Metric) -> None:
    found = trip(run(900, gap, kl=after(ONSET, level(0.08, 0.05), then)))
    assert found.onset_step is not None
    assert ONSET - 8 * gap <= found.onset_step <= ONSET


def test_users_limit_counts_from_start_and_holds_for_plateau() -> None:
    plateau = run(1200, kl=lambda step: 2.0 + 0.9 * (1 - math.exp(-step / 300)))
    assert verdicts(plateau, 1.0)[-1].health is Health.HEALTHY
    found = trip(plateau, 0.7)
    assert found.evidence == ("KL 2.71, above its initial value of 2.01 by more than the limit of 0.7",)
    assert found.onset_step is not None
    assert found.onset_step < 100  # it never was calm: where the KL was above a quarter of what it may
    spiked = run(kl=lambda step: 90.0 if step % 9 in (1, 2) else 0.05)
    assert verdicts(spiked, 0.5)[-1].health is Health.HEALTHY


def test_confirming_signal_makes_it_trip_sooner() -> None:
    ramp = growing(0.08, 12)
    alone, fallen = trip(run(kl=ramp)), after(ONSET + 10, always(0.6), always(0.02))
    one = trip(run(kl=ramp, reward=fallen))
    two = trip(run(kl=ramp, reward=fallen, grad_norm=after(ONSET + 10, level(0.4), level(9.0))))
    assert alone.tripped_step is not None
    assert one.tripped_step is not None
    assert two.tripped_step is not None
    assert two.tripped_step < one.tripped_step < alone.tripped_step
    assert [len(found.evidence) for found in (alone, one)] == [1, 3]  # the last is the hint at harder tasks


@pytest.mark.parametrize(
    "off", [{"reward": LOST}, {"kl": after(ONSET, level(0.01), level(0.6))}], ids=["reward", "KL"]
)
def test_single_signal_is_watched_with_its_onset(off: dict[str, Metric]) -> None:
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


def test_intermittent_signal_is_watched_as_one() -> None:
    found = verdicts(run(250, kl=lambda step: 0.6 if step > ONSET and step % 14 < 10 else 0.01))
    watched = [verdict for verdict in found if verdict.health is Health.WATCH]
    assert [verdict.step for verdict in watched] == [*range(watched[0].step, 251)]
    onsets = [verdict.onset_step or 0 for verdict in watched]
    assert ONSET - 20 <= onsets[-1] <= onsets[0] <= ONSET + 1


def test_onset_is_that_of_the_first_signal_when_two_overlap() -> None:
    kl = after(235, level(0.01), level(0.6))
    found = verdicts(run(reward=between(200, 240, always(0.6), always(0.02)), kl=kl))
    assert any(sentence.startswith("KL 0.") for sentence in found[-1].evidence)
    assert (found[-1].onset_step or 0) <= ONSET


def test_learning_is_no_part_of_the_onset() -> None:
    """The KL that rose with the reward, and all that left its past at the first step."""
    ramp: Metric = lambda step: 1e-4 * step**2  # noqa: E731
    slid = run(kl=ramp, reward=lambda step: learnt(step) - 0.35 * min(1.0, max(0, step - 80) / 60))
    assert 20 <= (trip(slid).onset_step or 0) <= 80
    gone = after(100, lambda step: min(0.9, 0.1 + step / 75), always(0.05))
    broken = run(200, 1, reward=gone, loss=lambda step: 0.01 if step < 130 else math.nan)
    assert 60 <= (trip(broken).onset_step or 0) <= 130


def test_witness_that_dips_while_a_form_is_learnt_is_watched() -> None:
    dips = between(ONSET + 1, ONSET + 15, RIGHT, WRONG)
    found = {verdict.health for verdict in verdicts(run(reward=RISES, witness__right=dips))}
    assert found == {Health.HEALTHY, Health.WATCH}


def test_tricked_reward_is_reported_with_its_witness() -> None:
    found = trip(run(reward=RISES, witness__right=after(ONSET, RIGHT, WRONG)))
    assert ONSET + 20 <= (found.tripped_step or 0) <= ONSET + 40
    assert ONSET - 10 <= (found.onset_step or 0) <= ONSET
    assert found.evidence[0].startswith("witness/right 0.1")
    assert "while the reward rose" in found.evidence[0]


def test_trip_stays_after_any_later_data() -> None:
    points = run(kl=between(ONSET, 230, level(0.08), level(50.0)))
    found = trip(points)
    assert found.step == STEPS
    assert replace(found, step=0) == replace(verdicts(points[:260])[-1], step=0)


def test_earlier_step_is_ignored() -> None:
    detector = follow(Detector(), Point(5, {"kl": 0.1}))
    assert follow(detector, Point(5, {"kl": None})) is detector
    assert follow(detector, Point(4, {"kl": 9.0})) is detector


def test_evidence_has_the_numbers() -> None:
    cut = after(ONSET, always(0.02), always(0.95))
    found = trip(
        run(
            kl=after(ONSET, always(0.05), always(2.0)),
            reward=after(ONSET, always(0.6), always(0.1)),
            entropy=after(ONSET, always(0.6), always(0.06)),
            completions__clipped_ratio=cut,
            frac_reward_zero_std=cut,
        )
    )
    for told in (
        r"KL 2, 3\d times its calm level of 0\.05\d at step 20\d",
        r"reward 0\.\d+, fallen from 0\.\d+ since step 2\d\d",
        r"95% of the completions are cut, \d+% or less at step 20\d",
        r"entropy 0\.06, 1/\d\.\d of its calm level of 0\.\d+ at step 20\d",
    ):
        assert any(re.match(told, one) for one in found.evidence), (told, found.evidence)
    gone = trip(run(kl=NULLS, grad_norm=None))
    assert gone.evidence == ("kl was not finite for 4 points in a row",)
    assert gone.onset_step == ONSET - 1  # the last point with a value may hold some that were none


def test_ten_thousand_points_are_remembered_in_a_few_kilobytes() -> None:
    detector = Detector()
    for point in run(10_000):
        detector = follow(detector, point)
    assert detector.verdict == Verdict(step=10_000)
    assert len(to_json(detector)) < 12_000


@pytest.mark.parametrize(("watched_since", "onset_step"), [(None, 7), (5, 5), (9, 7)])
def test_trip_without_a_telling_point_dates_from_first_step(watched_since: int | None, onset_step: int) -> None:
    before = Verdict() if watched_since is None else Verdict(Health.WATCH, 9, watched_since)
    tripped = trip_at(Detector(before, 10), 12, 7, "gone")
    assert tripped.verdict == Verdict(Health.TRIPPED, 12, onset_step, 12, ("gone",))
    assert trip_at(tripped, 13, 13, "again") == tripped
    assert follow(tripped, Point(13, {"kl": 0.1})).verdict.health is Health.TRIPPED


def test_declared_task_changes_do_not_trip() -> None:
    """A curriculum: the first task is learnt, and the next one is too hard for a long time."""
    points = run(300, 1, reward=lambda step: min(0.8, 0.1 + step / 100) if step <= 100 else 0.1)
    assert trip(points).evidence[-1] == TASK_HINT
    detector = Detector()
    for point in points:
        detector = follow(detector, point, None, (101,))
    assert detector.verdict.health is Health.HEALTHY


@given(st.floats(-5.0, 5.0), st.floats(0.1, 20.0))
@settings(max_examples=10, deadline=None)
def test_zero_and_unit_of_the_reward_change_nothing(shift: float, unit: float) -> None:
    fallen, kl = after(ONSET, reward(0.6), reward(0.05)), after(ONSET, level(0.05), level(0.6))
    told = [verdicts(run(kl=kl, reward=fallen))[-1]]
    told += [verdicts(run(kl=kl, reward=lambda step: shift + unit * (fallen(step) or 0.0)))[-1]]
    assert len({(one.health, one.tripped_step, one.onset_step) for one in told}) == 1
