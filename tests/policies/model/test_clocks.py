"""How far behind a controller's clock is that takes over, as far as it shows."""

from __future__ import annotations

import pytest

from policies.ledger.rentals import rentals
from policies.model.events import Event, TookOver
from policies.model.fold import behind_s, fold
from tests.generators.views_world import requested

DAY_S = 86400.0


@pytest.mark.parametrize(
    ("time_s", "since_told_s", "back_s"),
    [
        (1600.0, 0.0, 0.0),  # a store that tells nothing
        (400.0, 0.0, 600.0),
        (1600.0, 600.0, 0.0),  # all clocks agree
        (1600.0, 300.0, 0.0),  # time does not go slower for a store
        (1600.0, 900.0, 300.0),
        (400.0, 900.0, 1500.0),
        (0.0, DAY_S, 1000.0 + DAY_S),  # however far behind the host is
        (0.0, DAY_S + 1.0, 1000.0),  # a store that is wild
        (1000.0 + 30 * DAY_S, 30 * DAY_S + 60.0, 60.0),  # a run that rested for a month
    ],
)
def test_time_goes_on_for_as_long_as_either_clock_says(time_s: float, since_told_s: float, back_s: float) -> None:
    assert behind_s(1000.0, time_s, since_told_s) == back_s


def test_a_machine_is_as_old_for_the_bill_as_for_the_budget() -> None:
    asked = requested("rollout-0-i1")
    history: list[tuple[int, float, tuple[Event, ...]]] = [
        (1, 1000.0, (asked,)),
        (2, 500.0, (TookOver("b", 2, "resume", 900.0),)),
    ]
    [node] = fold(history).nodes.values()
    [rental] = rentals(history, 500.0)
    assert node.requested_at_s == rental.from_s == 500.0 - 900.0
