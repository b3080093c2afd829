"""Kinds of runs that are easily taken for another."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.detect.divergence import Health, Point
from tests.policies.detect.test_divergence import FALLEN, ONSET, STEPS, Metric, after, level, run, trip, verdicts


def reward(value: float, gain: float = 0.0, sigma: float = 0.05) -> Metric:
    """Noise around a level, which is higher by `gain` from 20 steps after the onset on."""
    return lambda step: (
        value + gain * min(1.0, max(0, step - ONSET) / 20) + random.Random(f"r{step}").gauss(0.0, sigma)
    )


def ends(points: list[Point]) -> Health:
    return verdicts(points)[-1].health


@pytest.mark.parametrize(("gain", "trips"), [(0.03, True), (0.6, False)], ids=["within its wobble", "sure"])
def test_only_a_sure_gain_pays(gain: float, trips: bool) -> None:
    kl = after(ONSET, level(0.05, 0.05), lambda step: 0.05 + 2.2 * min(1.0, (step - ONSET) / 20))
    assert (ends(run(kl=kl, reward=reward(0.3, gain))) is Health.TRIPPED) == trips


def test_no_gain_is_worth_twenty_nats() -> None:
    assert ends(run(kl=after(ONSET, level(0.05), level(25.0)), reward=reward(0.0, 1.0, 1e-4))) is Health.TRIPPED


def test_an_adapter_begins_at_nothing_and_may_go_to_what_is_usual() -> None:
    kl = after(60, level(0.0005), lambda step: 0.6 * min(1.0, (step - 60) / 40) + 0.0005)
    assert Health.TRIPPED not in {verdict.health for verdict in verdicts(run(kl=kl, reward=reward(0.3)))}
    dips = run(kl=kl, reward=lambda step: 0.1 if 250 <= step < 280 else reward(0.6)(step))
    assert Health.TRIPPED not in {verdict.health for verdict in verdicts(dips)}  # the KL is its past by then


@pytest.mark.parametrize("gap", [1, 10])
def test_a_reward_that_stays_down_with_a_kl_that_is_small_but_tenfold(gap: int) -> None:
    onset = ONSET * gap
    points = run(
        ONSET * gap + 60 * gap,
        gap,
        kl=after(onset, level(0.004), level(0.04)),
        reward=after(onset, lambda _: 0.6, FALLEN),
    )
    found = trip(points)
    assert onset < (found.tripped_step or 0) <= onset + 30 * gap
    assert onset - 20 * gap <= (found.onset_step or 0) <= onset


def test_a_reward_that_loses_all_for_good_needs_nothing_beside_it() -> None:
    lost = run(reward=lambda step: learnt(step if step <= ONSET else 0))
    assert ONSET + 50 <= (trip(lost).tripped_step or 0) <= ONSET + 100


def test_a_harder_task_that_is_learnt_is_left_alone() -> None:
    harder = run(reward=lambda step: learnt(step if step <= ONSET else (step - ONSET)))
    assert ends(harder) is not Health.TRIPPED


@pytest.mark.parametrize(("entropy", "trips"), [(0.1, False), (0.01, True)], ids=["weak", "strong"])
def test_a_strong_signal_lowers_the_bar_of_the_kl_to_a_ninth(entropy: float, trips: bool) -> None:
    kl = after(ONSET, level(0.05, 0.05), level(0.3, 0.05))
    assert (
        ends(run(kl=kl, entropy=after(ONSET, level(0.6, 0.05), level(entropy, 0.05)))) is Health.TRIPPED
    ) == trips


def test_what_the_kl_did_while_the_reward_was_learnt_is_no_part_of_the_onset() -> None:
    ramp: Metric = lambda step: 1e-4 * step**2  # noqa: E731
    lost = run(kl=ramp, reward=lambda step: learnt(step) - 0.35 * min(1.0, max(0, step - 80) / 60))
    assert 20 <= (trip(lost).onset_step or 0) <= 80


@pytest.mark.parametrize(("regained", "trips"), [(0.25, False), (0.0, True)])
def test_a_reward_that_fell_with_another_signal_and_rises_again(regained: float, trips: bool) -> None:
    def fell(step: int) -> float:
        return learnt(step) if step <= ONSET else learnt(0) + 0.1 + regained * min(1.0, (step - ONSET) / 30)

    rising: Metric = lambda step: 0.2 * 4 ** min(1.0, (step - ONSET) / 10)  # noqa: E731
    other = run(reward=fell, entropy=after(ONSET, level(0.2, 0.05), rising))
    assert (ends(other) is Health.TRIPPED) == trips


@pytest.mark.parametrize(
    ("brings", "trips"),
    [
        ({"entropy": level(1.8, 0.05)}, False),
        ({"completions__mean_length": level(450.0, 0.05)}, False),
        ({}, True),  # a reward that broke
        ({"entropy": level(1.8, 0.05), "kl": level(0.3)}, True),  # the policy is another
        ({"completions__mean_length": level(450.0, 0.05), "completions__clipped_ratio": lambda _: 0.95}, True),
        ({"entropy": level(0.1, 0.05)}, True),
    ],
    ids=["wilder", "longer", "nothing", "and a KL", "and without end", "one answer"],
)
def test_harder_data_bring_other_answers_at_once_and_no_kl(brings: dict[str, Metric], trips: bool) -> None:
    usual: dict[str, Metric] = {"entropy": level(0.6, 0.05), "completions__mean_length": level(220.0, 0.05)}
    usual |= {"kl": level(0.08), "completions__clipped_ratio": lambda _: 0.05}
    changed = {name: after(ONSET, metric, brings.get(name, metric)) for name, metric in usual.items()}
    changed["reward"] = after(ONSET, learnt, reward(0.12, sigma=0.03))
    harder = run(STEPS, 1, **changed)
    assert (ends(harder) is Health.TRIPPED) == trips


@pytest.mark.parametrize(("cut", "trips"), [(0.05, False), (0.95, True)])
def test_no_gain_pays_by_answers_that_grow_without_end(cut: float, trips: bool) -> None:
    kl = after(ONSET, level(0.05, 0.05), lambda step: 0.05 + 1.5 * min(1.0, (step - ONSET) / 20))
    gains = run(
        kl=kl,
        reward=reward(0.3, 0.6),
        completions__clipped_ratio=after(ONSET + 10, lambda _: 0.05, lambda _: cut),
    )
    assert (ends(gains) is Health.TRIPPED) == trips


@pytest.mark.parametrize(("lost", "trips"), [(0.15, False), (0.4, True)])
def test_a_reward_that_keeps_most_of_what_it_gained_has_not_collapsed(lost: float, trips: bool) -> None:
    entropy = after(ONSET, level(0.6, 0.05), level(0.01, 0.05))
    fell = run(kl=None, entropy=entropy, reward=lambda step: learnt(step) - lost * (step > ONSET))
    assert (ends(fell) is Health.TRIPPED) == trips


@pytest.mark.parametrize(("earlier", "trips"), [(40, False), (0, True)])
def test_what_left_its_past_long_before_has_nothing_to_do_with_it(earlier: int, trips: bool) -> None:
    entropy = after(ONSET - earlier, level(0.6, 0.05), level(0.01, 0.05))
    kl = run(ONSET + 35, kl=after(ONSET, level(0.05, 0.05), level(0.3, 0.05)), entropy=entropy)
    assert (ends(kl) is Health.TRIPPED) == trips
    fell = run(ONSET + 35, kl=None, entropy=entropy, reward=lambda step: learnt(step) - 0.35 * (step > ONSET))
    assert (ends(fell) is Health.TRIPPED) == trips


@pytest.mark.parametrize(
    ("name", "calm", "broken"),
    [
        ("grad_norm", 0.4, 40.0),
        ("entropy", 0.6, 0.01),
        ("entropy", 0.1, 4.0),
        ("completions/mean_length", 200.0, 4000.0),
        ("completions/mean_length", 200.0, 5.0),
        ("completions/clipped_ratio", 0.05, 0.97),
        ("frac_reward_zero_std", 0.1, 0.97),
        ("sampling/sampling_logp_difference/mean", 0.01, 2.0),
    ],
)
def test_each_signal_lowers_the_bar_of_the_kl(name: str, calm: float, broken: float) -> None:
    kl = after(ONSET, level(0.05, 0.05), level(0.3, 0.05))
    before: dict[str, Any] = {name.replace("/", "__"): level(calm, 0.02)}
    leaves: dict[str, Any] = {name.replace("/", "__"): after(ONSET, level(calm, 0.02), level(broken, 0.02))}
    assert ends(run(kl=kl, **before)) is not Health.TRIPPED
    assert ends(run(kl=kl, **leaves)) is Health.TRIPPED


def test_gradients_that_explode_need_two_others() -> None:
    grad_norm, entropy = after(ONSET, level(0.4), level(40.0)), after(ONSET, level(0.6, 0.05), level(0.05, 0.05))
    assert ends(run(ONSET + 40, kl=None, grad_norm=grad_norm, entropy=entropy)) is Health.WATCH
    length = after(ONSET, level(220.0, 0.05), level(20.0, 0.05))
    assert (
        ends(run(kl=None, grad_norm=grad_norm, entropy=entropy, completions__mean_length=length)) is Health.TRIPPED
    )


RISES = reward(0.3, 0.5, 0.03)
RIGHT, WRONG = reward(0.4, sigma=0.03), reward(0.05, sigma=0.03)


def test_a_reward_that_is_tricked_shows_in_a_witness() -> None:
    found = trip(run(reward=RISES, witness__right=after(ONSET, RIGHT, WRONG)))
    assert ONSET + 20 <= (found.tripped_step or 0) <= ONSET + 40
    assert ONSET - 10 <= (found.onset_step or 0) <= ONSET
    assert found.evidence[0].startswith("witness/right 0.1")
    assert "while the reward rose" in found.evidence[0]
    assert ends(run(reward=RISES, witness__right=RIGHT)) is Health.HEALTHY


def test_a_witness_that_falls_while_the_reward_does_not_rise_shows_no_trick() -> None:
    assert ends(run(reward=reward(0.3), witness__right=after(ONSET, RIGHT, WRONG))) is Health.HEALTHY


def test_a_witness_that_dips_while_a_form_is_learnt_is_watched() -> None:
    dips = lambda step: (WRONG if ONSET < step <= ONSET + 15 else RIGHT)(step)  # noqa: E731
    found = {verdict.health for verdict in verdicts(run(reward=RISES, witness__right=dips))}
    assert found == {Health.HEALTHY, Health.WATCH}


def test_no_gain_of_a_reward_that_is_tricked_pays() -> None:
    kl = after(ONSET, level(0.05), level(0.6))
    assert ends(run(kl=kl, reward=RISES)) is not Health.TRIPPED
    found = trip(run(kl=kl, reward=RISES, witness__right=after(ONSET, RIGHT, WRONG)))
    assert ONSET < (found.tripped_step or 0) <= ONSET + 15


def learnt(step: int) -> float:
    return 0.2 + 0.5 * min(1.0, step / 100) + random.Random(f"l{step}").gauss(0.0, 0.03)


def all_of(_: int) -> float:
    return 1.0


def test_what_is_born_broken_needs_no_past() -> None:
    assert trip(run(60, kl=level(3000.0))).tripped_step == 7
    assert ends(run(60, kl=level(8.0))) is Health.HEALTHY  # of another reference
    broken = trip(
        run(60, kl=level(8.0), reward=FALLEN, completions__clipped_ratio=all_of, frac_reward_zero_std=all_of)
    )
    assert broken.tripped_step == 7


def test_one_that_never_begins_to_learn() -> None:
    mute = run(100, kl=None, reward=FALLEN, completions__clipped_ratio=all_of, frac_reward_zero_std=all_of)
    assert 40 < (trip(mute).tripped_step or 0) < 100
    begins = after(30, all_of, lambda _: 0.3)
    learns = run(100, kl=None, reward=learnt, completions__clipped_ratio=begins, frac_reward_zero_std=begins)
    assert ends(learns) is not Health.TRIPPED
    mastered = run(100, kl=None, reward=learnt, completions__clipped_ratio=all_of, frac_reward_zero_std=all_of)
    assert ends(mastered) is not Health.TRIPPED


def test_the_onset_is_dated_when_it_trips() -> None:
    weak_sign = after(8, level(0.9, 0.02), level(0.25, 0.02))
    found = verdicts(run(kl=after(ONSET, level(0.08), level(6.0)), entropy=weak_sign))
    assert ONSET - 20 <= (found[-1].onset_step or 0) <= ONSET


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_estimate_with_a_sign(sign: float) -> None:
    calm: Metric = lambda step: random.Random(f"k{step}").gauss(-0.002, 0.004)  # noqa: E731
    assert ends(run(kl=calm)) is Health.HEALTHY
    found = trip(run(kl=after(ONSET, calm, lambda step: sign * min(40.0, 3.0 ** ((step - ONSET) / 4)))))
    assert ONSET < (found.tripped_step or 0) <= ONSET + 15


def test_a_kl_that_is_summed_over_the_sequence_is_judged_by_the_token() -> None:
    length = level(200.0, 0.05)
    assert ends(run(kl=None, kl_sequence=level(25.0), completions__mean_length=length)) is Health.HEALTHY
    runaway = after(ONSET, level(25.0), level(900.0))
    assert ends(run(kl=None, kl_sequence=runaway, completions__mean_length=length)) is Health.TRIPPED
    assert ends(run(kl=None, kl_sequence=runaway, completions__mean_length=None)) is Health.TRIPPED


@given(st.floats(-5.0, 5.0), st.floats(0.1, 20.0))
@settings(max_examples=10, deadline=None)
def test_where_the_reward_has_its_zero_and_its_unit_changes_nothing(shift: float, unit: float) -> None:
    fallen = after(ONSET, reward(0.6), reward(0.05))
    kl = after(ONSET, level(0.05), level(0.6))
    told = [verdicts(run(kl=kl, reward=fallen))[-1]]
    told += [verdicts(run(kl=kl, reward=lambda step: shift + unit * (fallen(step) or 0.0)))[-1]]
    assert len({(one.health, one.tripped_step, one.onset_step) for one in told}) == 1
