"""What faults cost, in exact numbers."""

from __future__ import annotations

import pytest

from grpo_orch.checkpoint.records.metrics import TOKENS_DISCARDED, MetricsRow
from grpo_orch.policies.ledger.accounting import (
    DAEMON,
    GATEWAY,
    TRACE_S,
    Fault,
    FaultCost,
    fault_costs,
    journalled_faults,
    merge_faults,
    surviving_rows,
)
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import (
    ControllerTookOver,
    DivergenceCleared,
    Event,
    GatewayRestarted,
    JobExited,
    JobRestarted,
    NodeMoved,
    RunMoved,
)
from grpo_orch.policies.model.vocabulary import NodePhase, Refusal, RunPhase
from tests.generators.views_world import requested

NODE = "rollout-0-i1"
TRAINER = "trainer-0-i1"
START: list[Event] = [
    ControllerTookOver("a", 1, "up"),
    requested(NODE),
    requested(TRAINER),
    NodeMoved(NODE, NodePhase.BOOTING, ""),
    NodeMoved(TRAINER, NodePhase.BOOTING, ""),
    NodeMoved(NODE, NodePhase.SERVING, ""),
    NodeMoved(TRAINER, NodePhase.SERVING, ""),
    GatewayRestarted("first"),
    RunMoved(RunPhase.TRAINING, ""),
]


def moved(phase: NodePhase, node: str = NODE) -> NodeMoved:
    return NodeMoved(node, phase, "")


def history(*events: Event) -> list[tuple[int, float, tuple[Event, ...]]]:
    """One entry a second, from second 1."""
    return [(number, float(number), (event,)) for number, event in enumerate(events, start=1)]


def steps(*times_s: float, discarded: dict[int, int] | None = None) -> list[MetricsRow]:
    lost = {step: {TOKENS_DISCARDED: float(tokens)} for step, tokens in (discarded or {}).items()}
    return [MetricsRow(0, step, time_s, 1, lost.get(step, {})) for step, time_s in enumerate(times_s, start=1)]


def fault(struck_s: float, seen_s: float | None = None, target: str = "rollout-0", name: str = "kill") -> Fault:
    return Fault(name, target, struck_s, struck_s if seen_s is None else seen_s, at_step=None)


@pytest.mark.parametrize(
    ("events", "names"),
    [
        ([], []),
        ([moved(NodePhase.GONE)], [f"{NODE} lost"]),
        ([moved(NodePhase.DRAINING), moved(NodePhase.GONE)], [f"{NODE} lost"]),
        ([moved(NodePhase.DRAINING), moved(NodePhase.TERMINATING), moved(NodePhase.GONE)], []),
        ([moved(NodePhase.TERMINATING, TRAINER), moved(NodePhase.GONE, TRAINER)], [f"{TRAINER} terminated"]),
        ([NodeMoved(NODE, NodePhase.TERMINATING, "surplus", is_released=True), moved(NodePhase.GONE)], []),
        ([JobExited(TRAINER, 1, -9, 7)], [f"{TRAINER} exited with -9"]),
        ([JobExited(TRAINER, 1, 0, 40)], []),
        # The end of its work and of its machine are one fault, unless it had been set to work again in between.
        ([JobExited(NODE, 1, 1, 7), moved(NodePhase.GONE)], [f"{NODE} exited with 1"]),
        (
            [JobExited(NODE, 1, 1, 7), JobRestarted(NODE, 2, ""), moved(NodePhase.GONE)],
            [f"{NODE} exited with 1", f"{NODE} lost"],
        ),
        ([GatewayRestarted("second")], ["gateway restarted"]),
        ([ControllerTookOver("b", 2, "resume")], ["controller replaced"]),
        ([DivergenceCleared(0, 3)], []),
        # A trainer that stops for a new timeline, or because the run diverges, and the gateway that ends with it.
        (
            [
                JobExited(TRAINER, 1, exit_codes.DIVERGED, 7),
                JobRestarted(TRAINER, 2, ""),
                GatewayRestarted("second"),
                JobExited(TRAINER, 2, exit_codes.FENCED, 9),
                JobRestarted(TRAINER, 3, ""),
                GatewayRestarted("third"),
            ],
            [],
        ),
        (
            [JobExited(TRAINER, 1, exit_codes.DIVERGED, 7), moved(NodePhase.GONE, TRAINER)],
            [f"{TRAINER} lost"],
        ),
        (
            [
                JobExited(TRAINER, 1, exit_codes.DIVERGED, 7),
                JobRestarted(TRAINER, 2, ""),
                GatewayRestarted("second"),
                GatewayRestarted("third"),
            ],
            ["gateway restarted"],
        ),
        ([JobExited(TRAINER, 1, exit_codes.OUT_OF_MEMORY, 7)], [f"{TRAINER} exited with 80"]),
        # What only a change of run.yaml mends.
        ([JobExited(TRAINER, 1, exit_codes.BAD_SPEC, 0)], []),
        ([JobExited(TRAINER, 1, exit_codes.NOTHING_LEARNT, 3)], []),
        ([requested("rollout-1-i1"), NodeMoved("rollout-1-i1", NodePhase.REFUSED, "", Refusal.NO_CAPACITY)], []),
        # Resumed after a stop: on purpose, with a new controller and a new gateway.
        (
            [
                RunMoved(RunPhase.STOPPING, ""),
                moved(NodePhase.TERMINATING),
                moved(NodePhase.GONE),
                RunMoved(RunPhase.STOPPED, ""),
                ControllerTookOver("b", 2, "resume"),
                RunMoved(RunPhase.STARTING, ""),
                GatewayRestarted("second"),
            ],
            [],
        ),
        ([RunMoved(RunPhase.FINISHED, ""), moved(NodePhase.GONE)], []),
    ],
)
def test_journal_events_that_count_as_faults(events: list[Event], names: list[str]) -> None:
    assert [one.name for one in journalled_faults(history(*START, *events))] == names


