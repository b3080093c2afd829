"""`resume` and `down` on another machine: with the run's secret or without, with a shared SkyPilot or without."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from grpo_orch.checkpoint.records import documents
from grpo_orch.orchestrator.cli import down, start
from grpo_orch.orchestrator.clouds.protocol import CloudUnavailable
from grpo_orch.orchestrator.clouds.sky.records import Cluster, ClusterState
from grpo_orch.orchestrator.clouds.sky.watch import UnrecordedClusters
from grpo_orch.orchestrator.home import run_token, token_file
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import SpecProved
from grpo_orch.policies.model.vocabulary import NodePhase
from tests.budget import until
from tests.rigs.command_line import Cli
from tests.stand_ins.control_plane import PREFIX, RUN_ID, SkyUser, Table, on_sky

Answers = Callable[..., tuple[int, str]]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SkyUser]:
    """A run, SkyPilot as a table, and a user who changes machines."""
    made = SkyUser(tmp_path, monkeypatch, on_sky("aws/us-east-1")).create()
    made.happens(SpecProved())
    for command in (start, down):
        monkeypatch.setattr(command, "start_daemon", made.start_daemon)
    yield made
    made.daemon_dies()
    structlog.reset_defaults()


@pytest.fixture
def cli(world: SkyUser, grpo_orch: Cli) -> Answers:
    """`grpo-orch ... RUN`: its exit code, and what it said is wrong."""

    def call(*words: str) -> tuple[int, str]:
        code, _, err = grpo_orch(*words, world.store.url)
        return code, err

    return call


def phases(world: SkyUser) -> set[NodePhase]:
    return {node.phase for node in world.state.nodes.values()}


def test_machines_are_taken_over_with_their_secret_and_not_without(
    world: SkyUser, cli: Answers, tmp_path: Path
) -> None:
    assert cli("resume", "-d")[0] == 0
    until("so", lambda: PREFIX + "trainer-0-i1" in world.sky.table)
    held = token_file(RUN_ID)
    world.daemon_dies()

    world.sit_at("second")
    code, said = cli("resume", "-d")
    assert code == exit_codes.FAILED
    assert (
        f"trainer-0-i1 were started with a secret that this machine does not have; copy {token_file(RUN_ID)}"
        in said
    )
    shutil.copy(held, token_file(RUN_ID))
    assert cli("resume", "-d") == (0, "")
    world.daemon_dies()

    world.sit_at("third")
    world.start_daemon(world.store, documents.read_run(world.store), "down")  # one that was cut off
    world.daemon_dies()
    assert cli("resume", "-d")[0] == exit_codes.FAILED
    assert cli("down") == (0, "")
    assert world.sky.table == {}
    assert cli("resume", "-d") == (0, "")  # with a secret of its own
    until("so", lambda: any(run_token(RUN_ID) in work.secrets.values() for work in world.sky.works))
    world.daemon_dies()
    assert cli("resume", "-d") == (0, "")
    stored = [path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert not any(run_token(RUN_ID).encode() in data for data in stored)


def test_a_skypilot_that_launched_nothing_finds_watches_and_returns_the_runs_machines(
    world: SkyUser, cli: Answers
) -> None:
    assert cli("resume", "-d")[0] == 0
    until("so", lambda: len(world.sky.table) == 3)
    for node in sorted(world.state.nodes):
        world.machine_says(node, 1)
    until("so", lambda: phases(world) == {NodePhase.BOOTING})
    world.daemon_dies()

    world.sky = Table(elsewhere=world.sky.table)
    assert cli("resume", "-d") == (0, "")
    del world.sky.elsewhere[PREFIX + "rollout-0-i1"]  # preempted
    until("so", lambda: PREFIX + "rollout-0-i2" in world.sky.table)
    world.machine_says("trainer-0-i1", 1, exit_code=exit_codes.FAILED)
    until("so", lambda: PREFIX + "trainer-0-i2" in world.sky.table)
    until("so", lambda: "end trainer-0-i1" in world.sky.asked)
    assert not [asked for asked in world.sky.asked if re.fullmatch("launch .*-i1", asked)]
    assert set(world.sky.elsewhere) == {PREFIX + "rollout-1-i1"}

    assert cli("down") == (0, "")
    assert world.sky.table == world.sky.elsewhere == {}
    assert not world.sky.group


def test_what_appears_at_the_very_end_is_taken_back_before_the_security_group() -> None:
    late = Cluster(PREFIX + "rollout-0-i1", ClusterState.UP, "aws/us-east-1/us-east-1a", True, 0.4, None)
    sky = Table(elsewhere={late.name: late})
    sky.group = True
    unrecorded = UnrecordedClusters(sky, PREFIX, ["aws/us-east-1"])  # type: ignore[arg-type]  # a table for SkyPilot
    with pytest.raises(CloudUnavailable, match=late.name):
        unrecorded.clean_up()
    assert (sky.elsewhere, sky.group) == ({}, True)
    unrecorded.clean_up()
    assert not sky.group


def test_down_returns_what_no_record_and_no_journal_knows(world: SkyUser, cli: Answers) -> None:
    lost = Cluster(PREFIX + "rollout-5-i1", ClusterState.UP, "aws/us-east-1/us-east-1a", True, 0.4, None)
    foreign = replace(lost, name=PREFIX + "0a1b2c3d-rollout-0-i1")  # of a run whose name begins like this one's id
    world.sky = Table(elsewhere={one.name: one for one in (lost, foreign)})
    assert cli("down")[0] == 0
    assert list(world.sky.elsewhere) == [foreign.name]
