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
from tests.e2e.gateway_lab.lab import Lab, real_lab

pytestmark = [pytest.mark.whole, pytest.mark.slow, pytest.mark.root]

SEED = int(os.environ.get("SEED", str(time.time_ns() % 100_000)))
# What a gateway says that has waited for a node's tokens for longer than for any answer. However slow the machine
# is, an answer or a word of its agent that does not come is noticed before that.
WAITED = "but health is ok"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with real_lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.mark.parametrize("name", FAULTS)
def test_node_lost_in_a_step_is_not_missed(lab: Lab, name: str) -> None:
    nodes = 2 if FAULTS[name].heals else 1
    lab.until_serving(nodes)
    print(f"SEED={SEED}")
    outcome = lab.disturb(FAULTS[name], random.Random(f"{SEED} {name}"))
    assert outcome.handovers > 0
    assert outcome.saved > 0
    # It asked or listened, or was told, if it had to find out at all.
    assert outcome.out_by is None or WAITED not in outcome.out_by
    lab.until_serving(nodes)
