"""When a machine that nothing is heard from is given up, and when not."""

from __future__ import annotations

import socket
import time
from dataclasses import replace

import pytest

from grpo_orch.orchestrator.clouds.protocol import CloudUnavailable
from grpo_orch.orchestrator.clouds.sky import watch as suspicion
from grpo_orch.orchestrator.clouds.sky.records import Cluster, ClusterState
from grpo_orch.orchestrator.clouds.sky.watch import DEAD, Clusters, Suspicions, accepts_connections

NAME = "grpo-tiny-1f2e3d4c-rollout-0-i1"
UP = Cluster(NAME, ClusterState.UP, "aws/us-east-1/us-east-1a", True, 0.4, ("198.18.0.7", 22))
INIT = replace(UP, state=ClusterState.STARTING)


class World:
    """One machine: whether its SSH port answers, and what SkyPilot says of it."""

    def __init__(self) -> None:
        self.answers = True
        self.says: Cluster | Exception | None = UP
        self.has: bool | None = None  # whether the cloud has it; None: it cannot be asked from here
        self.asked = 0
        self.clusters = Clusters()
        self.clusters.record(UP)
        self.suspicions = Suspicions(self, self.clusters, lambda _: self.answers)  # type: ignore[arg-type]  # it confirms

    def confirm(self, name: str, timeout_s: float) -> Cluster | None:
        assert (name, timeout_s) == (NAME, suspicion.QUERY_TIMEOUT_S)
        self.asked += 1
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    def has_machines(self, name: str) -> bool | None:
        assert name == NAME
        if isinstance(self.says, Exception):
            raise self.says
        return self.has

    def look(self) -> bool:
        return self.suspicions.check(NAME)

    @property
    def lost(self) -> str:
        return self.clusters.entries()[NAME].lost


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(suspicion, "QUERY_EVERY_S", 0.0)
    return World()


@pytest.mark.parametrize(
    ("answers", "has", "says", "asked", "lost"),
    [
        (True, None, [UP], 0, ""),  # it answers, and nobody else is asked
        (True, None, [INIT], 0, ""),  # busy: SkyPilot cannot talk to it
        (False, False, [UP], 0, "preempted"),  # at the cloud's word
        (False, None, [None], 1, "preempted"),  # where the cloud cannot be asked SkyPilot is
        (False, True, [INIT], 1, ""),
        (False, True, [INIT, INIT], 2, DEAD),
        (False, None, [INIT, INIT], 2, DEAD),
        (False, None, [INIT, UP, INIT], 3, ""),  # a word of life between
    ],
)
def test_silent_machine_is_classified(
    world: World, answers: bool, has: bool | None, says: list[Cluster | None], asked: int, lost: str
) -> None:
    world.answers, world.has = answers, has
    for said in says:
        world.says = said and replace(said, ssh_address=None)
        there = world.look()
    assert (world.asked, world.lost) == (asked, lost)
    assert there == answers or len(says) > 1


def test_machine_still_launching_is_not_dead(world: World) -> None:
    world.clusters.forget(NAME)
    world.clusters.record(INIT)
    world.answers, world.says = False, INIT
    for _ in range(3):
        world.look()
    assert world.lost == ""


def test_silence_is_counted_from_the_last_answer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    world.has = True
    for answers, passes_s in ((True, 1), (False, 7), (True, 7), (False, 7), (False, 7)):
        world.answers = answers
        world.look()
        assert world.lost == ""
        now_s += passes_s
    world.look()
    assert world.lost == DEAD


def test_no_verdict_while_the_cloud_is_unreachable(world: World) -> None:
    world.look()
    world.answers, world.says = False, CloudUnavailable("no network")
    with pytest.raises(CloudUnavailable):
        world.look()
    assert world.lost == ""


def test_lost_machine_is_not_queried(world: World) -> None:
    world.clusters.mark_lost(NAME, "preempted")
    assert not world.look()
    assert not world.suspicions.check("never-was")
    assert world.asked == 0


def test_queries_are_limited_in_rate(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspicion, "QUERY_EVERY_S", 1000.0)
    world.answers = False
    for _ in range(5):
        world.look()
    assert world.asked == 1


def test_a_listening_port_accepts_and_a_closed_one_does_not() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = server.getsockname()
        assert not accepts_connections(address)
        server.listen()
        assert accepts_connections(address)