def test_a_journalled_fault_knows_where_and_when() -> None:
    found = journalled_faults(history(*START, moved(NodePhase.GONE), JobExited(TRAINER, 1, -9, 7)))
    assert found == [
        Fault(f"{NODE} lost", "rollout-0", 10.0, 10.0, None),
        Fault(f"{TRAINER} exited with -9", "trainer-0", 11.0, 11.0, 7),
    ]


@pytest.mark.parametrize(
    ("target", "trace", "explained"),
    [
        ("rollout-0", "rollout-0", True),
        ("rollout-0", "rollout-1", False),
        ("rollout-1", "rollout-10", False),
        ("rollout-0-i2", "rollout-0", True),
        ("rollouts", "rollout-1", True),
        ("rollouts", "trainer-0", False),
        ("trainer", "trainer-0", True),
        ("trainer", GATEWAY, True),
        ("trainer-0", GATEWAY, True),
        ("trainer", DAEMON, False),
        ("gateway", GATEWAY, True),
        ("gateway", "trainer-0", False),
        ("daemon", DAEMON, True),
    ],
)
def test_rehearsed_fault_and_its_trace_are_one(target: str, trace: str, explained: bool) -> None:
    all_faults = merge_faults([fault(100, target=target)], [fault(103, target=trace, name="seen")])
    assert [one.name for one in all_faults] == (["kill"] if explained else ["kill", "seen"])
    assert all_faults[0].seen_s == (103 if explained else 100)


def test_fault_explains_one_loss_per_node_soon_after() -> None:
    killed = fault(100, target="rollouts")
    traces = [
        fault(101, target="rollout-0", name="a"),
        fault(102, target="rollout-1", name="b"),
        fault(110, target="rollout-0", name="lost again"),
        fault(97, target="rollout-1", name="before"),
    ]
    assert [one.name for one in merge_faults([killed], traces)] == ["before", "kill", "lost again"]
    late = fault(100 + TRACE_S + 1, target="rollout-0", name="late")
    assert [one.name for one in merge_faults([killed], [late])] == ["kill", "late"]


def test_later_of_two_faults_explains_a_trace() -> None:
    first, second = fault(100, target="rollout-0", name="first"), fault(120, target="rollouts", name="second")
    found = merge_faults([first, second], [fault(121, target="rollout-0")])
    assert [(one.name, one.seen_s) for one in found] == [("first", 100), ("second", 121)]


