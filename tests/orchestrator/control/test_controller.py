"""The controller's own promise: what it knows is what its journal says, wherever the store goes away."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.journal import Fenced, Journal
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store.backends import BytesLike
from grpo_orch.checkpoint.store.errors import StoreUnavailable
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.control.controller import Controller, Decide
from grpo_orch.policies.control.decide import decide
from grpo_orch.policies.model.events import PitfallFound
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.state import RunState
from grpo_orch.policies.model.vocabulary import MachineState, NodePhase, Role, RunPhase
from grpo_orch.policies.tick.snapshot import Action, Confirm, Decision, LaunchRefused, Machine, Snapshot
from tests.stand_ins.world import World

names = itertools.count()


class LeavingStore(Store):
    """Fails one coming call: the write of an entry, before or after its effect, or a delete."""

    leaves: str | None = None

    def create(self, key: str, data: BytesLike) -> None:
        leaves = self.leaves if key.startswith("journal/") else None
        if leaves in ("before", "after"):
            self.leaves = None
        if leaves != "before":
            super().create(key, data)
        if leaves in ("before", "after"):
            raise StoreUnavailable(f"create {key}")

    def delete(self, keys: Sequence[str]) -> None:
        if self.leaves == "delete":
            self.leaves = None
            raise StoreUnavailable(f"delete {keys}")
        super().delete(keys)


class Eyes:
    """Looks at the simulated world."""

    def __init__(self, world: World, store: Store) -> None:
        self._world = world
        self._store = store

    away = False
    cloud_away = False

    def observe(
        self,
        now_s: float,  # noqa: ARG002  # the Observer's own signature
        refused: tuple[LaunchRefused, ...],  # noqa: ARG002
        state: RunState,  # noqa: ARG002
        steady_s: float,
    ) -> Snapshot:
        if self.away:
            raise StoreUnavailable("read trainer.json")
        self._world.commands = list(documents.read_commands(self._store))
        snapshot = replace(self._world.snapshot(), steady_s=steady_s)
        return replace(snapshot, machines=None, steady_s=0.0) if self.cloud_away else snapshot


class Hands:
    """Acts on the simulated world at once."""

    def __init__(self, world: World) -> None:
        self._world = world

    def collect(self) -> tuple[LaunchRefused, ...]:
        return ()

    def submit(self, actions: tuple[Action, ...], fence: Callable[[], None]) -> None:
        if actions:
            fence()
        for action in actions:
            self._world.act(action)


class Rig:
    """A simulated run, its store, and its controller with eyes and hands in the simulated world."""

    def __init__(self, decide: Decide = decide) -> None:
        self.store = LeavingStore(f"memory://controller-{next(names)}", retry_s=0.0)
        self.world = World(max_steps=10**6)
        self.eyes = Eyes(self.world, self.store)
        writer = Journal(self.store, "a/1")
        state = writer.take_over(self.world.now_s, "a", 1, "up")
        hands: Any = Hands(self.world)  # stand-ins for cloud and processes
        eyes: Any = self.eyes
        self.controller = Controller(self.store, self.world.spec, writer, state, eyes, hands, decide)

    def goes_on(self, ticks: int) -> None:
        for _ in range(ticks):
            self.controller.tick(self.world.now_s)
            self.world.advance()


@pytest.mark.parametrize("leaves", ["before", "after", "delete"])
def test_store_outage_in_a_tick_leaves_state_and_journal_equal(leaves: str) -> None:
    """At each entry in turn; the run goes on, and its one controller is never taken for a replaced one."""
    for when in (0, 1, 5):
        rig = Rig()
        store, world, controller = rig.store, rig.world, rig.controller
        for tick in range(60):
            if tick == 30:
                documents.send_command(store, "down", world.now_s)
            if tick in (when, 30):
                store.leaves = leaves
            try:
                controller.tick(world.now_s)
            except StoreUnavailable:
                continue
            finally:
                world.advance()
            assert controller.state == journal.recover(store).state
        assert controller.state.phase is RunPhase.STOPPED
        assert len(controller.state.commands_taken) == 1
        assert store.leaves is None


@pytest.mark.parametrize(("leaves", "journalled"), [("before", ["second"]), ("after", ["first", "second"])])
def test_events_after_a_lost_answer_get_their_own_entry(leaves: str, journalled: list[str]) -> None:
    """And not the one that may have been stored: that number is settled before another look."""
    told = iter(("first", "second"))

    def decide(state: RunState, snapshot: Snapshot, spec: RunSpec) -> Decision:  # noqa: ARG001  # a decision's signature
        return Decision((PitfallFound(next(told), 1, ""),), (Confirm("rollout-0-i1"),), 1.0, "")

    rig = Rig(decide=decide)
    store, world, controller = rig.store, rig.world, rig.controller
    store.leaves = leaves
    with pytest.raises(StoreUnavailable):
        controller.tick(world.now_s)
    controller.tick(world.now_s)
    assert world.confirmed == ["rollout-0-i1"]
    topics = [f"pitfall {kind}" for kind in journalled]
    assert list(journal.recover(store).state.reports) == list(controller.state.reports) == topics


def test_replaced_controller_acts_no_more_even_without_events() -> None:
    """It was stopped; the machine that it does not know is its successor's."""
    rig = Rig()
    rig.goes_on(30)
    world, controller = rig.world, rig.controller
    Journal(rig.store, "b/2").take_over(world.now_s, "b", 2, "resume")
    world.machines["rollout-0-i7"] = Machine("rollout-0-i7", MachineState.UP)
    with pytest.raises(Fenced, match="b/2"):
        controller.tick(world.now_s)
    assert "rollout-0-i7" in world.machines


def test_no_silence_from_before_an_outage_counts() -> None:
    """The trainer beats all the time; its controller does not see it for a while, and then sees its last beat."""
    rig = Rig()
    rig.goes_on(40)
    world, eyes, controller = rig.world, rig.eyes, rig.controller
    eyes.away = True
    for _ in range(30):
        world.now_s += 5.0
        with pytest.raises(StoreUnavailable):
            controller.tick(world.now_s)
    eyes.away = False
    controller.tick(world.now_s)
    assert "trainer-0-i1" in world.up(Role.TRAINER)
    assert controller.state.nodes["trainer-0-i1"].phase is NodePhase.SERVING


def test_silence_does_not_count_over_unanswered_listings() -> None:
    """The trainer is silent; from the first look that finds everybody it has its whole time."""
    rig = Rig()
    rig.goes_on(40)
    world, eyes, controller = rig.world, rig.eyes, rig.controller
    for _ in range(20):
        world.now_s += 5.0
        controller.tick(world.now_s)
    eyes.cloud_away = True
    for after_s in (25.0, *[5.0] * 30):
        world.now_s += after_s
        controller.tick(world.now_s)
        assert controller.state.nodes["trainer-0-i1"].phase is NodePhase.SERVING
    eyes.cloud_away = False
    for _ in range(25):
        world.now_s += 5.0
        controller.tick(world.now_s)
        assert controller.state.nodes["trainer-0-i1"].phase is NodePhase.SERVING
    world.now_s += 5.0
    controller.tick(world.now_s)
    assert controller.state.nodes["trainer-0-i1"].phase is NodePhase.TERMINATING
