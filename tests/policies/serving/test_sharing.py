"""How requests at work are divided anew: single cases, and any state of the members."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_orch.policies.serving.membership import REPLAY_TOKENS_MAX
from grpo_orch.policies.serving.sharing import (
    DOUBLING_REQUESTS,
    MemberLoad,
    Movable,
    balance_requests,
    tokens_left,
)

FREE = 1000


def sharer(
    node: str,
    running: int,
    *,
    left: float = 300.0,
    speed: float = 50.0,
    free: int = FREE,
    replay: int = 0,
    replaying: int = 0,
    first: int = 0,
) -> MemberLoad:
    """A member whose requests, numbered from `first`, may all move."""
    requests = [Movable(first + n, left, replay) for n in range(running)]
    return MemberLoad(node, speed, running, left * running, free, 10_000.0, replaying, requests)


def divided(sharers: Sequence[MemberLoad], *, begun: bool = False) -> Counter[str]:
    """How many requests each has after the moves."""
    at = {request.request: one.node for one in sharers for request in one.movable}
    assert len(at) == sum(one.running for one in sharers)
    for move in balance_requests(sharers, is_rebalancing=begun) or ():
        at[move.request] = move.node
    return Counter(at.values())


def test_late_member_takes_an_even_share() -> None:
    assert divided([sharer("a", 128), sharer("b", 0)]) == {"a": 64, "b": 64}
    several = [sharer("a", 100), sharer("b", 100, first=100), sharer("c", 0), sharer("d", 0)]
    assert divided(several) == {"a": 50, "b": 50, "c": 50, "d": 50}


def test_remaining_tokens_count_and_not_requests() -> None:
    """a: 128 with half of them left to make; b: 30 that have just begun."""
    assert 30 <= divided([sharer("a", 128, left=150.0), sharer("b", 30, first=128)])["b"] <= 48


def test_slow_member_gets_what_it_can_do_in_the_same_time() -> None:
    after = divided([sharer("fast", 128), sharer("slow", 0, speed=25.0)])
    ends = [after[node] / DOUBLING_REQUESTS + 1 for node in ("fast", "slow")]
    assert abs(ends[0] - 2 * ends[1]) < 0.1
    assert divided([sharer("fast", 8), sharer("slow", 0, speed=5.0)]) == {"fast": 8}


def test_few_requests_gain_nothing_from_company() -> None:
    assert balance_requests([sharer("a", 4), sharer("b", 0)]) is None


def test_a_moment_is_not_worth_a_move() -> None:
    assert balance_requests([sharer("a", 128, left=14.0), sharer("b", 0)]) is None
    assert balance_requests([sharer("a", 128, left=16.0), sharer("b", 0)])


def test_measurement_noise_does_not_separate_similar_members() -> None:
    assert balance_requests([sharer("a", 64), sharer("b", 64, speed=58.0, first=64)]) is None
    assert balance_requests([sharer("a", 64), sharer("b", 64, speed=90.0, first=64)])


def test_sharing_starts_at_a_twentieth_and_ends_when_even() -> None:
    nearly = [sharer("a", 70, left=3000.0), sharer("b", 58, left=3000.0, first=70)]
    assert balance_requests(nearly) is None
    assert divided(nearly, begun=True) == {"a": 64, "b": 64}


def test_no_more_move_than_there_is_room_for() -> None:
    assert divided([sharer("a", 128), sharer("b", 0, free=8)]) == {"a": 120, "b": 8}


def test_recomputed_requests_move_a_few_at_a_time() -> None:
    replay = REPLAY_TOKENS_MAX // 4
    assert divided([sharer("a", 128, replay=replay), sharer("b", 0)]) == {"a": 124, "b": 4}
    assert divided([sharer("a", 128, replay=replay), sharer("b", 0, replaying=replay)]) == {"a": 125, "b": 3}
    assert divided([sharer("a", 128, replay=3 * REPLAY_TOKENS_MAX), sharer("b", 0)]) == {"a": 127, "b": 1}


def test_computing_it_again_may_cost_more_than_it_saves() -> None:
    assert not balance_requests([sharer("a", 128, left=60.0, replay=60_000), sharer("b", 0)])


def left_of_each(fleet: list[MemberLoad]) -> float:
    return max(one.tokens_left / max(1, one.running) for one in fleet)


@st.composite
def fleets(draw: st.DrawFn) -> list[MemberLoad]:
    """Members whose requests have equally much left, so that the end of each is plain."""
    left, found, first = draw(st.sampled_from((50.0, 400.0, 3000.0))), list[MemberLoad](), 0
    for node in "abcd"[: draw(st.integers(1, 4))]:
        running = draw(st.integers(0, 150))
        speed, free = draw(st.sampled_from((10.0, 25.0, 50.0))), draw(st.sampled_from((0, 5, 300)))
        found.append(sharer(node, running, left=left, speed=speed, free=free, first=first))
        first += running
    return found


@given(fleets(), st.booleans())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_last_job_is_never_later_and_giver_is_not_idle(fleet: list[MemberLoad], begun: bool) -> None:
    moves = balance_requests(fleet, is_rebalancing=begun) or []
    assert len({move.request for move in moves}) == len(moves)
    after = divided(fleet, begun=begun)
    left = left_of_each(fleet)
    running = {one.node: one.running for one in fleet}
    before_s, after_s = (
        [left * (1 + at[one.node] / DOUBLING_REQUESTS) / one.speed_tokens_s for one in fleet if at[one.node]]
        for at in (running, after)
    )
    assert max(after_s, default=0.0) <= max(before_s, default=0.0) + 1e-9
    for one in fleet:
        assert after[one.node] <= one.running + one.free
    # Nobody who has room could take one more from the last to be done, and be done before it.
    if moves and not begun:
        last_s = max(after_s)
        for one in fleet:
            if after[one.node] < one.running + one.free:
                with_one_s = left * (1 + (after[one.node] + 1) / DOUBLING_REQUESTS) / one.speed_tokens_s
                assert with_one_s >= last_s - 1e-9


@given(fleets())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_even_division_stays(fleet: list[MemberLoad]) -> None:
    after, first, again, left = divided(fleet), 0, [], left_of_each(fleet)
    for one in fleet:
        running = after[one.node]
        free = one.free + one.running - running
        again.append(sharer(one.node, running, left=left, speed=one.speed_tokens_s, free=free, first=first))
        first += running
    if balance_requests(fleet):
        assert not balance_requests(again)


def test_tokens_left_of_a_request_longer_than_expected() -> None:
    assert tokens_left(100, 200.0, 1000) == 100
    assert tokens_left(150, 200.0, 1000) == 100, "half of the expectation, at least"
    assert tokens_left(500, 200.0, 1000) == 100
    assert tokens_left(950, 200.0, 1000) == 50, "no more than its limit"
