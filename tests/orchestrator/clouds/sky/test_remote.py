"""`up --remote`, from the user's side: a daemon on a machine that SkyPilot provisions.

SkyPilot is a table, twice: the user's, and the controller machine's own, of which the user's knows nothing. The
daemon is a real one, in a thread that stands for that machine.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import structlog
import yaml

from checkpoint.journal import journal
from checkpoint.records import documents
from checkpoint.records.documents import RunRecord
from checkpoint.security.redaction import NAMES_ENV
from checkpoint.security.vouched import NotVouched
from checkpoint.store import layout
from checkpoint.store.run_store import OPTIONS_ENV, Store
from orchestrator import clouds
from orchestrator.cli import main, remote
from orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
from orchestrator.clouds.sky import cloud as sky_cloud
from orchestrator.clouds.sky import watch
from orchestrator.clouds.sky.cloud import SkyCloud
from orchestrator.clouds.sky.remote import FOLDER_ENV, RemoteController, as_shipped
from orchestrator.clouds.sky.sdk.types import CloudCheck, Cluster
from orchestrator.clouds.sky.work import Work
from orchestrator.control import daemon
from orchestrator.home.folder import keep_run_digest
from orchestrator.home.trust import DIGEST_ENV, run_digest
from policies.model import exit_codes
from policies.model.events import TookOver
from policies.model.spec import RunSpec
from policies.model.state import RunState
from policies.model.vocabulary import Refusal, RunPhase
from tests.budget import HANG_S
from tests.rigs.store.server import S3Server
from tests.stand_ins.earlier_trainer import leave_heartbeat
from tests.stand_ins.sky_table import Table
from tests.stand_ins.world import spec

RUN_ID = "sim-0"
CLUSTER = f"grpo-controller-{RUN_ID}"


class Users(Table):
    """The user's SkyPilot, and beyond it the controller machine with a SkyPilot of its own."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.beyond = Table()
        self.set_by_user: dict[str, Any] = {}
        self.reasons: list[str] = []
        self.noted: list[documents.ControllerMachine | None] = []  # in the store, as each launch began
        self._store = store
        self._stop = threading.Event()
        self._daemon: threading.Thread | None = None

    def launch(self, name: str, work: Work, timeout_s: float) -> Cluster:
        documents.read_run(self._store)  # raises: the run comes first
        self.noted.append(documents.CONTROLLER.read(self._store))
        launched = super().launch(name, work, timeout_s)
        if self.is_idle(name, timeout_s):
            self.reasons.append(work.env["GRPO_ORCH_REASON"])
            self._stop = threading.Event()
            steer = (self._store, self.reasons[-1], self._stop)
            self._daemon = threading.Thread(target=daemon.steer, args=steer, daemon=True)
            self._daemon.start()
        return launched

    def is_idle(self, _name: str, _: float) -> bool:
        return self.idle or self._daemon is None or not self._daemon.is_alive()

    def settings(self) -> dict[str, Any]:
        return self.set_by_user

    def log(self, name: str, *, follow: bool) -> Iterator[str]:
        if name not in self.table:
            raise KeyError(name)
        return iter([f"the daemon says{' and goes on' if follow else ''}"])

    def clouds(self) -> list[CloudCheck]:
        return [CloudCheck("aws", True, ""), CloudCheck("gcp", False, "no keys"), CloudCheck("lambda", True, "")]

    def daemon_dies(self) -> None:
        """It leaves its machines as they are."""
        self._stop.set()
        if self._daemon is not None:
            self._daemon.join(HANG_S)


