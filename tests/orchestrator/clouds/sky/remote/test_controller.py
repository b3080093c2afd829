"""The controller machine: where it is, what it costs, and what goes along with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.security.redaction import NAMES_ENV
from grpo_orch.checkpoint.security.vouched import UntrustedRun
from grpo_orch.checkpoint.store import layout
from grpo_orch.orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
from grpo_orch.orchestrator.clouds.sky.remote_controller import FOLDER_ENV, RemoteController, as_shipped
from grpo_orch.orchestrator.home import DIGEST_ENV, run_digest, save_run_digest
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.vocabulary import Refusal
from tests.budget import HANG_S
from tests.orchestrator.clouds.sky.remote.conftest import CLUSTER, World
from tests.stand_ins.control_plane import RUN_ID


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
def test_controller_is_small_on_demand_in_trainers_region(
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


def test_controller_is_recorded_before_launch_and_is_no_node(world: World) -> None:
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


def test_cost_of_a_controller_outlives_its_relaunch_and_end(world: World) -> None:
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
    usd = sum(one.usd for one in documents.controller_rentals(world.store, an_hour_on_s))
    assert usd == pytest.approx(again.price_usd_per_h * (an_hour_on_s - first.at_s) / 3600)
    documents.forget_controller(world.store, an_hour_on_s)
    documents.forget_controller(world.store, an_hour_on_s + 9e9)  # a second `down`
    assert documents.CONTROLLER.read(world.store) is None
    kept = documents.controller_rentals(world.store, an_hour_on_s + 9e9)
    assert sum(one.usd for one in kept) == pytest.approx(usd)
    made.launch("resume")
    assert len(documents.controller_rentals(world.store, an_hour_on_s)) == 3


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
    assert (documents.controller_rentals(world.store, 9e9), noted.usd_per_h) == ((), 0.0)
    world.sky.fails = None
    made.launch("resume")
    launched = documents.CONTROLLER.read(world.store)
    assert launched is not None
    (stay,) = documents.controller_rentals(world.store, launched.at_s + 3600.0)
    assert stay.usd == pytest.approx(launched.usd_per_h)
    assert stay.usd > 0
    # Its machine is taken away, and no other is to be had: it has cost until then.
    world.sky.table.clear()
    world.sky.fails = NO_CAPACITY
    with pytest.raises(CloudRefused):
        made.launch("resume")
    (gone,) = documents.controller_rentals(world.store, 9e9)
    assert gone.from_s == launched.at_s
    assert gone.until_s < launched.at_s + HANG_S


@pytest.mark.parametrize("fails", [KEYS_RAN_OUT, CloudUnavailable("cut off")], ids=["refused", "cut off"])
def test_possible_machine_costs_until_known_gone(world: World, fails: CloudRefused | CloudUnavailable) -> None:
    made = controller(world, world.record.spec)
    if isinstance(fails, CloudRefused):
        made.launch("up")
    world.sky.fails = fails
    with pytest.raises(type(fails)):
        made.launch("resume")
    noted = documents.CONTROLLER.read(world.store)
    assert noted is not None
    assert noted.usd_per_h > 0
    assert documents.controller_rentals(world.store, 9e9)[-1].until_s == 9e9


def test_controller_gets_the_folder_and_ships_its_own_copy(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    controller(world, world.record.spec).launch("up")
    (work,) = world.sky.works
    assert work.workdir == world.record.spec.workdir
    assert work.env["GRPO_ORCH_RUN"] == world.store.url
    assert f"~/{work.env['GRPO_ORCH_WHEEL']}" in work.files
    assert as_shipped(world.record) == world.record
    monkeypatch.setenv(FOLDER_ENV, "/home/x/sky_workdir")
    assert as_shipped(world.record).spec.workdir == "/home/x/sky_workdir"


def test_controller_gets_the_secrets_and_the_runs_identity(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"LICENCE": "my-licence-s3cret", "HF_TOKEN": "hf_" + "S3cr3t" * 5}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    made = controller(world, replace(world.record.spec, secrets=("LICENCE",)))
    run_json = world.store.get(layout.RUN)
    save_run_digest(world.store.url, run_digest(run_json))
    made.launch("up")
    (work,) = world.sky.works
    assert work.secrets.items() >= given.items()
    assert work.env[NAMES_ENV].split(",") == list(given)
    assert work.env[DIGEST_ENV] == run_digest(run_json)
    assert not any(value in repr(work) for value in given.values())
    world.store.put(layout.RUN, run_json.replace(b'"name":', b'"name" :'))
    with pytest.raises(UntrustedRun):
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
