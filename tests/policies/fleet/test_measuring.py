"""What a step consists of, told from steps whose parts are known."""

from __future__ import annotations

import pytest

from policies.fleet.how_many import StepShape
from policies.fleet.measuring import ENOUGH, MeasuredStep, shape_of


def made(nodes: int, tail_s: float = 0.0, shared: float = 240.0, tokens: float = 1e5) -> MeasuredStep:
    """A step of 60 s of training and, for 100,000 tokens, `shared` node-seconds and a tail of generation."""
    generated_s = (tail_s + shared / nodes) * tokens / 1e5
    return MeasuredStep(60 + generated_s, generated_s, nodes, tokens)


def test_nothing_is_told_from_a_step_or_two() -> None:
    assert shape_of([made(4)] * (ENOUGH - 1)) is None


def test_with_one_size_of_fleet_all_generation_is_shared() -> None:
    shape = shape_of([made(4, tail_s=30)] * 5)
    assert shape is not None
    assert [shape.fixed_s, shape.generation_node_s] == pytest.approx([60, 4 * 90])


def test_with_unlike_sizes_the_tail_is_told_from_what_is_shared() -> None:
    shape = shape_of([*[made(4, tail_s=30)] * 5, *[made(2, tail_s=30)] * 5])
    assert shape is not None
    assert [shape.fixed_s, shape.generation_node_s] == pytest.approx([90, 240])


def test_completions_that_grow_are_no_reason_to_think_that_fewer_nodes_are_slow() -> None:
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


def test_one_step_in_ten_that_stood_still_for_an_hour_changes_nothing() -> None:
    still = MeasuredStep(3720, 60, 4, 1e5)
    assert shape_of([*[made(4)] * 9, still] * 2) == shape_of([made(4)] * 20)
