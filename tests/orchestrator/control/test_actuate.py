"""The actuator: what runs beside what, and how a failure comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_orch.checkpoint.journal import Fenced
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store.backends import BytesLike
from grpo_orch.checkpoint.store.errors import StoreUnavailable
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.clouds.protocol import CloudRefused, CloudUnavailable, LaunchOrder
from grpo_orch.orchestrator.control.actuate import ACT_WITHIN_S, Actuator
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.model.vocabulary import Market, Refusal
from grpo_orch.policies.tick.snapshot import Confirm, Launch, LaunchRefused, Terminate, WriteFork
from tests.budget import HANG_S, until

LAUNCH = Launch("rollout-0-i1", "rollout-0", Market.SPOT, 1)
TERMINATE = Terminate("rollout-0-i1")


class Clouds:
    """A cloud whose calls wait until they are let go, and then do as they are told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.go = threading.Event()
        self.fails: Exception | None = None

    def launch(self, order: LaunchOrder) -> None:
        self._called(f"launch {order.node}")

    def terminate(self, node: str) -> None:
        self._called(f"terminate {node}")

    def confirm(self, node: str) -> None:
        self._called(f"confirm {node}")

    def _called(self, what: str) -> None:
        self.calls.append(what)
        assert self.go.wait(HANG_S)
        if self.fails is not None:
            raise self.fails


@pytest.fixture
def cloud() -> Clouds:
    return Clouds()


class AwayStore(Store):
    """Refuses so many creations before it takes one."""

    refuses = 0

    def create(self, key: str, data: BytesLike) -> None:
        if self.refuses:
            self.refuses -= 1
            raise StoreUnavailable("away")
        super().create(key, data)


@pytest.fixture
def store() -> AwayStore:
    return AwayStore(f"memory://actuate-{time.monotonic_ns()}")


@pytest.fixture
def actuator(cloud: Clouds, store: AwayStore) -> Iterator[Actuator]:
    made = make(cloud, store)
    yield made
    cloud.go.set()
    made.close()


def make(cloud: Clouds, store: AwayStore, **options: Any) -> Actuator:
    return Actuator(cloud, store, lambda _: {}, **options)  # type: ignore[arg-type]  # of a cloud it wants the calls alone


def runs(name: str) -> bool:
    """Return whether the thread of an action runs."""
    return any(thread.name == name for thread in threading.enumerate())


def held() -> None:
    """The journal has not moved on."""


def test_an_action_that_runs_is_not_started_again(cloud: Clouds, actuator: Actuator) -> None:
    for _ in range(3):
        actuator.submit((LAUNCH, Confirm("trainer-0-i1")), held)
    until("done", lambda: len(cloud.calls) == 2)
    assert sorted(cloud.calls) == ["confirm trainer-0-i1", "launch rollout-0-i1"]


def test_launching_machine_can_be_terminated(cloud: Clouds, actuator: Actuator) -> None:
    actuator.submit((LAUNCH,), held)
    until("done", lambda: cloud.calls == ["launch rollout-0-i1"])
    actuator.submit((TERMINATE,), held)
    until(
        "what the actuator was asked for", lambda: cloud.calls == ["launch rollout-0-i1", "terminate rollout-0-i1"]
    )


def test_refusal_is_returned_once(cloud: Clouds, actuator: Actuator) -> None:
    cloud.fails = CloudRefused(Refusal.QUOTA, "no vCPUs left")
    cloud.go.set()
    actuator.submit((LAUNCH,), held)
    assert until("done", actuator.collect) == (LaunchRefused("rollout-0-i1", Refusal.QUOTA, "no vCPUs left"),)
    assert actuator.collect() == ()


@pytest.mark.parametrize("left", [False, True])
def test_refusal_of_terminating_node_is_returned_afterwards(
    cloud: Clouds, actuator: Actuator, monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    refused = threading.Event()

    def launch(_: LaunchOrder) -> None:
        assert refused.wait(HANG_S)
        raise CloudRefused(Refusal.UNKNOWN, "called off", machine_exists=left)

    monkeypatch.setattr(cloud, "launch", launch)
    actuator.submit((LAUNCH,), held)
    actuator.submit((TERMINATE,), held)
    refused.set()
    until("done", lambda: not runs("Launch rollout-0-i1"))
    assert actuator.collect() == ()
    cloud.go.set()
    refusal = LaunchRefused("rollout-0-i1", Refusal.UNKNOWN, "called off", left)
    assert until("done", actuator.collect) == (refusal,)


def test_unavailable_cloud_is_not_called_again_at_once(cloud: Clouds, store: AwayStore) -> None:
    actuator = make(cloud, store, unavailable_wait_s=HANG_S)
    cloud.fails = CloudUnavailable("the API server is away")
    cloud.go.set()
    actuator.submit((LAUNCH,), held)
    until("the launch has ended", lambda: cloud.calls and not runs("Launch rollout-0-i1"))
    assert actuator.collect() == ()
    actuator.submit((LAUNCH, TERMINATE), held)
    until(
        "what the actuator was asked for", lambda: cloud.calls == ["launch rollout-0-i1", "terminate rollout-0-i1"]
    )


def test_a_fork_is_written_though_the_store_was_away(cloud: Clouds, store: AwayStore) -> None:
    actuator = make(cloud, store, unavailable_wait_s=0.01)
    store.refuses = 2
    fork = Fork(1, "0-8", {"beta": 0.08})

    def written() -> bool:
        actuator.submit((WriteFork(fork),), held)
        actuator.collect()
        return documents.newest_timeline(store) == 1

    until("done", written)
    assert documents.read_forks(store) == (fork,)


def test_fenced_controller_starts_nothing(cloud: Clouds, actuator: Actuator) -> None:
    def replaced() -> None:
        raise Fenced("b/2 wrote journal entry 7")

    with pytest.raises(Fenced):
        actuator.submit((LAUNCH, TERMINATE), replaced)
    assert cloud.calls == []
    actuator.submit((), replaced)  # nothing is to be done, and nothing is read
    actuator.submit((TERMINATE,), held)
    until("done", lambda: cloud.calls == ["terminate rollout-0-i1"])
    actuator.submit((TERMINATE,), replaced)  # it is under way already


def test_action_fenced_too_long_ago_is_dropped(cloud: Clouds, store: AwayStore) -> None:
    """This process is stopped between its look at the journal and the call."""
    now_s = [100.0]
    actuator = make(cloud, store, clock=lambda: now_s[0])

    def stopped() -> None:
        now_s[0] += ACT_WITHIN_S + 1

    cloud.go.set()
    actuator.submit((TERMINATE,), stopped)
    until("done", lambda: not runs("Terminate rollout-0-i1"))
    assert (actuator.collect(), cloud.calls) == ((), [])
    actuator.submit((TERMINATE,), held)
    until("done", lambda: cloud.calls == ["terminate rollout-0-i1"])
