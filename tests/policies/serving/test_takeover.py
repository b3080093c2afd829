"""Which requests idle members take over: single cases, and any batch against a plain model."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from policies.serving.takeover import SAVED_S, TIMES_SOONER, Idle, Move, Running, take_over

SLOW = Running(1, "slow", prompt_tokens=100, arrived=100, rate_tokens_s=5.0)  # 20 s to go when 200 are expected
FAST = Idle("fast", free=1, rate_tokens_s=50.0, prefill_tokens_s=1000.0)
AT_ONCE = Idle("fast", free=1, rate_tokens_s=1e6, prefill_tokens_s=1e6)


def moves(running: Running, idle: Idle, expected_tokens: float = 200.0, max_tokens: int = 1000) -> bool:
    return bool(take_over([running], [idle], expected_tokens, max_tokens=max_tokens))


def test_a_request_moves_when_it_is_done_in_half_the_time() -> None:
    assert take_over([SLOW], [FAST], 200.0, max_tokens=1000) == [Move(1, "fast")]
    assert moves(SLOW, replace(FAST, rate_tokens_s=10.3))  # 20 s; 9.7 s and 0.2 s of replay
    assert not moves(SLOW, replace(FAST, rate_tokens_s=10.1))


def test_what_is_replayed_counts() -> None:
    assert moves(SLOW, replace(FAST, prefill_tokens_s=26.0))  # 2 s, and 7.7 s for prompt and tokens
    assert not moves(SLOW, replace(FAST, prefill_tokens_s=24.0))
    assert not moves(replace(SLOW, prompt_tokens=300), replace(FAST, prefill_tokens_s=26.0))


def test_less_than_a_second_is_not_worth_a_move() -> None:
    assert moves(replace(SLOW, rate_tokens_s=99.0), AT_ONCE)
    assert not moves(replace(SLOW, rate_tokens_s=100.0), AT_ONCE)


def test_one_that_stalls_moves_to_any_that_does_not() -> None:
    stalled = replace(SLOW, rate_tokens_s=0.0)
    assert moves(stalled, replace(FAST, rate_tokens_s=0.1))
    assert not moves(stalled, replace(FAST, rate_tokens_s=0.0))
    assert not moves(stalled, replace(FAST, prefill_tokens_s=0.0))
    assert not moves(stalled, replace(FAST, node="slow"))


def test_one_that_outlives_the_expectation_has_half_of_it_to_come() -> None:
    assert moves(replace(SLOW, arrived=500, rate_tokens_s=99.0), AT_ONCE)
    assert not moves(replace(SLOW, arrived=500, rate_tokens_s=100.0), AT_ONCE)


def test_no_more_is_to_come_than_it_may_have() -> None:
    assert moves(SLOW, AT_ONCE, max_tokens=106)
    assert not moves(SLOW, AT_ONCE, max_tokens=105)
    assert not moves(replace(SLOW, rate_tokens_s=0.0), AT_ONCE, max_tokens=100)


def test_the_worst_goes_first_and_no_more_than_there_is_room() -> None:
    running = [replace(SLOW, request=request, rate_tokens_s=rate) for request, rate in enumerate((4.0, 2.0, 3.0))]
    idle = replace(FAST, free=2)
    assert take_over(running, [idle], 200.0, max_tokens=1000) == [Move(1, "fast"), Move(2, "fast")]
    assert take_over(running, [replace(FAST, free=0)], 200.0, max_tokens=1000) == []


def test_the_worst_may_have_nowhere_to_go_when_others_have() -> None:
    running = [replace(SLOW, node="fast", rate_tokens_s=1.0), replace(SLOW, request=2)]
    assert take_over(running, [FAST], 200.0, max_tokens=1000) == [Move(2, "fast")]


def test_of_equal_members_the_first_by_name_is_taken() -> None:
    for idle in ([FAST, replace(FAST, node="b")], [replace(FAST, node="b"), FAST]):
        assert take_over([SLOW], idle, 200.0, max_tokens=1000) == [Move(1, "b")]


def test_replays_on_one_member_wait_for_each_other() -> None:
    """A replay takes 2 s, so that the second request is done sooner on the member that decodes more slowly."""
    running = [replace(SLOW, request=request, rate_tokens_s=1.0) for request in (1, 2)]
    first = Idle("a", free=2, rate_tokens_s=50.0, prefill_tokens_s=100.0)
    second = replace(first, node="b", rate_tokens_s=40.0)
    assert take_over(running, [first, second], 200.0, max_tokens=1000) == [Move(1, "a"), Move(2, "b")]


NODES = "abcdef"
rates = st.sampled_from((0.0, 0.5, 5.0, 50.0, 500.0))
tokens = st.integers(0, 5000)
batches = st.lists(
    st.builds(Running, st.integers(0, 99), st.sampled_from(NODES), tokens, tokens, rates),
    max_size=20,
    unique_by=lambda one: one.request,
)
members = st.lists(
    st.builds(Idle, st.sampled_from(NODES), st.integers(0, 4), rates, rates.map(lambda rate: 100 * rate)),
    max_size=5,
    unique_by=lambda one: one.node,
)
lengths = st.tuples(st.floats(1.0, 5000.0), st.integers(1, 5000))


class Model:
    """When each request is done where it is, and on an idle member that replays one after another."""

    def __init__(self, running: list[Running], idle: list[Idle], expected_tokens: float, max_tokens: int) -> None:
        self.running = {one.request: one for one in running}
        self.idle = {one.node: one for one in idle}
        self.free = {one.node: one.free for one in idle}
        self.busy_s = dict.fromkeys(self.free, 0.0)  # with replays
        self.left = {one.request: self.tokens_left(one.arrived, expected_tokens, max_tokens) for one in running}

    def stays_s(self, request: int) -> float:
        return self.lasts_s(self.left[request], self.running[request].rate_tokens_s)

    def replayed_s(self, request: int, node: str) -> float:
        one = self.running[request]
        return self.busy_s[node] + self.lasts_s(one.prompt_tokens + one.arrived, self.idle[node].prefill_tokens_s)

    def there_s(self, request: int, node: str) -> float:
        return self.replayed_s(request, node) + self.lasts_s(self.left[request], self.idle[node].rate_tokens_s)

    @staticmethod
    def tokens_left(arrived: int, expected_tokens: float, max_tokens: int) -> float:
        long = arrived > expected_tokens / 2
        return max(0.0, min(expected_tokens / 2 if long else expected_tokens - arrived, max_tokens - arrived))

    @staticmethod
    def lasts_s(tokens: float, rate: float) -> float:
        return 0.0 if tokens == 0 else math.inf if rate == 0 else tokens / rate


@given(batches, members, lengths)
def test_every_request_that_moves_is_done_clearly_sooner(
    running: list[Running], idle: list[Idle], length: tuple[float, int]
) -> None:
    model = Model(running, idle, *length)
    found = take_over(running, idle, length[0], max_tokens=length[1])
    for move in found:
        stays_s, there_s = model.stays_s(move.request), model.there_s(move.request, move.node)
        assert there_s * (TIMES_SOONER - 1e-9) <= stays_s
        assert there_s + SAVED_S - 1e-9 < stays_s
        model.busy_s[move.node] = model.replayed_s(move.request, move.node)


@given(batches, members, lengths)
def test_bounds_are_kept(running: list[Running], idle: list[Idle], length: tuple[float, int]) -> None:
    model = Model(running, idle, *length)
    found = take_over(running, idle, length[0], max_tokens=length[1])
    assert len({move.request for move in found}) == len(found)
    for node, count in Counter(move.node for move in found).items():
        assert count <= model.idle[node].free
    assert all(model.running[move.request].node != move.node for move in found)
    stay_s = [model.stays_s(move.request) for move in found]
    assert stay_s == sorted(stay_s, reverse=True)


@given(batches, members, lengths)
def test_nobody_is_left_who_would_gain(
    running: list[Running], idle: list[Idle], length: tuple[float, int]
) -> None:
    model = Model(running, idle, *length)
    for move in take_over(running, idle, length[0], max_tokens=length[1]):
        model.busy_s[move.node] = model.replayed_s(move.request, move.node)
        model.free[move.node] -= 1
        del model.running[move.request]
    for one in model.running.values():
        for node in (node for node, free in model.free.items() if free and node != one.node):
            stays_s, there_s = model.stays_s(one.request), model.there_s(one.request, node)
            assert stays_s <= TIMES_SOONER * there_s * (1 + 1e-9) or stays_s - there_s <= SAVED_S + 1e-9


@given(batches, members, lengths, st.randoms(use_true_random=False))
def test_the_order_of_the_question_does_not_matter(
    running: list[Running], idle: list[Idle], length: tuple[float, int], order: random.Random
) -> None:
    found = take_over(running, idle, length[0], max_tokens=length[1])
    order.shuffle(running)
    order.shuffle(idle)
    assert take_over(running, idle, length[0], max_tokens=length[1]) == found
