"""`up --remote`, and what follows it, from the user's side."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store.run_store import OPTIONS_ENV, Store
from grpo_orch.orchestrator.cli import down, remote
from grpo_orch.orchestrator.clouds.protocol import CloudRefused
from grpo_orch.orchestrator.control import daemon
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.vocabulary import Refusal, RunPhase
from tests.budget import until
from tests.orchestrator.clouds.sky.remote.conftest import CLUSTER, World
from tests.rigs.command_line import Answer, Cli
from tests.rigs.store.server import S3Server
from tests.stand_ins.control_plane import Table
from tests.stand_ins.earlier_trainer import leave_heartbeat


@pytest.fixture
def cli(grpo_orch: Cli) -> Cli:
    """`grpo-orch ...`; a failure is one line."""

    def call(*words: str) -> Answer:
        told = grpo_orch(*words)
        assert told.err.count("\n") == (1 if told.code else 0), told.err
        return told

    return call


def begun(world: World, cli: Cli) -> None:
    """A run whose daemon lives on its controller machine, with machines of its own."""
    world.create()
    leave_heartbeat(world.store)
    done = cli("resume", "--remote", "-d", world.store.url)
    assert done.code == 0, done
    until("so", lambda: len(world.sky.beyond.table) == 3)


def test_down_through_the_store_leaves_nothing(world: World, cli: Cli) -> None:
    begun(world, cli)
    assert list(world.sky.table) == [CLUSTER]
    assert world.sky.group
    assert world.sky.beyond.group
    world.sky.beyond.shutting_down = 3
    done = cli("down", world.store.url)
    assert done.code == 0, done
    assert not world.sky.group
    assert not world.sky.beyond.group
    assert "sim: stopped; all its machines are returned." in done.out
    assert world.sky.table == world.sky.beyond.table == {}
    assert documents.CONTROLLER.read(world.store) is None
    assert documents.read_commands(world.store) == ()
    assert world.sky.reasons == ["resume"]


def test_a_dead_daemon_is_started_again_to_stop_the_run(world: World, cli: Cli) -> None:
    begun(world, cli)
    world.daemon_dies()
    assert world.sky.beyond.table
    assert cli("down", world.store.url).code == 0
    assert world.sky.table == world.sky.beyond.table == {}
    assert world.taken_for() == ["resume", "down"]


def test_resume_finds_daemons_machine_and_launches_once(world: World, cli: Cli) -> None:
    begun(world, cli)
    held = cli("resume", "-d", world.store.url)
    assert (held.code, "already has a daemon: pid" in held.err) == (exit_codes.HELD, True)
    world.daemon_dies()
    asked = list(world.sky.beyond.asked)
    done = cli("resume", "-d", world.store.url)
    assert done.code == 0, done
    assert f"is running on {CLUSTER}; " in done.out
    assert list(world.sky.table) == [CLUSTER]
    assert [call for call in world.sky.beyond.asked if call not in asked and "launch trainer" in call] == []


def test_a_run_that_has_ended_costs_its_machine_until_down(world: World, cli: Cli) -> None:
    begun(world, cli)
    documents.send_command(world.store, "down", time.time())
    until("so", lambda: world.state.phase is RunPhase.STOPPED and not remote.has_daemon(world.store))
    assert cli("down", world.store.url).code == 0
    assert world.sky.table == {}
    assert world.sky.reasons == ["resume"], "nothing was left to steer, and a daemon was started"


def test_lost_controller_machine_is_reported_with_its_state(
    world: World, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(world, cli)
    world.daemon_dies()
    world.sky.table.clear()
    refused = cli("resume", "-d", world.store.url)
    assert refused.code == exit_codes.FAILED
    assert "would not know rollout-0-i1, rollout-1-i1, trainer-0-i1" in refused.err
    assert world.sky.table == {}
    world.sky.beyond = Table()  # a daemon that is started now is started here, and finds nothing
    stop = threading.Event()
    monkeypatch.setattr(
        down,
        "start_daemon",
        lambda store, _record, reason: daemon.control_run(store, reason, stop),
    )
    told = cli("down", world.store.url)
    assert told.code == exit_codes.FAILED
    assert (
        f"{CLUSTER} is gone, and with it SkyPilot's records of rollout-0-i1, rollout-1-i1, trainer-0" in told.err
    )
    assert "labelled `grpo-orch: grpo-sim-0-...`" in told.err
    assert (world.state.phase, documents.CONTROLLER.read(world.store)) == (RunPhase.STOPPED, None)
    assert cli("down", world.store.url).code == 0, "what is lost was told, and the run is an ordinary one"


def test_the_controller_of_another_user_stops_the_run_and_stays(world: World, cli: Cli) -> None:
    begun(world, cli)
    launched_there = dict(world.sky.table)
    world.sky.table.clear()
    done = cli("down", world.store.url)
    assert done.code == exit_codes.FAILED
    assert f"this machine has no record of {CLUSTER}" in done.err
    assert world.sky.beyond.table == {}
    assert documents.CONTROLLER.read(world.store) is not None
    world.sky.table.update(launched_there)
    assert cli("down", world.store.url).code == 0
    assert world.sky.table == {}


def test_refused_launch_keeps_the_run_and_is_reported(world: World, cli: Cli) -> None:
    world.create()
    world.sky.fails = CloudRefused(Refusal.QUOTA, "no quota for it")
    refused = cli("resume", "--remote", "-d", world.store.url)
    assert refused.code == exit_codes.FAILED
    assert "no quota for it; the store keeps the run: retry with `grpo-orch resume" in refused.err
    assert documents.CONTROLLER.read(world.store) is not None
    world.sky.fails = None
    assert cli("resume", "-d", world.store.url).code == 0
    assert list(world.sky.table) == [CLUSTER]


def test_daemon_that_does_not_start_is_reported_with_its_log(
    world: World, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.create()
    monkeypatch.setattr(daemon, "control_run", lambda *_: None)
    failed = cli("resume", "--remote", "-d", world.store.url)
    assert failed.code == exit_codes.FAILED
    assert (
        f"exited before the run ended; its last log lines: the daemon says; see `sky logs {CLUSTER}`" in failed.err
    )


def test_down_without_a_started_daemon_returns_the_machine(
    world: World, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.create()
    steer = daemon.control_run
    monkeypatch.setattr(daemon, "control_run", lambda *_: None)
    assert cli("resume", "--remote", "-d", world.store.url).code == exit_codes.FAILED
    monkeypatch.setattr(daemon, "control_run", steer)
    monkeypatch.setattr(
        down,
        "start_daemon",
        lambda store, _record, reason: steer(store, reason, threading.Event()),
    )
    launches = len(world.sky.works)
    done = cli("down", world.store.url)
    assert done.code == 0, done
    assert (world.sky.table, len(world.sky.works)) == ({}, launches)
    assert (world.state.phase, documents.CONTROLLER.read(world.store)) == (RunPhase.STOPPED, None)
    assert documents.read_commands(world.store) == ()


def test_the_daemons_log_is_read_from_its_machine_and_no_other(world: World, cli: Cli) -> None:
    begun(world, cli)
    assert cli("logs", "daemon", world.store.url).out == "the daemon says\n"
    assert cli("logs", "daemon", "-f", world.store.url).out == "the daemon says and goes on\n"
    other = cli("logs", "rollout-0", world.store.url)
    assert other.code == exit_codes.USAGE
    assert other.err == (
        f"only {CLUSTER} has the logs of this run's machines; see `grpo-orch logs daemon {world.store.url}`\n"
    )
    world.sky.table.clear()
    unknown = cli("logs", "daemon", world.store.url)
    assert unknown.code == exit_codes.USAGE
    assert unknown.err == f"this machine has no record of {CLUSTER}; run the command where it was launched\n"


def test_remote_is_for_sky_alone(world: World, cli: Cli) -> None:
    documents.create_run(world.store, replace(world.record, spec=replace(world.record.spec, cloud="local")))
    refused = cli("resume", "--remote", "-d", world.store.url)
    assert refused.code == exit_codes.USAGE
    assert refused.err == "--remote needs `cloud: sky`; sim has `cloud: local`, which is this machine\n"
    assert documents.CONTROLLER.read(world.store) is None


def test_up_shows_price_and_creates_run_before_launch(
    world: World, cli: Cli, moto: S3Server, tmp_path: Path
) -> None:
    url = moto.url(f"remote-{time.time_ns()}")
    run_yaml = {
        "name": "sim",
        "cloud": "sky",
        "storage": {"url": url, "options": moto.options()},
        "trainer": {
            "model": "m/m",
            "dataset": "d/d",
            "reward_funcs": ["rewards.f"],
            "resources": {"infra": "aws"},
        },
        "rollout": {"resources": {"infra": "aws"}},
        "grpo": {"max_steps": 2},
    }
    (tmp_path / "mine" / "rewards.py").write_text(
        "def f(completions, **_):\n    return [0.0 for _ in completions]\n"
    )
    (tmp_path / "mine" / "run.yaml").write_text(yaml.safe_dump(run_yaml))
    store = Store(url, options=moto.options())
    world.store = store
    done = cli("up", str(tmp_path / "mine" / "run.yaml"), "--remote", "-y", "-d")
    assert done.code == 0, done
    assert any("controller" in line and "on_demand" in line and "55.04" in line for line in done.out.splitlines())
    assert "is running on grpo-controller-sim-" in done.out
    work = world.sky.works[0]
    assert json.loads(work.secrets[OPTIONS_ENV]) == moto.options()
    assert moto.secret_key not in repr(work)
    assert work.workdir == documents.read_run(store).spec.workdir == str(tmp_path / "mine")
