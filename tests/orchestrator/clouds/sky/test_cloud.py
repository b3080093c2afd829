"""What only the cloud through SkyPilot does, SkyPilot played by a table. See test_conformance."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store import layout
from grpo_orch.orchestrator.clouds.protocol import CloudRefused, CloudUnavailable, LaunchOrder
from grpo_orch.orchestrator.clouds.sky import cloud as sky_cloud
from grpo_orch.orchestrator.clouds.sky import watch
from grpo_orch.orchestrator.clouds.sky.cloud import SkyCloud
from grpo_orch.orchestrator.clouds.sky.records import Cluster, ClusterState
from grpo_orch.orchestrator.home import run_dir
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.vocabulary import MachineState, Market, Refusal, Role, role_of
from grpo_orch.policies.tick.snapshot import Machine
from tests.budget import HANG_S
from tests.budget import until as wait_until
from tests.stand_ins.control_plane import PREFIX, SkyWorld


@pytest.fixture
def clouds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SkyWorld]:
    """One run, and as many controllers of it as a test opens."""
    made = SkyWorld(tmp_path, monkeypatch, idle=True)
    monkeypatch.setattr(sky_cloud, "IDLE_EVERY_S", 0.0)
    trainer = replace(made.spec.trainer, resources={"infra": "aws"})
    made.spec = replace(made.spec, trainer=trainer)
    yield made
    made.close()


def order(node: str = "trainer-0-i1", attempt: int = 1) -> LaunchOrder:
    role = role_of(node)
    environment = {"GRPO_ORCH_NODE": node, "GRPO_ORCH_ATTEMPT": str(attempt), "GRPO_ORCH_TOKEN": "s3cret"}
    return LaunchOrder(node, role, Market.SPOT if role is Role.ROLLOUT else Market.ON_DEMAND, attempt, environment)


def until(cloud: SkyCloud, wanted: Callable[[dict[str, Machine]], bool]) -> dict[str, Machine]:
    deadline_s = time.monotonic() + HANG_S
    found: dict[str, Machine] = {}
    while time.monotonic() < deadline_s:
        try:
            found = cloud.machines()
        except CloudUnavailable:
            continue
        if wanted(found):
            return found
        time.sleep(0.005)
    raise AssertionError(found)


def seen(cloud: SkyCloud) -> dict[str, Machine]:
    return until(cloud, lambda _: True)


def running(clouds: SkyWorld, node: str = "rollout-0-i1") -> SkyCloud:
    """A controller with a trainer and one other node up, at work."""
    cloud = clouds.open()
    seen(cloud)
    for name in ("trainer-0-i1", node):
        cloud.launch(order(name))
        clouds.run.machine_says(name, 1)
    until(cloud, lambda machines: len(machines) == 2)
    return cloud


def test_nothing_is_known_before_the_first_look(clouds: SkyWorld) -> None:
    clouds.sky.fails = CloudUnavailable("the API server is away")
    cloud = clouds.open()
    with pytest.raises(CloudUnavailable):
        cloud.machines()
    clouds.sky.fails = None
    assert seen(cloud) == {}


def test_listing_is_unknown_after_a_long_outage(clouds: SkyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = running(clouds)
    monkeypatch.setattr(watch, "STALE_S", 0.05)
    clouds.sky.fails = CloudUnavailable("the API server is away")

    def nothing_is_known() -> bool:
        try:
            cloud.machines()
        except CloudUnavailable as error:
            return "is away" in str(error)
        return False

    wait_until("nothing is known", nothing_is_known)


def test_machine_reporting_a_rebalance_recommendation_is_seen(clouds: SkyWorld) -> None:
    cloud, node = running(clouds), "rollout-0-i1"
    key = layout.machine(node)
    assert not seen(cloud)[node].rebalance_recommended
    report = msgspec.json.decode(clouds.run.store.get(key))
    clouds.run.store.put(key, msgspec.json.encode({**report, "rebalance_recommended": True}))
    until(cloud, lambda machines: machines[node].rebalance_recommended)
    assert not seen(cloud)[node].notice


def test_a_half_made_cluster_is_launched_again_under_its_name(clouds: SkyWorld) -> None:
    name = PREFIX + "trainer-0-i1"
    clouds.sky.table[name] = Cluster(name, ClusterState.STARTING, "aws/us-east-1", False, 0.4, None)
    cloud = clouds.open()
    machine = seen(cloud)["trainer-0-i1"]
    assert (machine.state, machine.attempt) == (MachineState.STARTING, 0)
    cloud.launch(order())
    assert clouds.sky.asked == ["launch trainer-0-i1"]
    assert cloud.machines()["trainer-0-i1"].state is MachineState.UP


@pytest.mark.parametrize(
    ("bought", "said"), [(False, CloudRefused), (True, CloudUnavailable), (None, CloudUnavailable)]
)
def test_launching_machine_is_listed_and_can_be_terminated(
    clouds: SkyWorld, monkeypatch: pytest.MonkeyPatch, bought: bool | None, said: type[Exception]
) -> None:
    cloud = clouds.open()
    seen(cloud)
    under_way, ended = threading.Event(), threading.Event()

    def launch(*_: object) -> Cluster:
        under_way.set()
        assert ended.wait(HANG_S)
        raise CloudUnavailable("cancelled by `down`")

    def down(*_: object) -> None:
        ended.set()

    monkeypatch.setattr(clouds.sky, "launch", launch)
    monkeypatch.setattr(clouds.sky, "down", down)
    monkeypatch.setattr(clouds.sky, "is_bought", lambda _: bought)
    raised: list[Exception] = []

    def ask() -> None:
        try:
            cloud.launch(order())
        except (CloudRefused, CloudUnavailable) as error:
            raised.append(error)

    launching = threading.Thread(target=ask)
    launching.start()
    assert under_way.wait(HANG_S)
    assert cloud.machines() == {"trainer-0-i1": Machine("trainer-0-i1", MachineState.STARTING, attempt=0)}
    cloud.terminate("trainer-0-i1")
    launching.join(HANG_S)
    assert cloud.machines() == {}
    assert [type(error) for error in raised] == [said]
    monkeypatch.setattr(clouds.sky, "down", lambda *_: None)
    with pytest.raises(CloudUnavailable):  # what was true of that launch is not of the next
        cloud.launch(order())


def test_refused_launch_that_left_a_machine_reports_it(clouds: SkyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = clouds.open()
    seen(cloud)
    name = PREFIX + "trainer-0-i1"

    def launch(*_: object) -> Cluster:
        clouds.sky.table[name] = Cluster(name, ClusterState.STARTING, "aws/us-east-1", False, 0.4, None)
        raise CloudRefused(Refusal.UNKNOWN, "its set-up failed")

    monkeypatch.setattr(watch, "SCAN_EVERY_S", HANG_S)
    monkeypatch.setattr(clouds.sky, "launch", launch)
    with pytest.raises(CloudRefused) as refused:
        cloud.launch(order())
    assert (refused.value.refusal, refused.value.machine_exists) == (Refusal.UNKNOWN, True)
    assert list(cloud.machines()) == ["trainer-0-i1"]


def test_launch_stays_pending_until_leftovers_are_known(clouds: SkyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = clouds.open()
    seen(cloud)

    def confirm(*_: object) -> Cluster | None:
        raise CloudUnavailable("the cloud does not answer")

    monkeypatch.setattr(clouds.sky, "confirm", confirm)
    monkeypatch.setattr(clouds.sky, "fails", CloudRefused(Refusal.UNKNOWN, "its set-up failed"))
    with pytest.raises(CloudUnavailable, match="cannot determine whether a machine was created: the cloud"):
        cloud.launch(order())


def test_rollout_nodes_wait_for_the_trainers_region_and_go_there(clouds: SkyWorld) -> None:
    cloud = clouds.open()
    seen(cloud)
    with pytest.raises(CloudUnavailable, match="waits until the trainer's machine is up"):
        cloud.launch(order("rollout-0-i1"))
    cloud.launch(order())
    cloud.launch(order("rollout-0-i1"))
    assert clouds.sky.works[-1].resources["infra"] == "aws/us-east-1"


def test_the_plan_names_both_prices(clouds: SkyWorld) -> None:
    trainer, *rollouts = clouds.open().offers()
    assert (trainer.market, trainer.price_usd_per_h, trainer.other_market_usd_per_h) == (
        Market.ON_DEMAND,
        55.04,
        21.5,
    )
    assert [(r.other_market_usd_per_h, r.other_market_max_usd_per_h) for r in rollouts] == [(55.04, 55.04)] * 2
    clouds.spec = replace(
        clouds.spec, trainer=replace(clouds.spec.trainer, resources={"instance_type": "only-on-demand"})
    )
    assert clouds.open().offers()[0].other_market_usd_per_h is None


def test_plan_in_two_regions_is_refused_before_purchase(clouds: SkyWorld) -> None:
    trainer = replace(clouds.spec.trainer, resources={"infra": "aws/us-east-1"})
    rollout = replace(clouds.spec.rollout, resources={"infra": "aws/us-west-2"})
    clouds.spec = replace(clouds.spec, trainer=trainer, rollout=rollout)
    with pytest.raises(CloudRefused, match=r"rollout.resources names no place in aws/us-east-1"):
        clouds.open().offers()


def test_pools_cover_both_markets_unless_candidates_are_named(clouds: SkyWorld) -> None:
    pools = clouds.open().pools()
    assert {(one.role, one.pool.market) for one in pools} == {(role, market) for role in Role for market in Market}
    named = replace(clouds.spec.rollout, resources={"ordered": [{"use_spot": True}, {"use_spot": False}]})
    clouds.spec = replace(clouds.spec, rollout=named)
    assert clouds.open().pools() == []


def test_sparse_record_counts_as_machine_at_requested_price(clouds: SkyWorld) -> None:
    cloud = running(clouds)
    before = cloud.machines()["rollout-0-i1"]
    for node in ("rollout-0-i1", "rollout-1-i1"):
        name = PREFIX + node
        clouds.sky.table[name] = Cluster(name, ClusterState.STARTING, "", False, None, None)
    found = until(cloud, lambda machines: len(machines) == 3)
    assert found["rollout-0-i1"] == before  # what was read before holds
    unknown = found["rollout-1-i1"]
    assert (unknown.state, unknown.pool, unknown.price_usd_per_h) == (MachineState.STARTING, None, 0.0)
    name = PREFIX + "rollout-1-i1"
    place = "aws/us-east-1/us-east-1a"
    clouds.sky.table[name] = Cluster(name, ClusterState.UP, place, True, None, None, "p5.48xlarge")
    found = until(cloud, lambda machines: machines["rollout-1-i1"].state is MachineState.UP)
    # With a pool it would be a machine of one's own, which costs nothing.
    assert (found["rollout-1-i1"].pool, found["rollout-1-i1"].price_usd_per_h) == (None, 0.0)


def test_the_log_of_a_daemon_on_this_machine_is_read_here(clouds: SkyWorld) -> None:
    cloud = clouds.open()
    with pytest.raises(KeyError):
        cloud.log("daemon", follow=False)
    (run_dir("sim-0") / "daemon.log").write_text("took the run\nticked\n")
    assert list(cloud.log("daemon", follow=False)) == ["took the run", "ticked"]
    assert cloud.logged_nodes() == ["daemon"]


def test_work_reruns_on_its_machine_set_up_by_new_controller(
    clouds: SkyWorld,
) -> None:
    cloud = running(clouds)
    clouds.run.machine_says("trainer-0-i1", 1, exit_code=7)
    until(cloud, lambda machines: machines["trainer-0-i1"].exit_code == 7)
    after = clouds.open()
    seen(after)
    for controller, attempt, asked in ((cloud, 2, "run_again"), (after, 3, "launch")):
        controller.launch(order(attempt=attempt))
        assert clouds.sky.asked[-1] == f"{asked} trainer-0-i1"
        assert seen(controller)["trainer-0-i1"].attempt == attempt


@pytest.mark.parametrize(
    ("since_s", "said", "exit_code"),
    [(0.0, None, exit_codes.FAILED), (0.0, exit_codes.BAD_SPEC, exit_codes.BAD_SPEC), (1000.0, None, None)],
    ids=["the set-up failed", "it said how it ended", "it may still be starting"],
)
def test_work_that_ended_without_report_has_failed(
    clouds: SkyWorld, monkeypatch: pytest.MonkeyPatch, since_s: float, said: int | None, exit_code: int | None
) -> None:
    monkeypatch.setattr(sky_cloud, "IDLE_EVERY_S", since_s)
    cloud = clouds.open()
    seen(cloud)
    cloud.launch(order())
    if said is not None:
        clouds.run.machine_says("trainer-0-i1", 1, exit_code=said)
        until(cloud, lambda machines: machines["trainer-0-i1"].exit_code == said)
    clouds.sky.idle = True
    cloud.confirm("trainer-0-i1")
    machine = cloud.machines()["trainer-0-i1"]
    assert (machine.attempt, machine.exit_code) == (1, exit_code)
    clouds.sky.idle = False
    cloud.launch(order(attempt=2))
    assert cloud.machines()["trainer-0-i1"].exit_code is None


def test_machines_reports_are_deleted_with_it(clouds: SkyWorld) -> None:
    cloud = running(clouds)
    cloud.terminate("rollout-0-i1")
    assert documents.machine("rollout-0-i1").read(clouds.run.store) is None
    assert documents.machine("trainer-0-i1").read(clouds.run.store) is not None
