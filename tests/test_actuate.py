"""The actuator: what runs beside what, and how a failure comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from orchestrator.actuate import Actuator
from orchestrator.clouds.protocol import CloudRefused, CloudUnavailable, Offer, Order
from policies.snapshot import Confirm, Launch, LaunchRefused, Machine, Terminate
from policies.vocabulary import Market, Refusal

LAUNCH = Launch("rollout-0-i1", "rollout-0", Market.SPOT, 1)
TERMINATE = Terminate("rollout-0-i1")


class Clouds:
    """A cloud whose calls wait until they are let go, and then do as they are told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.go = threading.Event()
        self.fails: Exception | None = None

    def machines(self) -> dict[str, Machine]:
        return {}

    def launch(self, order: Order) -> None:
        self._called(f"launch {order.node}")

    def terminate(self, node: str) -> None:
        self._called(f"terminate {node}")

    def confirm(self, node: str) -> None:
        self._called(f"confirm {node}")

    def offers(self) -> list[Offer]:
        return []

    def log(self, node: str, *, follow: bool) -> Iterator[str]:
        yield from (node, str(follow))

    def logged_nodes(self) -> list[str]:
        return []

    def close(self) -> None: ...

    def _called(self, what: str) -> None:
        self.calls.append(what)
        assert self.go.wait(10)
        if self.fails is not None:
            raise self.fails


@pytest.fixture
def cloud() -> Clouds:
    return Clouds()


@pytest.fixture
def actuator(cloud: Clouds) -> Iterator[Actuator]:
    made = Actuator(cloud, lambda _: {})
    yield made
    cloud.go.set()
    made.close()


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_an_action_that_runs_is_not_started_again(cloud: Clouds, actuator: Actuator):
    for _ in range(3):
        actuator.submit((LAUNCH, Confirm("trainer-0-i1")))
    until(lambda: len(cloud.calls) == 2)
    assert sorted(cloud.calls) == ["confirm trainer-0-i1", "launch rollout-0-i1"]


def test_a_machine_can_be_given_up_while_it_is_being_launched(cloud: Clouds, actuator: Actuator):
    actuator.submit((LAUNCH,))
    until(lambda: cloud.calls == ["launch rollout-0-i1"])
    actuator.submit((TERMINATE,))
    until(lambda: cloud.calls == ["launch rollout-0-i1", "terminate rollout-0-i1"])


def test_a_refusal_is_told_once(cloud: Clouds, actuator: Actuator):
    cloud.fails = CloudRefused(Refusal.QUOTA, "no vCPUs left")
    cloud.go.set()
    actuator.submit((LAUNCH,))
    told: list[LaunchRefused] = []
    until(lambda: bool(told.extend(actuator.collect()) or told))
    assert told == [LaunchRefused("rollout-0-i1", Refusal.QUOTA, "no vCPUs left")]
    assert actuator.collect() == ()


def test_a_cloud_that_does_not_answer_is_not_asked_again_at_once(cloud: Clouds, actuator: Actuator):
    cloud.fails = CloudUnavailable("the API server is away")
    cloud.go.set()
    actuator.submit((LAUNCH,))
    until(lambda: not actuator.collect() and len(cloud.calls) == 1 and not actuator._running)
    actuator.submit((LAUNCH, TERMINATE))
    until(lambda: cloud.calls == ["launch rollout-0-i1", "terminate rollout-0-i1"])
