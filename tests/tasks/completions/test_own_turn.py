"""A call in which the trainer took a turn of its own: the nodes' time before and after that turn is told."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import pytest

from checkpoint.records.metrics import GENERATE_NODE_S, GENERATE_S, WAIT_S
from checkpoint.store.run_store import Store
from policies.model.vocabulary import PolicyVersion
from policies.serving.wire import Batch, Completion, PolicyRef
from tasks.completions.drought import OwnTurn
from tasks.completions.gateway_client import Generated
from tasks.completions.refused_prompts import RefusedPrompts
from tasks.completions.rollout_source import RolloutSource
from tasks.storing.heartbeat import Heartbeat
from tasks.storing.step_costs import StepCosts

AT = PolicyVersion(0, 20)
BEFORE_S, WAIT_OF_ALL_S, AFTER_S = 0.4, 0.3, 0.1


class Nodes:
    """Work, are lost, and come again."""

    turns = 0

    def complete(self, batch: Batch) -> Generated:
        self.turns += 1
        time.sleep(BEFORE_S if self.turns == 1 else AFTER_S)
        if self.turns == 1:
            raise OwnTurn
        label = batch.policy.label
        made = [Completion(one.index, [1], [0.0], "stop", label, "rollout-0") for one in batch.requests]
        return Generated(made, 0, WAIT_OF_ALL_S)


class Quiet:
    """A heartbeat that nobody hears."""

    def check(self) -> None: ...

    def say(self, *_: Any, **__: Any) -> None: ...


def test_what_nodes_worked_before_the_trainers_turn_is_told_and_no_wait_is_taken_off_what_came_after(
    tmp_path: Path,
) -> None:
    costs, store = StepCosts(), Store(f"file://{tmp_path}")
    refused = RefusedPrompts("skip", costs)
    rollouts = RolloutSource(
        store, Nodes(), cast(Heartbeat, Quiet()), costs, refused, by=(0, 1, 1), run_seed=7, deadline_s=1.0
    )

    def ask() -> None:
        rollouts.complete(AT, [[1]], 2, {}, training=True, policies=lambda _: PolicyRef(str(AT), "p"))

    with pytest.raises(OwnTurn):
        ask()
    ask()
    told = costs.take()
    assert told[WAIT_S] == WAIT_OF_ALL_S
    assert told[GENERATE_S] >= BEFORE_S + AFTER_S - WAIT_OF_ALL_S
    assert told[GENERATE_NODE_S] == told[GENERATE_S]
