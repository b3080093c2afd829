"""Real nodes lost in the middle of a step, in each way that leaves the gateway to find out by itself.

Nothing fails, nothing is made twice, and every completion is token by token what it is without the fault. In the
order of the tests: what heals comes first, and from the first kill on a node is still starting when the next one
is lost, so that the requests wait for it, on base weights at first, with nobody else to go to.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest

from tests.e2e.gateway_lab.faults import FAULTS
from tests.e2e.gateway_lab.lab import Lab, Outcome, real_lab

pytestmark = [pytest.mark.whole, pytest.mark.slow, pytest.mark.root]

SEED = int(os.environ.get("SEED", str(time.time_ns() % 100_000)))
HEALS = ("packets lost", "cable out", "server stopped", "engine stopped")
# What a gateway says that has waited for a node's tokens for longer than for any answer. However slow the machine
# is, an answer or a word of its agent that does not come is noticed before that.
WAITED = "but health is ok"
KILLS = ("server killed", "engine killed", "half-open")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with real_lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


def was_asked(outcome: Outcome) -> bool:
    """Whether the gateway found out by asking or listening, or was told, if it had to find out at all."""
    return outcome.out_by is None or WAITED not in outcome.out_by


@pytest.mark.parametrize("name", HEALS)
def test_returning_node_is_not_counted_as_missing(lab: Lab, name: str) -> None:
    lab.until_serving(2)
    print(f"SEED={SEED}")
    outcome = lab.disturb(FAULTS[name], random.Random(f"{SEED} {name}"))
    assert outcome.handovers > 0
    assert outcome.saved > 0
    assert was_asked(outcome), outcome.out_by
    lab.until_serving(2)


@pytest.mark.parametrize("name", KILLS)
def test_a_node_that_dies_was_not_missed(lab: Lab, name: str) -> None:
    lab.until_serving(1)
    print(f"SEED={SEED}")
    outcome = lab.disturb(FAULTS[name], random.Random(f"{SEED} {name}"))
    assert outcome.handovers > 0
    assert outcome.saved > 0
    assert was_asked(outcome), outcome.out_by
