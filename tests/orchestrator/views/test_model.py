"""What is seen of a run, from its store: its machines, its money and deadline, its rollbacks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store.document import UnreadableDocuments
from grpo_orch.orchestrator.views.reader import Reader
from grpo_orch.orchestrator.views.screen import head
from grpo_orch.orchestrator.views.view_model import HealthView, headline, to_json
from grpo_orch.policies.detect.divergence import Health
from grpo_orch.policies.model.events import (
    BuyingResumed,
    BuyingStopped,
    DivergenceCleared,
    Event,
    FleetMoved,
    NodeMoved,
    ProbationPassed,
    RunMoved,
    StoreCaughtUp,
    StoreSlowed,
    TimelineForked,
    TimelineResumed,
    TrainerFenced,
)
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Refusal, Role, RollbackStage, RunPhase
from grpo_orch.policies.serving.gateway_status import GatewayStatus, MemberStatus
from grpo_orch.policies.serving.joining import BASE_MODEL, CHECKPOINT, POLICY, JoiningNode, Stage
from tests.generators.views_world import (
    EVIDENCE,
    FIRST_FORK,
    T0,
    World,
    diverging,
    look,
    next_view,
    run_view,
    training,
)


def member(node: str, policy: str | None) -> MemberStatus:
    return MemberStatus(node, "boot", "127.0.0.1:1", policy, policy is not None, False, 0, 0.1)


def test_a_run_that_has_only_been_created_can_be_seen() -> None:
    view = look(World(), 1)
    assert (view.phase, view.step, view.max_steps, view.nodes, view.events) == (RunPhase.STARTING, 0, None, (), ())
    assert (view.reward, view.kl, view.eta_s, view.step_s, view.checkpoint) == (None,) * 5
    assert not view.daemon.alive
    assert not view.over
    json.dumps(to_json(view))


def test_a_training_run_is_seen_whole(tmp_path: Path) -> None:
    world = training(tmp_path)
    members = [member("rollout-0-i1", "0-10"), member("rollout-1-i1", None)]
    view = look(world, 42, GatewayStatus("boot", "0-10", members, requests_waiting=3))

    assert (view.name, view.phase, view.step, view.max_steps) == ("digits", RunPhase.TRAINING, 10, 40)
    assert (view.reward, view.kl, view.kl_limit, view.activity) == (1.0, 0.1, 0.52, "generating")
    assert (view.step_s, view.tokens_per_s, view.eta_s, view.requests_waiting) == (2.0, 50.0, 60.0, 3)
    assert view.checkpoint is not None
    assert (view.checkpoint.version, view.checkpoint.age_s) == ("0-5", 7.0)
    assert (view.daemon.alive, view.daemon.host, view.daemon.pid) == (True, "another-host.invalid", 42)
    assert [(node.slot, node.policy) for node in view.nodes] == [
        ("trainer-0", "0-10"),
        ("rollout-0", "0-10"),
        ("rollout-1", None),
    ]
    trainer = view.nodes[0]
    assert (trainer.role, trainer.market, trainer.price_usd_per_h) == (Role.TRAINER, Market.ON_DEMAND, 7.2)
    assert (trainer.phase, trainer.since_s) == (NodePhase.SERVING, T0 + 10)
    assert view.events[-1].text == "Run is training: the trainer sent its first heartbeat"


def test_fetches_of_nodes_are_shown_and_in_the_json() -> None:
    world = World()
    world.starts()
    world.beats(41, 0)
    beat = documents.TRAINER.read(world.store, UnreadableDocuments())
    assert beat is not None
    restoring = Stage(CHECKPOINT, 1, 2)
    documents.TRAINER.write(world.store, replace(beat, activity="restoring", stage=restoring))
    behind = replace(member("rollout-0-i1", "0-9"), stage=Stage(POLICY, 3, 4))
    comes = JoiningNode("rollout-1-i1", Stage(BASE_MODEL, 52, 141), 3.0)
    view = look(world, 42, GatewayStatus("boot", "0-10", [behind], joining=[comes]))
    assert [node.stage for node in view.nodes] == [restoring, behind.stage, comes.stage]
    told = [node["stage"] for node in json.loads(json.dumps(to_json(view)))["nodes"]]
    assert told[2] == {"name": "fetching the base model", "done_bytes": 52, "total_bytes": 141}


def test_machine_with_several_engines_has_one_line_for_all() -> None:
    world = World()
    world.starts()
    engines = [replace(member(f"rollout-0-i1.{engine}", "0-10"), engines=3) for engine in range(2)]
    behind = replace(engines[1], policy="0-9", serving=False, unfit="policy 0-10: full")
    view = look(world, 42, GatewayStatus("boot", "0-10", [engines[0], behind, member("rollout-1-i1", "0-10")]))
    first, second = view.nodes[1:]
    assert (first.node, first.policy, first.engines, first.engines_serving) == ("rollout-0-i1", "0-10", 3, 1)
    assert first.unfit == "rollout-0-i1.1: policy 0-10: full"
    assert (second.engines, second.engines_serving) == (1, 1)


def test_purchase_block_is_shown_until_it_ends() -> None:
    world = World()
    world.starts()
    assert look(world, 40).buying_stopped == ()
    world.happens(41, BuyingStopped("rollout on spot", "3 in a row came to nothing"))
    [stopped] = look(world, 42).buying_stopped
    assert (stopped.kind, stopped.reason, stopped.since_s) == (
        "rollout on spot",
        "3 in a row came to nothing",
        T0 + 41,
    )
    assert to_json(look(world, 42))["buying_stopped"][0]["reason"] == "3 in a row came to nothing"
    world.happens(43, BuyingResumed("rollout on spot"))
    assert look(world, 44).buying_stopped == ()


def test_status_of_a_gateway_gone_with_its_trainer_is_hidden() -> None:
    world = World()
    world.starts()
    status = GatewayStatus("boot", "0-10", [member("rollout-0-i1", "0-10")], requests_waiting=3)
    assert look(world, 11, status).requests_waiting == 3
    world.moves(12, "trainer-0-i1", NodePhase.GONE, "preempted")
    view = look(world, 13, status)
    assert view.requests_waiting is None
    assert [node.policy for node in view.nodes] == [None, None, None]


def test_slow_store_is_shown_while_the_run_continues() -> None:
    world = World()
    world.starts()
    assert not look(world, 11).store_slow
    world.happens(12, StoreSlowed(120, 50))
    assert to_json(look(world, 13))["store_slow"] is True
    world.happens(14, StoreCaughtUp(130, 120))
    assert not look(world, 15).store_slow
    world.happens(16, StoreSlowed(140, 120), RunMoved(RunPhase.FINISHED, "the last step"))
    assert not look(world, 17).store_slow


def test_parked_run_shows_since_when_and_why_without_trainer() -> None:
    world = World()
    world.starts()
    for step in (1, 2, 3):
        world.logs(5 + 2 * step, step)
    world.beats(11, 3)
    before = look(world, 12)
    assert (before.parked_s, before.activity, before.eta_s) == (None, "generating", 74)
    world.happens(20, RunMoved(RunPhase.PARKED, "no rollout node can be had"))
    world.is_steered(7210)
    view = look(world, 7220)
    assert (to_json(view)["phase"], to_json(view)["parked_s"], view.activity) == ("parked", 7200.0, None)
    assert (view.eta_s, view.money.forecast_usd) == (None, None)  # nobody knows until when
    told = "for 2:00 h: no rollout node can be had"
    assert told in " ".join(line.plain for line in head(view, 100))
    assert headline(view) == told
    world.happens(7221, RunMoved(RunPhase.STARTING, "rollout-0-i7 has a machine", 7201.0))
    assert look(world, 7222).parked_s is None


def test_a_daemon_that_no_longer_renews_is_not_alive() -> None:
    world = World()
    world.is_steered(0)
    assert look(world, 14).daemon.alive
    assert not look(world, 16).daemon.alive


def test_a_node_that_left_is_shown_until_another_takes_its_slot() -> None:
    world = World()
    world.starts()
    world.moves(20, "rollout-0-i1", NodePhase.GONE, "preempted")
    gone = next(node for node in look(world, 21).nodes if node.slot == "rollout-0")
    assert (gone.node, gone.phase, gone.reason, gone.since_s) == (
        "rollout-0-i1",
        NodePhase.GONE,
        "preempted",
        T0 + 20,
    )
    world.asks_for(22, "rollout-0-i2")
    world.happens(23, NodeMoved("rollout-0-i2", NodePhase.REFUSED, "none left", Refusal.NO_CAPACITY))
    refused = next(node for node in look(world, 24).nodes if node.slot == "rollout-0")
    assert (refused.node, refused.phase) == ("rollout-0-i2", NodePhase.REFUSED)


def test_ten_slots_are_in_the_order_of_their_numbers() -> None:
    world = World()
    for index in (10, 9, 0):
        world.asks_for(1, f"rollout-{index}-i1")
    assert [node.slot for node in look(world, 2).nodes] == ["rollout-0", "rollout-9", "rollout-10"]


def test_restarted_trainers_unmade_steps_are_not_the_last_value() -> None:
    world = World()
    for step in range(1, 5):
        world.logs(10.0 * step, step, reward=float(step))
    world.logs(100, 2, reward=22.0)  # killed after step 4, and back at step 1
    view = look(world, 101)
    assert (view.reward, [point.step for point in view.recent]) == (22.0, [1, 2])


def test_finished_run_is_over_without_a_daemon() -> None:
    world = World()
    world.starts()
    world.happens(20, RunMoved(RunPhase.FINISHED, "the trainer reached its last step"))
    world.is_steered(20)
    assert not look(world, 21).over
    assert look(world, 40).over


def test_rehearsed_faults_are_in_time_order_among_events() -> None:
    world = World()
    world.starts()
    world.moves(20.5, "rollout-1-i1", NodePhase.GONE, "preempted")
    reader = Reader(world.store)
    next_view(reader, T0 + 21)
    world.rehearses(20, 2, "rollout-1", at_step=3)
    world.rehearses(25, 1, "gateway", at_step=5)
    told = [event.text for event in next_view(reader, T0 + 26).events[-3:]]
    assert told == [
        "Rehearsal: kill rollout-1 at step 3 (took rollout-1)",
        "rollout-1-i1 is gone: preempted",
        "Rehearsal: kill gateway at step 5 (took gateway)",
    ]
    again = [event.text for event in next_view(reader, T0 + 27).events[-3:]]
    assert again == told


def test_cost_of_a_step_is_shown() -> None:
    """Two nodes at 0.90 USD an hour and a trainer at 7.20 since 1 s; steps of 10 s."""
    world = World()
    world.starts()
    for step in range(1, 11):
        world.logs(20 + 10 * step, step, orch__generate_s=4.0, orch__generate_node_s=8.0, orch__tokens=1000.0)
    world.beats(121, 10)
    view = run_view(world.store, T0 + 121, None)
    spent = 120 * (7.2 + 1.8) / 3600
    assert view.money.spent_usd == pytest.approx(spent)
    assert view.money.all_on_demand_usd == pytest.approx(120 * (7.2 + 7.2) / 3600)
    assert view.money.usd_per_step == pytest.approx(spent / 10)
    assert view.money.usd_per_million_tokens == pytest.approx(spent * 100)
    assert view.money.forecast_usd == pytest.approx(spent + 9.0 * 300 / 3600)
    assert view.rollouts_wanted == 1
    assert json.dumps(to_json(view))


def test_limit_is_above_the_runs_own_start() -> None:
    world = World(kl_limit=0.5)
    for step, kl in enumerate((3.0, 3.5, 90.0), start=1):
        assert look(world, step).kl_limit is None
        world.logs(step, step, kl=kl)
    assert look(world, 4).kl_limit == 4.0
    assert look(World(kl_limit=None), 1).kl_limit is None


def test_detector_findings_are_shown() -> None:
    assert look(World(), 1).health == HealthView()
    world = diverging()
    assert look(world, 40).health == HealthView(Health.WATCH, 9, 7, EVIDENCE[:1])
    world.happens(41, DivergenceCleared(0, 10))
    assert look(world, 41).health == HealthView()
    world.diverges(42, onset_step=7, step=10)
    health = to_json(look(world, 42))["health"]
    assert health == {"health": "tripped", "step": 10, "onset_step": 7, "evidence": EVIDENCE}


def test_a_rollback_is_seen_at_each_of_its_stages(tmp_path: Path) -> None:
    world = diverging()
    world.saves(32, 5, tmp_path)
    world.saves(42, 10, tmp_path)
    world.beats(41, 10)
    world.diverges(42, onset_step=7, step=10)
    world.begins_rollback(43, FIRST_FORK, 10)
    view = look(world, 44)
    assert view.rollback is not None
    assert (view.rollback.stage, view.rollback.since_s) == (RollbackStage.BEGUN, T0 + 43)
    assert (view.timeline, view.step, view.kl, view.rollbacks) == (0, 10, 3.0, 1)

    stages: list[tuple[RollbackStage, str]] = []
    events: tuple[Event, ...] = (TimelineForked(1), TrainerFenced(1), TimelineResumed(1, 5), FleetMoved(1, "1-5"))
    for at_s, event in enumerate(events, start=45):
        world.happens(at_s, event)
        view = look(world, at_s)
        assert view.rollback is not None
        stages.append((view.rollback.stage, view.rollback.text))
        assert view.rollback.since_s == T0 + at_s
        assert view.health == HealthView(), "that was the old timeline's"
        # The old trainer's last word is no longer the run's.
        assert (view.timeline, view.step, view.max_steps, view.activity, view.kl) == (1, 5, 40, None, 0.05)
        assert view.eta_s == 35 * 2.0
        assert view.nodes[0].policy is None
        assert view.checkpoint is not None
        assert view.checkpoint.version == "0-5", "0-10 is abandoned"
    assert stages == [
        (RollbackStage.FORKED, "is waiting for the old trainer to stop"),
        (RollbackStage.FENCED, "is waiting for its trainer"),
        (RollbackStage.RESUMED, "is training and waiting for the fleet"),
        (RollbackStage.PROBATION, "is on probation until step 15"),
    ]
    assert to_json(view)["rollback"] == {
        "timeline": 1,
        "cause": "diverged",
        "reason": FIRST_FORK.reason,
        "from_step": 10,
        "start": "0-5",
        "stage": "probation",
        "since_s": T0 + 48,
        "probation_until_step": 15,
        "text": "is on probation until step 15",
    }
    world.logs(50, 6, timeline=1, reward=0.9, kl=0.06)
    world.beats(50, 6, timeline=1)
    view = look(world, 51)
    assert (view.step, view.activity, view.reward, view.kl) == (6, "generating", 0.9, 0.06)
    assert [point.step for point in view.recent] == [1, 2, 3, 4, 5, 6]
    assert view.nodes[0].policy == "1-6"
    world.happens(60, ProbationPassed(1, 16))
    view = look(world, 61)
    assert (view.rollback, view.rollbacks, view.timeline) == (None, 1, 1)


def test_run_that_started_over_has_a_line_for_it() -> None:
    world = diverging()
    world.rolls_back(45, Fork(1, None), 10)
    view = look(world, 50)
    assert (view.step, view.reward, view.recent, view.checkpoint, view.kl_limit) == (0, None, (), None, None)
