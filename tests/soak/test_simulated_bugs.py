"""Bugs put into the controller and the policies: the stories of the simulator find each, and print how many they
needed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

import pytest

from grpo_orch.checkpoint.journal import Journal
from grpo_orch.orchestrator.clouds.protocol import CloudUnavailable
from grpo_orch.orchestrator.control import actuate
from grpo_orch.orchestrator.control.actuate import Actuator
from grpo_orch.orchestrator.control.controller import Controller
from grpo_orch.orchestrator.simulate import scenarios, simulated_work
from grpo_orch.orchestrator.simulate.simulated_cloud import SimulatedCloud
from grpo_orch.orchestrator.simulate.simulation import InvariantViolated
from grpo_orch.policies.control import decide as deciding
from grpo_orch.policies.control import rollback as rollback_begin
from grpo_orch.policies.fleet import market
from grpo_orch.policies.fleet.budget import Spending
from grpo_orch.policies.ledger.retention import StoredCheckpoint
from grpo_orch.policies.model.breaker import MachineKind
from grpo_orch.policies.model.events import Event, RunCreated
from grpo_orch.policies.model.state import Node, RunState
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.tick.snapshot import Action, Machine, Snapshot, Terminate
from tests.stand_ins.world import spec

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("quiet_log")]

STORIES = 400


def _acts_before_it_journals() -> AbstractContextManager[object]:
    late: list[tuple[Controller, float, tuple[Event, ...]]] = []
    act, journal = Actuator.submit, Controller.record

    def record(self: Controller, now_s: float, events: tuple[Event, ...]) -> None:
        if isinstance(events[0], RunCreated):  # before the first tick
            journal(self, now_s, events)
        else:
            late.append((self, now_s, events))

    def submit(self: Actuator, actions: tuple[Action, ...], fence: Callable[[], None]) -> None:
        act(self, actions, fence)
        decided, late[:] = list(late), []
        for controller, now_s, events in decided:
            if controller.fence == fence:  # the others have died
                journal(controller, now_s, events)

    stack = ExitStack()
    stack.enter_context(mock.patch.object(Controller, "record", record))
    stack.enter_context(mock.patch.object(Actuator, "submit", submit))
    return stack


def _without_orphans(state: RunState, snapshot: Snapshot) -> tuple[Action, ...]:
    known = actions_of(state, snapshot)
    return tuple(one for one in known if not isinstance(one, Terminate) or one.node in state.nodes)


def _all_but_the_newest(ones: list[StoredCheckpoint], *_: object) -> tuple[PolicyVersion, ...]:
    return tuple(sorted(one.version for one in ones)[:-1])


def _machines_if_it_answers(self: SimulatedCloud) -> dict[str, Machine]:
    with contextlib.suppress(CloudUnavailable):
        return list_machines(self)
    return {}


def _cost_since_the_last_phase(self: Node, now_s: float) -> float:
    return self.usd_per_h * max(0.0, now_s - self.since_s) / 3600


actions_of, list_machines = deciding.actions_of, SimulatedCloud.machines
# By bug: what is replaced, and by what. A function without arguments patches by itself.
BUGS: dict[str, tuple[tuple[Any, str, object], ...] | Callable[[], AbstractContextManager[object]]] = {
    "acts before it journals": _acts_before_it_journals,
    "forgets orphans": ((deciding, "actions_of", _without_orphans),),
    "does not back off": ((market, "back_off_s", lambda *_: 0.0), (market, "probe_wait_s", lambda *_: 0.0)),
    "buys for ever what never works": ((MachineKind, "fails", property(lambda _: False)),),
    "retention keeps the newest alone": ((simulated_work, "versions_to_retire", _all_but_the_newest),),
    "does not look whether it was replaced": ((Journal, "check", lambda _: None),),
    "acts however late": ((actuate, "ACT_WITHIN_S", math.inf),),
    "keeps machines of a run that is over": ((deciding, "release_machines", lambda *_, **__: None),),
    "rolls back to the newest": ((rollback_begin, "target_before_step", lambda *_: 10**9),),
    "takes a missing answer for an empty cloud": ((SimulatedCloud, "machines", _machines_if_it_answers),),
    "does not count its money": ((Spending, "exceeded", lambda _: ""), (Spending, "excess_with", lambda *_: "")),
    "looks at its money only before it buys": ((Spending, "exceeded", lambda _: ""),),
    "forgets what a machine cost before its last phase": ((Node, "cost_usd", _cost_since_the_last_phase),),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str) -> None:
    patches = BUGS[bug]
    with ExitStack() as stack:
        if isinstance(patches, tuple):
            for target, name, value in patches:
                stack.enter_context(mock.patch.object(target, name, value))
        else:
            stack.enter_context(patches())
        for seed in range(STORIES):
            try:
                scenarios.run_scenario(seed, spec(2))
            except InvariantViolated as found:
                print(f"{bug}: seed {seed}: {str(found).splitlines()[0]}")
                return
    raise AssertionError(f"{STORIES} stories did not find it")