@dataclass
class World:
    """A run's store in a folder, and the user who has it."""

    store: Store
    sky: Users
    record: RunRecord

    @property
    def state(self) -> RunState:
        return journal.recover(self.store).state

    def until(self, wanted: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + HANG_S
        while not wanted():
            assert time.monotonic() < deadline_s, self.state
            time.sleep(0.01)

    def taken_for(self) -> list[str]:
        """Why the run was taken over, each time."""
        events = [event for entry in journal.read(self.store) for event in entry.decoded()]
        return [event.reason for event in events if isinstance(event, TookOver)]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(OPTIONS_ENV, "")  # and put back: the command line sets it
    for module, name, value_s in (
        (watch, "LOOK_EVERY_S", 0.01), (watch, "READ_EVERY_S", 0.01), (sky_cloud, "REGION_WAIT_S", 0.05),
        (remote, "POLL_S", 0.01), (remote, "ENDED_EVERY_S", 0.1), (remote, "DAEMON_TIMEOUT_S", HANG_S),
        (daemon, "TROUBLE_WAIT_S", 0.01),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value_s)
    folder = tmp_path / "mine"
    folder.mkdir()
    trainer = replace(spec().trainer, resources={"infra": "aws/us-east-1/us-east-1a", "accelerators": "H100:8"})
    rollout = replace(spec().rollout, resources={"infra": "aws"})
    store = Store((tmp_path / "store").as_uri())
    run = replace(spec(), cloud="sky", storage=store.url, workdir=str(folder), trainer=trainer, rollout=rollout)
    made = World(store, Users(store), RunRecord(documents.SCHEMA, RUN_ID, time.time(), run))
    monkeypatch.setattr(clouds, "_open_skypilot", lambda *_: made.sky)
    # What the daemon says is said on the other machine.
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    monkeypatch.setattr(structlog, "configure", lambda **_: None)
    # The daemon in its thread is on the other machine.
    monkeypatch.setattr(
        daemon, "open_cloud", lambda record, store: SkyCloud(cast(Any, made.sky.beyond), record, store)
    )
    yield made
    made.sky.daemon_dies()
    structlog.reset_defaults()


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


Cli = Callable[..., Answer]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """`grpo-orch ...`; a failure is one line."""

    def call(*words: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["grpo-orch", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        code = int(ended.value.code or 0)
        assert told.err.count("\n") == (1 if code else 0), told.err
        return Answer(code, told.out, told.err)

    return call


def begun(world: World, cli: Cli) -> None:
    """A run whose daemon lives on its controller machine, with machines of its own."""
    documents.create_run(world.store, world.record)
    leave_heartbeat(world.store)
    done = cli("resume", "--remote", "-d", world.store.url)
    assert done.code == 0, done
    world.until(lambda: len(world.sky.beyond.table) == 3)


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
    assert "sim is stopped; no machine of it is left." in done.out
    assert world.sky.table == world.sky.beyond.table == {}
    assert documents.CONTROLLER.read(world.store) is None
    assert documents.read_commands(world.store) == ()
    assert world.sky.reasons == ["resume"]


def test_a_dead_daemon_is_started_again_to_stop_the_run(world: World, cli: Cli) -> None:
    begun(world, cli)
    world.sky.daemon_dies()
    assert world.sky.beyond.table
    assert cli("down", world.store.url).code == 0
    assert world.sky.table == world.sky.beyond.table == {}
    assert world.taken_for() == ["resume", "down"]


def test_resume_goes_where_the_daemon_lived_and_launches_nothing_twice(world: World, cli: Cli) -> None:
    begun(world, cli)
    held = cli("resume", "-d", world.store.url)
    assert (held.code, "is steered by pid" in held.err) == (exit_codes.HELD, True)
    world.sky.daemon_dies()
    asked = list(world.sky.beyond.asked)
    done = cli("resume", "-d", world.store.url)
    assert done.code == 0, done
    assert f"steered by {CLUSTER}" in done.out
    assert list(world.sky.table) == [CLUSTER]
    assert [call for call in world.sky.beyond.asked if call not in asked and "launch trainer" in call] == []


def test_a_run_that_has_ended_costs_its_machine_until_down(world: World, cli: Cli) -> None:
    begun(world, cli)
    documents.send_command(world.store, "down", time.time())
    world.until(lambda: world.state.phase is RunPhase.STOPPED and not remote.is_steered(world.store))
    assert cli("down", world.store.url).code == 0
    assert world.sky.table == {}
    assert world.sky.reasons == ["resume"], "nothing was left to steer, and a daemon was started"


def test_a_lost_controller_machine_is_said_with_what_it_knew(
    world: World, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(world, cli)
    world.sky.daemon_dies()
    world.sky.table.clear()
    refused = cli("resume", "-d", world.store.url)
    assert refused.code == exit_codes.FAILED
    assert "would not know rollout-0-i1, rollout-1-i1, trainer-0-i1" in refused.err
    assert world.sky.table == {}
    world.sky.beyond = Table()  # a daemon that is started now is started here, and finds nothing
    stop = threading.Event()
    monkeypatch.setattr(
        sys.modules["orchestrator.cli.down"],
        "start_daemon",
        lambda store, _record, reason: daemon.steer(store, reason, stop),
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
    assert f"{CLUSTER} is not on record here" in done.err
    assert world.sky.beyond.table == {}
    assert documents.CONTROLLER.read(world.store) is not None
    world.sky.table.update(launched_there)
    assert cli("down", world.store.url).code == 0
    assert world.sky.table == {}


def test_a_refused_launch_keeps_the_run_and_its_end_is_said(world: World, cli: Cli) -> None:
    documents.create_run(world.store, world.record)
    world.sky.fails = CloudRefused(Refusal.QUOTA, "no quota for it")
    refused = cli("resume", "--remote", "-d", world.store.url)
    assert refused.code == exit_codes.FAILED
    assert "no quota for it; the run is kept: try again with `grpo-orch resume" in refused.err
    assert documents.CONTROLLER.read(world.store) is not None
    world.sky.fails = None
    assert cli("resume", "-d", world.store.url).code == 0
    assert list(world.sky.table) == [CLUSTER]


def test_a_daemon_that_does_not_come_up_is_said_with_its_last_words(
    world: World, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents.create_run(world.store, world.record)
    monkeypatch.setattr(daemon, "steer", lambda *_: None)
    failed = cli("resume", "--remote", "-d", world.store.url)
    assert failed.code == exit_codes.FAILED
    assert (
        f"has ended, and the run has not; its last words: the daemon says; see `sky logs {CLUSTER}`" in failed.err
    )


def test_the_daemons_log_is_read_from_its_machine_and_no_other(world: World, cli: Cli) -> None:
    begun(world, cli)
    assert cli("logs", "daemon", world.store.url).out == "the daemon says\n"
    assert cli("logs", "daemon", "-f", world.store.url).out == "the daemon says and goes on\n"
    other = cli("logs", "rollout-0", world.store.url)
    assert other.code == exit_codes.USAGE
    assert other.err == (
        f"{CLUSTER} alone knows the machines of this run; there is `grpo-orch logs daemon {world.store.url}`\n"
    )
    world.sky.table.clear()
    unknown = cli("logs", "daemon", world.store.url)
    assert unknown.code == exit_codes.USAGE
    assert unknown.err == f"{CLUSTER} is not on record here; ask where it was launched\n"


def test_remote_is_for_sky_alone(world: World, cli: Cli) -> None:
    documents.create_run(world.store, replace(world.record, spec=replace(world.record.spec, cloud="local")))
    refused = cli("resume", "--remote", "-d", world.store.url)
    assert refused.code == exit_codes.USAGE
    assert refused.err == "--remote needs `cloud: sky`; sim is on `cloud: local`, which is this machine\n"
    assert documents.CONTROLLER.read(world.store) is None


def test_up_shows_the_price_and_creates_the_run_before_it_launches(
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
    world.sky._store = store
    done = cli("up", str(tmp_path / "mine" / "run.yaml"), "--remote", "-y", "-d")
    assert done.code == 0, done
    assert any("controller" in line and "on_demand" in line and "55.04" in line for line in done.out.splitlines())
    assert "steered by grpo-controller-sim-" in done.out
    work = world.sky.works[0]
    assert json.loads(work.secrets[OPTIONS_ENV]) == moto.options()
    assert moto.secret_key not in repr(work)
    assert work.workdir == documents.read_run(store).spec.workdir == str(tmp_path / "mine")


def controller(world: World, run: RunSpec) -> RemoteController:
    record = replace(world.record, spec=run)
    documents.create_run(world.store, record)
    return RemoteController(world.sky, record, world.store)  # type: ignore[arg-type]  # a table for SkyPilot


PLACES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    # trainer, rollout; the controller machine's place, the clouds that it reaches
    ({"infra": "aws/us-east-1/us-east-1a"}, {"infra": "AWS"}, {"infra": "aws/us-east-1"}, "aws"),
    ({"cloud": "gcp"}, {"infra": "k8s/ctx"}, {"infra": "gcp"}, "gcp,kubernetes"),
    ({"accelerators": "L4"}, {"infra": "gcp"}, {}, "aws,lambda"),
    ({"infra": "aws"}, {}, {"infra": "aws"}, "aws,lambda"),
    ({"infra": "*/us-east-1"}, {"infra": "aws"}, {"infra": "*/us-east-1"}, "aws,lambda"),
    (
        {"any_of": [{"infra": "aws/us-east-1/us-east-1a"}, {"infra": "aws/us-east-1/us-east-1b"}]},
        {"infra": "aws"},
        {"infra": "aws/us-east-1"},
        "aws",
    ),
    (
        {"ordered": [{"infra": "gcp"}, {"infra": "azure"}]},
        {"infra": "aws"},
        {"any_of": [{"infra": "gcp"}, {"infra": "azure"}]},
        "aws,azure,gcp",
    ),
]


@pytest.mark.parametrize(("trainer", "rollout", "place", "reaches"), PLACES)
def test_it_is_small_on_demand_and_where_the_trainer_may_be(
    world: World, trainer: dict[str, Any], rollout: dict[str, Any], place: dict[str, Any], reaches: str
) -> None:
    run = world.record.spec
    run = replace(
        run,
        trainer=replace(run.trainer, resources=trainer),
        rollout=replace(run.rollout, resources=rollout),
    )
    controller(world, run).launch("up")
    (work,) = world.sky.works
    assert work.resources == {"cpus": "4+", "memory": "8+", "use_spot": False, **place}
    assert work.env["GRPO_ORCH_CLOUDS"] == reaches


def test_it_is_noted_before_it_is_launched_and_is_no_machine_of_the_run(world: World) -> None:
    made = controller(world, world.record.spec)
    made.launch("up")
    assert not made.cluster.startswith(f"grpo-{RUN_ID}-")
    (before,) = world.sky.noted
    after = documents.CONTROLLER.read(world.store)
    assert before is not None
    assert after is not None
    assert (before.cluster, before.infra) == (CLUSTER, "")
    assert (after.cluster, after.infra) == (CLUSTER, "aws/us-east-1/us-east-1a")
    assert before.price_usd_per_h == made.offer().price_usd_per_h > 0  # what it may cost counts before it is there
    assert before.at_s == after.at_s


def test_what_it_has_cost_outlives_its_next_launch_and_its_end(world: World) -> None:
    made = controller(world, world.record.spec)
    made.launch("up")
    first = documents.CONTROLLER.read(world.store)
    assert first is not None
    made.launch("resume")
    again = documents.CONTROLLER.read(world.store)
    assert again is not None
    assert [one.from_s for one in again.before] == [first.at_s]
    assert again.before[0].until_s == again.at_s
    an_hour_on_s = again.at_s + 3600.0
    usd = sum(one.usd for one in documents.controller_stays(world.store, an_hour_on_s))
    assert usd == pytest.approx(again.price_usd_per_h * (an_hour_on_s - first.at_s) / 3600)
    documents.forget_controller(world.store, an_hour_on_s)
    documents.forget_controller(world.store, an_hour_on_s + 9e9)  # a second `down`
    assert documents.CONTROLLER.read(world.store) is None
    kept = documents.controller_stays(world.store, an_hour_on_s + 9e9)
    assert sum(one.usd for one in kept) == pytest.approx(usd)
    made.launch("resume")
    assert len(documents.controller_stays(world.store, an_hour_on_s)) == 3


NO_CAPACITY = CloudRefused(Refusal.NO_CAPACITY, "no capacity")
KEYS_RAN_OUT = CloudRefused(Refusal.CREDENTIALS, "keys ran out")


def test_a_launch_that_was_refused_costs_nothing(world: World) -> None:
    made = controller(world, world.record.spec)
    world.sky.fails = NO_CAPACITY
    for _ in range(2):
        with pytest.raises(CloudRefused):
            made.launch("up")
    noted = documents.CONTROLLER.read(world.store)
    assert noted is not None  # `resume` and `down` still know that the run is to have one
    assert (documents.controller_stays(world.store, 9e9), noted.usd_per_h) == ((), 0.0)
    world.sky.fails = None
    made.launch("resume")
    launched = documents.CONTROLLER.read(world.store)
    assert launched is not None
    (stay,) = documents.controller_stays(world.store, launched.at_s + 3600.0)
    assert stay.usd == pytest.approx(launched.usd_per_h)
    assert stay.usd > 0
    # Its machine is taken away, and no other is to be had: it has cost until then.
    world.sky.table.clear()
    world.sky.fails = NO_CAPACITY
    with pytest.raises(CloudRefused):
        made.launch("resume")
    (gone,) = documents.controller_stays(world.store, 9e9)
    assert gone.from_s == launched.at_s
    assert gone.until_s < launched.at_s + HANG_S


@pytest.mark.parametrize("fails", [KEYS_RAN_OUT, CloudUnavailable("cut off")], ids=["refused", "cut off"])
def test_a_machine_that_may_be_there_costs_on_whatever_its_next_launch_comes_to(
    world: World, fails: CloudRefused | CloudUnavailable
) -> None:
    made = controller(world, world.record.spec)
    if isinstance(fails, CloudRefused):
        made.launch("up")
    world.sky.fails = fails
    with pytest.raises(type(fails)):
        made.launch("resume")
    noted = documents.CONTROLLER.read(world.store)
    assert noted is not None
    assert noted.usd_per_h > 0
    assert documents.controller_stays(world.store, 9e9)[-1].until_s == 9e9


def test_it_gets_the_folder_and_the_daemon_there_hands_its_copy_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller(world, world.record.spec).launch("up")
    (work,) = world.sky.works
    assert work.workdir == world.record.spec.workdir
    assert work.env["GRPO_ORCH_RUN"] == world.store.url
    assert f"~/{work.env['GRPO_ORCH_WHEEL']}" in work.files
    assert as_shipped(world.record) == world.record
    monkeypatch.setenv(FOLDER_ENV, "/home/x/sky_workdir")
    assert as_shipped(world.record).spec.workdir == "/home/x/sky_workdir"


def test_it_is_given_the_secrets_to_hand_on_and_by_what_to_know_the_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"LICENCE": "my-licence-s3cret", "HF_TOKEN": "hf_" + "S3cr3t" * 5}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    made = controller(world, replace(world.record.spec, secrets=("LICENCE",)))
    run_json = world.store.get(layout.RUN)
    keep_run_digest(world.store.url, run_digest(run_json))
    made.launch("up")
    (work,) = world.sky.works
    assert work.secrets.items() >= given.items()
    assert work.env[NAMES_ENV].split(",") == list(given)
    assert work.env[DIGEST_ENV] == run_digest(run_json)
    assert not any(value in repr(work) for value in given.values())
    world.store.put(layout.RUN, run_json.replace(b'"name":', b'"name" :'))
    with pytest.raises(NotVouched):
        made.launch("resume")


def test_the_users_settings_of_skypilot_go_along(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    made = controller(world, world.record.spec)
    made.launch("up")
    world.sky.set_by_user = {"aws": {"vpc_name": "mine"}, "api_server": {"endpoint": "https://me:key@example.com"}}
    made.launch("resume")
    before, after = world.sky.works
    assert "~/.sky/config.yaml" not in before.files
    shipped = Path(after.files["~/.sky/config.yaml"])
    assert shipped.stat().st_mode & 0o777 == 0o600
    assert yaml.safe_load(shipped.read_text()) == {"aws": {"vpc_name": "mine"}}
    assert before.env["SKYPILOT_DISABLE_USAGE_COLLECTION"] == "1"
