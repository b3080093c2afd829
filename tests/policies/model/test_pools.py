"""Pools in the journal: what is written now, and what was written before there were any."""

from __future__ import annotations

from checkpoint.store.codec import event_from_plain, event_to_plain
from policies.model.events import Event, MachineBought, NodeRequested
from policies.model.fold import fold
from policies.model.pools import Pool
from policies.model.vocabulary import Market, Role

ASKED = Pool("aws", "us-east-1", "us-east-1b", "p5.48xlarge", "H100:8", Market.SPOT)
LANDED = Pool("aws", "us-east-1", "us-east-1c", "p5.48xlarge", "H100:8", Market.SPOT)
NODE = "rollout-0-i1"


def journalled(pool: Pool | None, landed: Pool | None) -> list[Event]:
    asked = NodeRequested(NODE, Role.ROLLOUT, "rollout-0", 1, Market.SPOT, "first", 4.0, pool)
    return [asked, MachineBought(NODE, Market.SPOT, LANDED.place, 2.0, 6.0, landed)]


def read_again(events: list[Event]) -> list[Event]:
    return [event_from_plain(event_to_plain(event), "here") for event in events]


def test_a_machine_is_where_it_landed_whatever_was_asked() -> None:
    asked, bought = read_again(journalled(ASKED, LANDED))
    assert fold([(1, 0.0, (asked,))]).nodes[NODE].pool == ASKED
    assert fold([(1, 0.0, (asked,)), (2, 9.0, (bought,))]).nodes[NODE].pool == LANDED
