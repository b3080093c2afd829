"""A machine's life as the journal tells it."""

from __future__ import annotations

import pytest

from grpo_orch.policies.ledger.rentals import End, Span, lives
from grpo_orch.policies.model.events import Event, MachineBought, NodeMoved, NodeRequested
from grpo_orch.policies.model.pools import Pool
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Role

POOL = Pool("aws", "us-east-1", "us-east-1b", "p5.48xlarge", "H100:8", Market.SPOT)
A, B = "rollout-0-i1", "rollout-0-i2"


def asked(node: str, pool: Pool | None = None) -> NodeRequested:
    number = int(node.rsplit("-i", 1)[1])
    return NodeRequested(node, Role.ROLLOUT, "rollout-0", number, Market.SPOT, "first", pool=pool)


def moved(phase: NodePhase, node: str = A, reason: str = "because") -> NodeMoved:
    return NodeMoved(node, phase, reason)


def journal(*told: tuple[float, Event]) -> list[tuple[int, float, tuple[Event, ...]]]:
    return [(number, at_s, (event,)) for number, (at_s, event) in enumerate(told, 1)]


def test_a_machine_that_lives_until_now() -> None:
    bought = MachineBought(A, Market.ON_DEMAND, "elsewhere", 2.5, 2.5)
    found = lives(
        journal(
            (10, asked(A, POOL)), (30, moved(NodePhase.BOOTING)), (30, bought), (90, moved(NodePhase.SERVING))
        ),
        100,
    )
    assert len(found) == 1
    one = found[0]
    assert one.spans == (
        Span(NodePhase.REQUESTED, 10, 30),
        Span(NodePhase.BOOTING, 30, 90),
        Span(NodePhase.SERVING, 90, 100),
    )
    assert (one.market, one.pool, one.price_usd_per_h, one.end) == (Market.ON_DEMAND, "elsewhere", 2.5, None)


@pytest.mark.parametrize(
    ("moves", "end"),
    [
        ([NodePhase.BOOTING, NodePhase.SERVING, NodePhase.GONE], End.LOST),
        ([NodePhase.BOOTING, NodePhase.SERVING, NodePhase.DRAINING, NodePhase.GONE], End.LOST),
        ([NodePhase.BOOTING, NodePhase.TERMINATING, NodePhase.GONE], End.RETURNED),
        ([NodePhase.REFUSED], End.REFUSED),
        ([NodePhase.BOOTING, NodePhase.SERVING, NodePhase.TERMINATING], None),
    ],
)
def test_how_it_ended(moves: list[NodePhase], end: End | None) -> None:
    told = [(float(at_s), moved(phase)) for at_s, phase in enumerate(moves, 2)]
    found = lives(journal((1, asked(A, POOL)), *told), 50)
    assert [one.end for one in found] == [end]
    assert found[0].pool == str(POOL)
    assert found[0].until_s == (50 if end is None else len(moves) + 1)


def test_one_after_another_and_a_clock_that_went_back() -> None:
    found = lives(
        journal(
            (100, asked(A)), (110, moved(NodePhase.BOOTING)), (60, moved(NodePhase.GONE)), (70, asked(B)),
            (75, moved(NodePhase.BOOTING, B)), (80, moved(NodePhase.REFUSED, "rollout-9-i9")),
        ),
        72,
    )  # fmt: skip
    assert {one.node for one in found} == {A, B}
    assert all(span.until_s >= span.from_s for one in found for span in one.spans)
