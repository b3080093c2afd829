"""How many rollout nodes: the cheapest number for steps as measured, and no fleet that follows every breath."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_orch.policies.costs.steps import (
    ENOUGH,
    HourlyPrices,
    MeasuredStep,
    StepShape,
    best_count,
    optimum,
    shape_of,
    step_usd,
)

H200_AND_SPOT_PAIR = HourlyPrices(other_usd_per_h=3.96, node_usd_per_h=2.38)

seconds = st.floats(0, 1e5)
prices = st.builds(HourlyPrices, st.floats(0.01, 1e3), st.floats(0.01, 1e3))
shapes = st.builds(StepShape, seconds, seconds, st.none() | seconds)
bounds = st.tuples(st.integers(1, 64), st.integers(0, 64)).map(lambda b: (b[0], b[0] + b[1]))


@pytest.mark.parametrize(
    ("b_over_a", "nodes"), [(0.2, 1), (1, 1), (2, 2), (3, 2), (5, 3), (10, 4), (15, 5), (20, 6)]
)
def test_one_h200_trains_and_spot_pairs_generate(b_over_a: float, nodes: int) -> None:
    """By hand: n* = sqrt(1.664 b/a) is .58, 1.29, 1.82, 2.23, 2.88, 4.08, 5.0 and 5.77."""
    assert best_count(StepShape(60, 60 * b_over_a), H200_AND_SPOT_PAIR, 1, 8) == nodes


@pytest.mark.parametrize(("ahead_s", "nodes"), [(0.0, 4), (59.0, 3)])
def test_overlapped_generation_adds_no_useless_nodes(ahead_s: float, nodes: int) -> None:
    """A step is 60 s of training beside 240 node-seconds: 4 nodes make both alike.

    Where one completion is 59 s, 240 do, but from sqrt(1.664 * 240 / 59) = 2.6 on more cost more than they save.
    """
    shape = StepShape(60, 240, ahead_s)
    assert shape.seconds(shape.nodes(60)) == pytest.approx(60)
    assert shape.nodes(59.9) == float("inf")
    assert best_count(shape, H200_AND_SPOT_PAIR, 1, 64) == nodes


def test_step_on_h200_and_spot_pair_costs_both_for_its_time() -> None:
    assert step_usd(StepShape(60, 240), H200_AND_SPOT_PAIR, 2) == pytest.approx((3.96 + 2 * 2.38) * 180 / 3600)


@given(shapes, prices, bounds)
def test_the_best_count_is_the_cheapest_of_all(
    shape: StepShape, prices: HourlyPrices, bounds: tuple[int, int]
) -> None:
    low, high = bounds
    cost = {n: step_usd(shape, prices, n) for n in range(low, high + 1)}
    assert cost[best_count(shape, prices, low, high)] <= min(cost.values()) * (1 + 1e-9)


def test_without_prices_there_is_no_optimum_and_all_are_wanted() -> None:
    unknown = HourlyPrices(0.0, 2.38)
    assert best_count(StepShape(60, 60), unknown, 1, 4) == 4
    with pytest.raises(ValueError, match="prices"):
        optimum(StepShape(60, 60), unknown)


def test_no_generation_takes_fewest_nodes_and_only_it_the_most() -> None:
    assert best_count(StepShape(60, 0), H200_AND_SPOT_PAIR, 1, 4) == 1
    assert best_count(StepShape(0, 60), H200_AND_SPOT_PAIR, 1, 4) == 4
    assert best_count(StepShape(60, 60), H200_AND_SPOT_PAIR, 0, 4) == 1


def made(nodes: int, tail_s: float = 0.0, shared: float = 240.0, tokens: float = 1e5) -> MeasuredStep:
    """A step of 60 s of training and, for 100,000 tokens, `shared` node-seconds and a tail of generation."""
    generated_s = (tail_s + shared / nodes) * tokens / 1e5
    return MeasuredStep(60 + generated_s, generated_s, nodes, tokens)


def test_nothing_is_concluded_from_one_or_two_steps() -> None:
    assert shape_of([made(4)] * (ENOUGH - 1)) is None


def test_with_one_size_of_fleet_all_generation_is_shared() -> None:
    shape = shape_of([made(4, tail_s=30)] * 5)
    assert shape is not None
    assert [shape.fixed_s, shape.generation_node_s] == pytest.approx([60, 4 * 90])


def test_tail_and_shared_generation_are_separated_by_sizes() -> None:
    shape = shape_of([*[made(4, tail_s=30)] * 5, *[made(2, tail_s=30)] * 5])
    assert shape is not None
    assert [shape.fixed_s, shape.generation_node_s] == pytest.approx([90, 240])


def test_growing_completions_do_not_make_nodes_look_slow() -> None:
    shape = shape_of([*[made(4, tail_s=30)] * 30, *[made(2, tail_s=30, tokens=3e5)] * 20])
    assert shape is not None
    assert [shape.fixed_s, shape.generation_node_s] == pytest.approx([60 + 3 * 30, 3 * 240])


@pytest.mark.parametrize("slower", [made(4, shared=960), made(4, tail_s=180)])
def test_neither_part_is_ever_negative(slower: MeasuredStep) -> None:
    """More nodes that were slower, as where the larger fleet was of worse machines; all of it then is the tail."""
    shape = shape_of([*[made(2)] * 5, *[slower] * 5])
    assert shape is not None
    assert shape.fixed_s >= 60
    assert shape.generation_node_s == 0 or shape == StepShape(60, shape.generation_node_s)


def test_one_stalled_step_in_ten_changes_nothing() -> None:
    still = MeasuredStep(3720, 60, 4, 1e5)
    assert shape_of([*[made(4)] * 9, still] * 2) == shape_of([made(4)] * 20)