def test_a_lost_trainer_machine_takes_its_gateway_along_once() -> None:
    traces = [fault(10, target="trainer-0", name="lost"), fault(14, target=GATEWAY), fault(20, target=GATEWAY)]
    assert [one.name for one in merge_faults([], traces)] == ["lost", "kill"]


def test_lost_seconds_are_the_excess_of_a_disturbed_gap() -> None:
    # Usual gap 10; the first long gap has no fault in it, and is no fault's.
    log = steps(100, 110, 120, 145, 155, 190, 200)
    assert fault_costs(log, [fault(160)]) == [FaultCost("kill", 4 + 1, 25.0, 0, True)]


@pytest.mark.parametrize(
    ("times_s", "faults", "lost_s"),
    [
        ((0, 10, 40, 70, 100), [fault(11), fault(41), fault(71)], [20.0] * 3),  # the usual gap has no fault
        ((0, 10, 20, 30, 48, 58), [fault(29.9, seen_s=31.0)], [8.0]),  # noticed after its step: the next gap, too
        ((0, 10, 20, 30, 48, 58), [fault(29.9)], [0.0]),
        ((0, 10, 20, 30, 42, 51, 61), [fault(31, seen_s=50)], [1.0]),  # quick gaps offset slow ones
        ((0, 10, 20, 30, 42, 51, 61), [fault(43, seen_s=50)], [0.0]),  # and never go below zero
        ((10,), [fault(20)], [0.0]),
        ((), [fault(20)], [0.0]),
    ],
)
def test_fault_costs_the_excess_over_the_usual_gap(
    times_s: tuple[float, ...], faults: list[Fault], lost_s: list[float]
) -> None:
    assert [cost.seconds_lost for cost in fault_costs(steps(*times_s), faults)] == lost_s


@pytest.mark.parametrize(
    ("times_s", "finished", "survived"),
    [((0, 10, 20), False, [True, False, False]), ((0, 10, 20), True, [True] * 3), ((), True, [True] * 3)],
)
def test_fault_is_survived_by_a_later_step_or_the_runs_end(
    times_s: tuple[float, ...], finished: bool, survived: list[bool]
) -> None:
    faults = [fault(19), fault(20), fault(21)]
    assert [cost.survived for cost in fault_costs(steps(*times_s), faults, finished=finished)] == survived


def test_faults_in_one_gap_share_its_cost_without_remainder() -> None:
    log = steps(0, 10, 20, 51, 61, discarded={4: 101})
    costs = fault_costs(log, [fault(22), fault(30)])
    assert [cost.seconds_lost for cost in costs] == [10.5, 10.5]
    assert [cost.tokens_regenerated for cost in costs] == [51, 50]


def test_gap_before_first_remade_step_holds_the_restart_cost() -> None:
    # Steps 3 and 4 were made at 30 and 40, the trainer was killed at 41, went back to 2 and made them again.
    log = steps(10, 20, 75, 85, 95)
    assert fault_costs(log, [fault(41, target="trainer")]) == [FaultCost("kill", 2, 45.0, 0, True)]


def test_steps_still_to_be_made_again_are_not_part_of_the_run() -> None:
    log = steps(10, 20, 75, 40, 50)
    assert [step.step for step in surviving_rows(log)] == [1, 2, 3]
    assert [cost.seconds_lost for cost in fault_costs(log, [fault(41)])] == [45.0]
    assert [step.step for step in surviving_rows([*steps(10, 20, 30), MetricsRow(1, 2, 40, 1, {})])] == [
        1,
        2,
        3,
        2,
    ]


def test_fault_within_the_tick_that_saw_it_counts_once() -> None:
    rehearsed = Fault("kill rollouts", "rollouts", 100.2, 100.2, 9)
    traces = [Fault(f"rollout-{n}-i1 lost", f"rollout-{n}", 100.0, 100.0, None) for n in range(2)]
    assert [fault.name for fault in merge_faults([rehearsed], traces)] == ["kill rollouts"]
    earlier = Fault("rollout-0-i1 lost", "rollout-0", 90.0, 90.0, None)
    assert len(merge_faults([rehearsed], [earlier])) == 2
