"""Silence limits against generated traffic: honest silence never trips them, a stop at any moment does.

An engine works in steps. Each gives one event to every request that it has; what the steps last is the traffic.
The limits are held against each request by itself, which is stricter than against the member.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_orch.policies.serving.silence_limits import FIRST_TOKEN_FLOOR_S, LIMIT_MAX_S, NEXT_FLOOR_S, SilenceLimits

SWEEP_S = 0.25
MOST_REQUESTS = 16
WARM_S = 150.0  # of traffic, until the limits of the start have faded
StepS = Callable[[float], float]  # what the step lasts that begins at that time


@dataclass(slots=True)
class Request:
    prompt_tokens: int
    left: int
    last_s: float
    begun: bool = False

    def event(self, now_s: float, limits: SilenceLimits) -> None:
        if self.begun:
            limits.record_gap(now_s - self.last_s)
        else:
            limits.record_first_token(now_s - self.last_s, self.prompt_tokens)
        self.begun, self.last_s, self.left = True, now_s, self.left - 1

    def limit_s(self, limits: SilenceLimits) -> float:
        return limits.hard_s if self.begun else limits.first_token_s(self.prompt_tokens)


def given_up(
    step_s: StepS, until_s: float, stop_s: float = math.inf, limits: SilenceLimits | None = None
) -> list[float]:
    """Return when a limit was tripped; it is sent a request each second and stops for good at `stop_s`."""
    limits = limits or SilenceLimits()
    waiting, running, trips = list[Request](), list[Request](), list[float]()
    step_ends_s = step_s(0.0)
    for sweep in range(int(until_s / SWEEP_S)):
        now_s = sweep * SWEEP_S
        if sweep % 4 == 0 and len(waiting) + len(running) < MOST_REQUESTS:
            waiting.append(Request(200, 20 + 7 * sweep % 90, now_s))
        while step_ends_s <= now_s and step_ends_s < stop_s:
            for one in running:
                one.event(step_ends_s, limits)
            running = [one for one in running if one.left] + waiting
            waiting = []
            step_ends_s += step_s(step_ends_s)
        if waiting or running:
            limits.age(SWEEP_S)
        for one in waiting + running:
            if now_s - one.last_s > one.limit_s(limits):
                limits.record_gap(now_s - one.last_s)
                one.last_s = now_s
                trips.append(now_s)
    return trips


def stalls(seed: int, base_s: float, least_s: float, most_s: float, share: float) -> StepS:
    """Steps of `base_s`; now and then one of `least_s` to `most_s`, as when others' prompts are computed."""
    drawn = random.Random(seed)
    return lambda _: drawn.uniform(least_s, most_s) if drawn.random() < share else base_s


def growing(now_s: float) -> float:
    """Twice as slow each minute, up to 40 s a step."""
    return min(40.0, 0.1 * 2 ** (now_s / 60))


def cold(now_s: float) -> float:
    """Kernels are compiled for the first prompt and for the first token after it."""
    return 25.0 if now_s < 50.0 else 0.1


TRAFFIC = {
    "steady": lambda _: 0.1,
    "bursty": stalls(1, 0.05, 0.5, 3.0, 0.05),
    "prefill stalls": stalls(2, 0.1, 2.0, 5.0, 0.1),
    "10 times slower than the rest": stalls(3, 1.0, 8.0, 12.0, 0.05),
    "growing load": growing,
    "cold start": cold,
}


@pytest.mark.parametrize("step_s", TRAFFIC.values(), ids=TRAFFIC)
def test_slow_is_not_dead(step_s: StepS) -> None:
    assert given_up(step_s, 900.0) == []


