"""What every cloud must keep, whichever it is: each test runs once for each.

`local` runs with real processes. `sky` runs with a table in the place of SkyPilot: a launch through the real one
takes half a minute and more, and these tests make some thirty. What real SkyPilot and machines add to it, the rig
of tests/e2e/test_sky.py shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_orch.orchestrator.clouds.protocol import Cloud, CloudRefused, CloudUnavailable, LaunchOrder
from grpo_orch.policies.model.vocabulary import MachineState, Market, Refusal, Role, role_of
from grpo_orch.policies.tick.snapshot import Machine
from tests.budget import until
from tests.stand_ins.control_plane import EXIT, CloudWorld, LocalWorld, SkyWorld

NODE, OTHER, TRAINER = "rollout-0-i1", "rollout-1-i1", "trainer-0-i1"


@pytest.fixture(params=[LocalWorld, SkyWorld], ids=["local", "sky"])
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudWorld]:
    made: CloudWorld = request.param(tmp_path, monkeypatch)
    yield made
    made.close()


@pytest.fixture
def cloud(world: CloudWorld) -> Cloud:
    return opened(world)


def opened(world: CloudWorld) -> Cloud:
    """The cloud of one more controller, which has looked."""
    cloud = world.open()
    seen(cloud, lambda _: True)
    return cloud


def order(node: str = NODE, attempt: int = 1, exit_code: int | None = None) -> LaunchOrder:
    role = role_of(node)
    market = Market.SPOT if role is Role.ROLLOUT else Market.ON_DEMAND
    environment = {"GRPO_ORCH_NODE": node, "GRPO_ORCH_ATTEMPT": str(attempt)}
    if exit_code is not None:
        environment |= {EXIT: str(exit_code), "STAND_IN_REASON": f"why {exit_code}"}
    return LaunchOrder(node, role, market, attempt, environment)


def seen(cloud: Cloud, wanted: Callable[[dict[str, Machine]], bool]) -> dict[str, Machine]:
    """What the cloud shows once it is as wanted: looking again and again is what the controller does, too."""
    found: dict[str, Machine] = {}

    def look() -> bool:
        nonlocal found
        try:
            found = cloud.machines()
        except CloudUnavailable:
            return False
        return wanted(found)

    until("so at the cloud", look)
    return found


def at_work(cloud: Cloud, world: CloudWorld, node: str = NODE) -> Machine:
    """Launch a machine and wait until its work has begun."""
    cloud.launch(order(node))
    until("so at the cloud", lambda: world.attempts(node))
    return up(cloud, node)


def up(cloud: Cloud, node: str = NODE) -> Machine:
    return seen(cloud, lambda all_: node in all_ and all_[node].state is MachineState.UP)[node]


def gone(cloud: Cloud, node: str = NODE) -> Machine:
    return seen(cloud, lambda all_: node in all_ and all_[node].state is MachineState.GONE)[node]


def test_a_launched_machine_appears_under_its_name(cloud: Cloud, world: CloudWorld) -> None:
    assert seen(cloud, lambda _: True) == {}
    machine = at_work(cloud, world)
    assert (machine.node, machine.attempt, machine.exit_code, machine.reason) == (NODE, 1, None, "")
    assert (machine.market, machine.notice) == (Market.SPOT, False)
    assert world.exists(NODE)
    assert up(cloud).node in cloud.logged_nodes()


def test_launching_twice_is_launching_once(cloud: Cloud, world: CloudWorld) -> None:
    at_work(cloud, world)
    for _ in range(3):
        cloud.launch(order())
    at_work(cloud, world, OTHER)  # what was started before it has begun as well
    assert world.attempts(NODE) == [1]
    assert cloud.machines().keys() == {NODE, OTHER}


def test_finished_attempt_is_not_started_again(cloud: Cloud, world: CloudWorld) -> None:
    cloud.launch(order(TRAINER, exit_code=7))
    seen(cloud, lambda all_: TRAINER in all_ and all_[TRAINER].exit_code == 7)
    cloud.launch(order(TRAINER))
    at_work(cloud, world, OTHER)
    assert world.attempts(TRAINER) == [1]


def test_ended_work_leaves_machine_for_the_next_attempt(cloud: Cloud, world: CloudWorld) -> None:
    cloud.launch(order(TRAINER, exit_code=7))
    machine = seen(cloud, lambda all_: TRAINER in all_ and all_[TRAINER].exit_code is not None)[TRAINER]
    assert (machine.state, machine.exit_code, machine.attempt) == (MachineState.UP, 7, 1)
    assert machine.exit_reason == "why 7"
    cloud.launch(order(TRAINER, attempt=2))
    until("so at the cloud", lambda: world.attempts(TRAINER) == [1, 2])
    machine = seen(cloud, lambda all_: all_[TRAINER].attempt == 2)[TRAINER]
    assert (machine.state, machine.exit_code, machine.exit_reason) == (MachineState.UP, None, "")


def test_terminate_returns_when_nothing_of_the_machine_is_left(cloud: Cloud, world: CloudWorld) -> None:
    at_work(cloud, world)
    cloud.terminate(NODE)
    assert not world.exists(NODE)
    assert cloud.machines() == {}
    cloud.terminate(NODE)
    cloud.terminate("rollout-7-i1")  # which never was
    assert cloud.machines() == {}


def test_dead_machine_stays_on_record_until_terminated(cloud: Cloud, world: CloudWorld) -> None:
    at_work(cloud, world)
    world.kill(NODE)
    assert gone(cloud).reason
    cloud.launch(order())  # asked for before the controller knew
    assert gone(cloud).reason
    assert not world.exists(NODE)
    cloud.terminate(NODE)
    assert cloud.machines() == {}


def test_confirm_tells_a_dead_machine_from_a_living_one(cloud: Cloud, world: CloudWorld) -> None:
    at_work(cloud, world)
    at_work(cloud, world, OTHER)
    world.kill(NODE)
    for node in (NODE, OTHER, "rollout-7-i1"):
        cloud.confirm(node)
    gone(cloud)
    assert cloud.machines()[OTHER].state is MachineState.UP


def test_machines_do_not_touch_each_other(cloud: Cloud, world: CloudWorld) -> None:
    for node in (NODE, OTHER, TRAINER):
        at_work(cloud, world, node)
    world.kill(NODE)
    gone(cloud)
    cloud.terminate(NODE)
    cloud.terminate(OTHER)
    assert cloud.machines().keys() == {TRAINER}
    assert up(cloud, TRAINER).attempt == 1
    assert [world.exists(node) for node in (NODE, OTHER, TRAINER)] == [False, False, True]


def test_names_that_are_prefixes_of_others_are_distinct(cloud: Cloud, world: CloudWorld) -> None:
    longer = f"{NODE}0"
    at_work(cloud, world)
    at_work(cloud, world, longer)
    cloud.terminate(NODE)
    assert cloud.machines().keys() == {longer}
    assert world.exists(longer)


@pytest.mark.parametrize("ends", ["at work", "after its work", "told", "dead"])
def test_a_name_can_be_used_again(cloud: Cloud, world: CloudWorld, ends: str) -> None:
    cloud.launch(order(exit_code=7 if ends == "after its work" else None))
    until("so at the cloud", lambda: world.attempts(NODE))
    if ends == "after its work":
        seen(cloud, lambda all_: all_[NODE].exit_code == 7)
    if ends == "told":
        world.notice(NODE)
        seen(cloud, lambda all_: all_[NODE].notice)
    if ends == "dead":
        world.kill(NODE)
        gone(cloud)
    cloud.terminate(NODE)
    cloud.launch(order())
    until("so at the cloud", lambda: world.attempts(NODE) == [1, 1])
    machine = up(cloud)
    assert (machine.attempt, machine.exit_code, machine.notice, machine.reason) == (1, None, False, "")
    assert world.exists(NODE)


def test_a_notice_is_seen(cloud: Cloud, world: CloudWorld) -> None:
    at_work(cloud, world)
    world.notice(NODE)
    assert seen(cloud, lambda all_: all_[NODE].notice)[NODE].state is MachineState.UP


def test_machines_outlive_controller_and_next_one_adopts_them(cloud: Cloud, world: CloudWorld) -> None:
    cloud.launch(order(TRAINER, exit_code=7))
    seen(cloud, lambda all_: TRAINER in all_ and all_[TRAINER].exit_code == 7)
    cloud.launch(order(TRAINER, attempt=2))
    until("so at the cloud", lambda: world.attempts(TRAINER) == [1, 2])
    at_work(cloud, world)
    cloud.close()
    after = opened(world)
    machines = after.machines()
    assert {node: (one.state, one.attempt) for node, one in machines.items()} == {
        TRAINER: (MachineState.UP, 2), NODE: (MachineState.UP, 1),
    }  # fmt: skip
    after.launch(order(TRAINER, attempt=2))
    after.launch(order())
    at_work(after, world, OTHER)
    assert (world.attempts(TRAINER), world.attempts(NODE)) == ([1, 2], [1])
    after.terminate(NODE)
    assert not world.exists(NODE)


def test_a_refused_launch_is_typed_and_leaves_nothing(cloud: Cloud, world: CloudWorld) -> None:
    world.capacity("rollout-0", ok=False)
    with pytest.raises(CloudRefused) as caught:
        cloud.launch(order())
    assert caught.value.refusal is Refusal.NO_CAPACITY
    assert not world.exists(NODE)
    assert cloud.machines() == {}
    at_work(cloud, world, OTHER)
    world.capacity("rollout-0", ok=True)
    at_work(cloud, world)


def test_log_is_of_a_node_or_its_slots_newest(cloud: Cloud, world: CloudWorld) -> None:
    at_work(cloud, world, "rollout-0-i9")
    at_work(cloud, world, "rollout-0-i10")
    cloud.launch(order("rollout-0-i10", attempt=2, exit_code=0))
    assert list(cloud.log("rollout-0-i9", follow=False)) == ["attempt 1"]
    assert list(cloud.log("rollout-0", follow=False)) == list(cloud.log("rollout-0-i10", follow=False))
    assert cloud.logged_nodes() == ["rollout-0", "rollout-0-i10", "rollout-0-i9"]
    for name in ("rollout-7", "rollout-0-i1", "rollout"):
        with pytest.raises(KeyError):
            cloud.log(name, follow=False)


def test_log_of_a_gone_machine_is_kept_or_absent(cloud: Cloud, world: CloudWorld) -> None:
    at_work(cloud, world)
    cloud.terminate(NODE)
    if world.keeps_logs:
        assert list(cloud.log(NODE, follow=False)) == ["attempt 1"]
        return
    assert cloud.logged_nodes() == []
    with pytest.raises(KeyError):
        cloud.log(NODE, follow=False)


def test_shared_resources_are_cleaned_up_after_the_last_machine(cloud: Cloud, world: CloudWorld) -> None:
    cloud.clean_up()
    at_work(cloud, world)
    cloud.terminate(NODE)
    cloud.clean_up()
    cloud.clean_up()
    at_work(cloud, world, OTHER)


def test_a_machine_for_each_slot_is_offered_the_trainer_first(cloud: Cloud) -> None:
    assert [(offer.role, offer.market) for offer in cloud.offers()] == [
        (Role.TRAINER, Market.ON_DEMAND), (Role.ROLLOUT, Market.SPOT), (Role.ROLLOUT, Market.SPOT),
    ]  # fmt: skip
