"""Bugs put into the controller and the policies: the stories of the simulator find each, and print how many they
needed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
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
from grpo_orch.policies.fleet import budget, market
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


def _forgets_orphans() -> AbstractContextManager[object]:
    before = deciding.actions_of

    def actions(state: RunState, snapshot: Snapshot) -> tuple[object, ...]:
        known = before(state, snapshot)
        return tuple(one for one in known if not isinstance(one, Terminate) or one.node in state.nodes)

    return mock.patch.object(deciding, "actions_of", actions)


def _does_not_back_off() -> AbstractContextManager[object]:
    stack = ExitStack()
    stack.enter_context(mock.patch.object(market, "back_off_s", return_value=0.0))
    stack.enter_context(mock.patch.object(market, "probe_wait_s", return_value=0.0))
    return stack


def _buys_for_ever_what_never_works() -> AbstractContextManager[object]:
    return mock.patch.object(MachineKind, "fails", new_callable=mock.PropertyMock, return_value=False)


def _retention_keeps_the_newest_alone() -> AbstractContextManager[object]:
    def retire(ones: list[StoredCheckpoint], *_: object) -> tuple[PolicyVersion, ...]:
        return tuple(sorted(one.version for one in ones)[:-1])

    return mock.patch.object(simulated_work, "versions_to_retire", retire)


def _does_not_look_whether_it_was_replaced() -> AbstractContextManager[object]:
    return mock.patch.object(Journal, "check", return_value=None)


def _acts_however_late() -> AbstractContextManager[object]:
    return mock.patch.object(actuate, "ACT_WITHIN_S", math.inf)


def _keeps_machines_of_a_run_that_is_over() -> AbstractContextManager[object]:
    return mock.patch.object(deciding, "release_machines", return_value=None)


def _rolls_back_to_the_newest() -> AbstractContextManager[object]:
    return mock.patch.object(rollback_begin, "target_before_step", return_value=10**9)


def _takes_a_missing_answer_for_an_empty_cloud() -> AbstractContextManager[object]:
    list_machines = SimulatedCloud.machines

    def machines(self: SimulatedCloud) -> dict[str, Machine]:
        with contextlib.suppress(CloudUnavailable):
            return list_machines(self)
        return {}

    return mock.patch.object(SimulatedCloud, "machines", machines)


def _does_not_count_its_money() -> AbstractContextManager[object]:
    never = mock.Mock(return_value="")
    return mock.patch.multiple(budget.Spending, exceeded=never, excess_with=never)


def _looks_at_its_money_only_before_it_buys() -> AbstractContextManager[object]:
    return mock.patch.object(budget.Spending, "exceeded", return_value="")


def _forgets_what_a_machine_cost_before_its_last_phase() -> AbstractContextManager[object]:
    def cost_usd(self: Node, now_s: float) -> float:
        return self.usd_per_h * max(0.0, now_s - self.since_s) / 3600

    return mock.patch.object(Node, "cost_usd", cost_usd)


BUGS: tuple[Callable[[], AbstractContextManager[object]], ...] = (
    _acts_before_it_journals,
    _forgets_orphans,
    _does_not_back_off,
    _buys_for_ever_what_never_works,
    _retention_keeps_the_newest_alone,
    _does_not_look_whether_it_was_replaced,
    _acts_however_late,
    _keeps_machines_of_a_run_that_is_over,
    _rolls_back_to_the_newest,
    _takes_a_missing_answer_for_an_empty_cloud,
    _does_not_count_its_money,
    _looks_at_its_money_only_before_it_buys,
    _forgets_what_a_machine_cost_before_its_last_phase,
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__.strip("_"))
def test_a_bug_is_found(bug: Callable[[], AbstractContextManager[object]]) -> None:
    with bug():
        for seed in range(STORIES):
            try:
                scenarios.run_scenario(seed, spec(2))
            except InvariantViolated as found:
                print(f"{bug.__name__.strip('_')}: seed {seed}: {str(found).splitlines()[0]}")
                return
    raise AssertionError(f"{STORIES} stories did not find it")