@given(st.lists(st.tuples(st.floats(1.0, 60.0), st.floats(0.1, NEXT_FLOOR_S)), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_no_stall_below_the_floor_trips_after_any_past(phases: list[tuple[float, float]]) -> None:
    ends_s, end_s = [], 0.0
    for lasts_s, step in phases:
        end_s += lasts_s
        ends_s.append((end_s, step))
    assert given_up(lambda now_s: next((step for end, step in ends_s if now_s < end), 0.1), end_s) == []


def test_new_weights_may_delay_the_first_request_later_on() -> None:
    limits = SilenceLimits()
    assert given_up(TRAFFIC["steady"], 600.0, limits=limits) == []
    assert given_up(lambda now_s: 25.0 if now_s < 25.0 else 0.1, 100.0, limits=limits) == []


@pytest.mark.parametrize(
    ("name", "within_s"),
    [("steady", 15.0), ("bursty", 15.0), ("prefill stalls", 15.0), ("10 times slower than the rest", 36.0)],
)
@given(stop_s=st.floats(WARM_S, 2 * WARM_S))
@settings(max_examples=10, deadline=None)
def test_a_stop_is_noticed(name: str, within_s: float, stop_s: float) -> None:
    trips = given_up(TRAFFIC[name], stop_s + within_s + 2 * SWEEP_S, stop_s)
    assert trips
    assert trips[0] > stop_s


@given(stop_s=st.floats(0.0, WARM_S))
@settings(max_examples=20, deadline=None)
def test_a_stop_soon_after_the_start_is_noticed_too(stop_s: float) -> None:
    trips = given_up(TRAFFIC["steady"], stop_s + 125.0, stop_s)
    assert stop_s < trips[0] < stop_s + (62.0 if stop_s > 5.0 else 125.0)


def test_slow_member_is_abandoned_once_and_not_forever() -> None:
    trips = given_up(lambda now_s: 0.1 if now_s < WARM_S else 40.0, 3000.0)
    assert trips
    assert trips[-1] < WARM_S + 40.0


def test_long_wait_is_remembered_and_fades_with_events() -> None:
    limits = SilenceLimits()
    limits.record_gap(40.0)
    assert limits.hard_s == 120.0
    for _ in range(240):
        limits.age(SWEEP_S)
        limits.record_gap(0.1)
    assert limits.hard_s == pytest.approx(60.0)


@pytest.mark.parametrize("event", [lambda one: one.record_gap(0.1), lambda one: one.record_first_token(0.1, 0)])
def test_no_limit_falls_during_the_silence_it_judges(event: Callable[[SilenceLimits], None]) -> None:
    limits = SilenceLimits()
    limits.age(60.0)
    limits.age(60.0)
    assert (limits.first_token_s(0), limits.hard_s) == (120.0, 60.0)
    event(limits)
    assert (limits.first_token_s(0), limits.hard_s) == (FIRST_TOKEN_FLOOR_S, NEXT_FLOOR_S)


def test_long_prompt_is_granted_time_and_explains_a_wait() -> None:
    limits = SilenceLimits()
    assert limits.first_token_s(20_000) == 220.0
    limits.record_first_token(140.0, 20_000)
    assert limits.first_token_s(0) == 120.0
    limits.record_first_token(60.0, 2_000)
    assert limits.first_token_s(0) == 150.0


def test_stall_of_tokens_is_a_stall_of_first_tokens() -> None:
    limits = SilenceLimits()
    limits.record_gap(60.0)
    assert limits.first_token_s(200) == 181.0


@given(
    st.lists(st.tuples(st.floats(0.0, 1e6), st.integers(0, 10**6), st.floats(0.0, 1e6), st.floats(0.0, 100.0))),
    st.integers(0, 10**6),
)
@settings(deadline=None)
def test_the_limits_stay_within_their_bounds(
    seen: list[tuple[float, int, float, float]], prompt_tokens: int
) -> None:
    limits = SilenceLimits()
    for after_s, tokens, gap_s, elapsed_s in seen:
        limits.record_first_token(after_s, tokens)
        limits.record_gap(gap_s)
        limits.age(elapsed_s)
    assert NEXT_FLOOR_S <= limits.hard_s <= LIMIT_MAX_S
    assert FIRST_TOKEN_FLOOR_S <= limits.first_token_s(0) <= LIMIT_MAX_S
    assert limits.first_token_s(prompt_tokens) >= limits.first_token_s(0)
