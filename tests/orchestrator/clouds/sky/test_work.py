"""What SkyPilot is asked to do for a node: where and how its machine is bought, what it is told and given."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.orchestrator.clouds.protocol import CloudRefused, LaunchOrder
from grpo_orch.orchestrator.clouds.sky.offers import offers_of, resources_in
from grpo_orch.orchestrator.clouds.sky.records import SkyOffer
from grpo_orch.orchestrator.clouds.sky.remote_controller import settings_elsewhere
from grpo_orch.orchestrator.clouds.sky.work import (
    SETTABLE,
    is_secret,
    resources_for,
    sole_region,
    unused_clouds,
    work_for,
)
from grpo_orch.policies.model.pools import Pool
from grpo_orch.policies.model.spec import Dataset, FleetPolicy, PoliciesSpec, RolloutSpec, RunSpec, TrainerSpec
from grpo_orch.policies.model.vocabulary import Market, Refusal, Role

EAST = "aws/us-east-1"
GIVEN = {
    "GRPO_ORCH_RUN": "s3://bucket/run",
    "GRPO_ORCH_NODE": "trainer-0-i1",
    "GRPO_ORCH_ATTEMPT": "1",
    "GRPO_ORCH_TIMELINE": "0",
    "GRPO_ORCH_TOKEN": "hunter2",
    "GRPO_ORCH_STORAGE_OPTIONS": '{"secret_access_key": "hunter3"}',
    "HF_TOKEN": "hunter4",
}


def order(role: Role = Role.TRAINER, market: Market = Market.ON_DEMAND) -> LaunchOrder:
    return LaunchOrder(f"{role}-0-i1", role, market, 1, GIVEN)


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    """A run whose folder has a model and data, one of each in a folder that git ignores."""
    folder = tmp_path / "mine"
    (folder / "build" / "model").mkdir(parents=True)
    (folder / "build" / "prompts.jsonl").write_text("{}")
    (folder / "held_out").mkdir()
    return RunSpec(
        name="t",
        storage="s3://bucket/run",
        cloud="sky",
        trainer=TrainerSpec(
            model="./build/model",
            dataset=Dataset(path="build/prompts.jsonl"),
            eval_dataset=Dataset(path="held_out"),
            reward_funcs=(),
            resources={"infra": "aws", "accelerators": "H100:8"},
        ),
        rollout=RolloutSpec(resources={"accelerators": "L40S"}),
        grpo={},
        workdir=str(folder),
    )


WHEEL = Path("/here/0123abcd/grpo_orch-0.1.0-py3-none-any.whl")


def test_secrets_are_separate_and_never_written(spec: RunSpec) -> None:
    work = work_for(order(), spec, WHEEL, None)
    assert set(work.secrets) == {"GRPO_ORCH_TOKEN", "GRPO_ORCH_STORAGE_OPTIONS", "HF_TOKEN"}
    assert {**work.env, **work.secrets}.items() >= GIVEN.items()
    assert not work.env.keys() & work.secrets.keys()
    assert "hunter" not in repr(work)
    assert "hunter" not in work.setup + work.run + str(work.resources) + str(work.env) + str(work.files)


def test_secrets_are_told_by_their_names() -> None:
    secrets = ("HF_TOKEN", "WANDB_API_KEY", "aws_secret_access_key", "A_SECRET", "DB_PASSWORD")
    assert [name for name in (*secrets, "TOKENIZERS_PARALLELISM", "KEYS_MAX", "HF_HOME") if is_secret(name)] == [
        *secrets
    ]


def test_each_role_gets_its_files_and_the_wheel(spec: RunSpec) -> None:
    wheel = {"~/.grpo-orch/wheels/0123abcd/grpo_orch-0.1.0-py3-none-any.whl": str(WHEEL)}
    model = {"~/sky_workdir/build/model": f"{spec.workdir}/build/model"}
    data = {
        "~/sky_workdir/build/prompts.jsonl": f"{spec.workdir}/build/prompts.jsonl",
        "~/sky_workdir/held_out": f"{spec.workdir}/held_out",
    }
    trainer = work_for(order(), spec, WHEEL, None)
    assert trainer.files == {**wheel, **model, **data}
    assert trainer.workdir == spec.workdir
    assert trainer.env["GRPO_ORCH_ROLE"] == "trainer"
    rollout = work_for(order(Role.ROLLOUT), spec, WHEEL, None)
    assert rollout.files == {**wheel, **model}
    assert rollout.env["GRPO_ORCH_ROLE"] == "rollout"
    assert rollout.env["GRPO_ORCH_WHEEL"] == ".grpo-orch/wheels/0123abcd/grpo_orch-0.1.0-py3-none-any.whl"


def test_hub_names_and_the_machines_own_paths_are_left_alone(spec: RunSpec, tmp_path: Path) -> None:
    trainer = TrainerSpec(model="Qwen/Qwen3-0.6B", dataset=Dataset(path=str(tmp_path)), reward_funcs=())
    work = work_for(order(), replace(spec, trainer=trainer), WHEEL, None)
    assert list(work.files.values()) == [str(WHEEL)]


def test_folder_outside_is_reported(spec: RunSpec) -> None:
    with pytest.raises(CloudRefused, match=r"the folder of run.yaml, /nowhere, is not on this machine") as caught:
        work_for(order(), replace(spec, workdir="/nowhere"), WHEEL, None)
    assert caught.value.refusal is Refusal.CREDENTIALS


PLACES: list[tuple[dict[str, Any], str | None, dict[str, Any] | None]] = [
    # as written, where it has to be, what is asked for
    ({}, None, {}),
    ({}, EAST, {"infra": EAST}),
    ({"infra": "aws"}, None, {"infra": "aws"}),
    ({"infra": "aws"}, EAST, {"infra": EAST}),
    ({"infra": "AWS/"}, EAST, {"infra": EAST}),
    ({"infra": "*/us-east-1"}, EAST, {"infra": EAST}),
    ({"infra": "*/*/us-east-1a"}, EAST, {"infra": f"{EAST}/us-east-1a"}),
    ({"infra": "aws/*/*"}, None, {"infra": "aws"}),
    ({"infra": f"{EAST}/us-east-1a"}, EAST, {"infra": f"{EAST}/us-east-1a"}),
    ({"infra": "aws/us-west-2"}, EAST, None),
    ({"infra": "gcp"}, EAST, None),
    ({"cloud": "aws"}, EAST, {"infra": EAST}),
    ({"cloud": "aws", "region": "us-west-2"}, EAST, None),
    ({"region": "us-east-1", "zone": "us-east-1b"}, EAST, {"infra": f"{EAST}/us-east-1b"}),
    ({"infra": "aws", "region": "us-west-2"}, EAST, None),
    ({"infra": "k8s/a/b"}, "kubernetes/a/b", {"infra": "kubernetes/a/b"}),
    ({"cloud": "kubernetes", "region": "a/b"}, "k8s/a/b", {"infra": "kubernetes/a/b"}),
    ({"infra": "k8s"}, "kubernetes/a/b", {"infra": "kubernetes/a/b"}),
    ({"infra": "k8s/c"}, "kubernetes/a/b", None),
    ({"any_of": [{"infra": "gcp"}, {"infra": "aws"}]}, EAST, {"any_of": [{"infra": EAST}]}),
    (
        {"any_of": [{"infra": "gcp"}, {"accelerators": "L4"}]},
        None,
        {"any_of": [{"infra": "gcp"}, {"accelerators": "L4"}]},
    ),
    ({"ordered": [{"infra": "gcp"}, {"infra": "aws/us-west-2"}]}, EAST, None),
    (
        {"infra": "aws", "disk_size": 200, "ordered": [{"accelerators": "H100"}, {"infra": "gcp"}]},
        EAST,
        {"disk_size": 200, "ordered": [{"accelerators": "H100", "infra": EAST}]},
    ),
    (
        {"infra": "aws", "any_of": [{"region": "us-east-1"}, {"region": "us-west-2"}]},
        EAST,
        {"any_of": [{"infra": EAST}]},
    ),
]


@pytest.mark.parametrize(("wanted", "pinned", "asked"), PLACES)
@pytest.mark.parametrize("market", Market)
def test_machines_are_bought_in_the_chosen_place_and_market(
    wanted: dict[str, Any], pinned: str | None, asked: dict[str, Any] | None, market: Market
) -> None:
    before = repr(wanted)
    if asked is None:
        with pytest.raises(CloudRefused, match=rf"rollout.resources names no place in {pinned}") as caught:
            resources_for(wanted, Role.ROLLOUT, market, pinned)
        assert caught.value.refusal is Refusal.QUOTA
        return
    use_spot = {"use_spot": market is Market.SPOT}
    for key in ("any_of", "ordered"):
        if key in asked:
            asked = {**asked, key: [{**entry, **use_spot} for entry in asked[key]]}
    assert resources_for(wanted, Role.ROLLOUT, market, pinned) == {**asked, **use_spot}
    assert repr(wanted) == before


def test_an_entry_that_names_its_market_keeps_it() -> None:
    wanted = {"ordered": [{"cpus": 4}, {"cpus": 4, "use_spot": False}]}
    asked = resources_for(wanted, Role.ROLLOUT, Market.SPOT, None)
    assert asked == {"use_spot": True, "ordered": [{"cpus": 4, "use_spot": True}, {"cpus": 4, "use_spot": False}]}


@pytest.mark.parametrize(
    ("trainer", "rollout", "sole"),
    [
        ({}, {}, None),
        ({"infra": "aws"}, {"infra": "aws"}, None),
        ({"infra": "aws/us-east-1/us-east-1a"}, {}, EAST),
        ({"infra": "aws"}, {"infra": EAST}, EAST),
        ({"infra": EAST}, {"infra": "gcp/us-central1"}, EAST),
        ({"any_of": [{"infra": f"{EAST}/us-east-1a"}, {"infra": f"{EAST}/us-east-1b"}]}, {}, EAST),
        ({"any_of": [{"infra": EAST}, {"infra": "gcp/us-central1"}]}, {}, None),
        ({"cloud": "aws", "region": "us-east-1"}, {}, EAST),
        ({"region": "us-east-1"}, {}, None),
        ({"infra": "k8s"}, {}, None),
        ({"infra": "k8s/mine"}, {}, "kubernetes/mine"),
    ],
)
def test_the_region_is_known_where_a_role_leaves_no_choice(
    spec: RunSpec, trainer: dict[str, Any], rollout: dict[str, Any], sole: str | None
) -> None:
    placed = replace(
        spec,
        trainer=replace(spec.trainer, resources=trainer),
        rollout=replace(spec.rollout, resources=rollout),
    )
    assert sole_region(placed) == sole


@pytest.mark.parametrize(("minutes", "idle_min"), [(30.0, 30), (0.1, 1), (0.0, None)])
def test_machine_terminates_itself_long_after_its_work(
    spec: RunSpec, minutes: float, idle_min: int | None
) -> None:
    policies = PoliciesSpec(fleet=FleetPolicy(dead_man_min=minutes))
    assert work_for(order(), replace(spec, policies=policies), WHEEL, None).idle_min == idle_min


@pytest.mark.parametrize(
    ("place", "is_pod"),
    [("k8s/mine/a", True), ("kubernetes", True), ("ssh/pool", True), ("aws/us-east-1", False), (None, False)],
)
def test_pods_hook_notifies_its_work_of_the_end(spec: RunSpec, place: str | None, is_pod: bool) -> None:
    resources = {"infra": place} if place else {}
    work = work_for(order(), replace(spec, trainer=replace(spec.trainer, resources=resources)), WHEEL, None)
    assert bool(work.hooks) == is_pod
    for hook in work.hooks:
        assert hook["run"].startswith("NODE=trainer-0-i1\n")
        assert hook["events"] == ["preemption"]


SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    (
        {
            "api_server": {"endpoint": "https://me:secret@sky.example.com"},
            "admin_policy": "mine.Policy",
            "db": "postgresql://me:secret@db.example.com/sky",
        },
        {},
    ),
    (
        {"aws": {"vpc_name": "training", "use_internal_ips": True, "ssh_proxy_command": "ssh -W %h:%p me@jump"}},
        {"aws": {"vpc_name": "training", "use_internal_ips": True, "ssh_proxy_command": None}},
    ),
    (
        {"gcp": {"ssh_proxy_command": {"us-west1": "ssh -W %h:%p me@west", "us-east1": None}}},
        {"gcp": {"ssh_proxy_command": {"us-west1": None, "us-east1": None}}},
    ),
    (
        {"workspaces": {"rl": {"clouds": [{"ssh_proxy_command": "ssh me@jump"}, "gcp"]}}},
        {"workspaces": {"rl": {"clouds": [{"ssh_proxy_command": None}, "gcp"]}}},
    ),
]


@pytest.mark.parametrize(("here", "there"), SETTINGS)
def test_settings_apply_remotely_without_server_code_and_proxies(
    here: dict[str, Any], there: dict[str, Any]
) -> None:
    assert settings_elsewhere(here) == there


def test_only_certainly_unused_clouds_are_withheld() -> None:
    assert unused_clouds(["aws/us-east-1", "aws"], "s3://b/r") == sorted(SETTABLE - {"aws"})
    assert unused_clouds(["gcp/us-east1"], "s3://b/r") == sorted(SETTABLE - {"aws", "gcp"})
    assert "ssh" not in unused_clouds(["kubernetes/a"], "gs://b/r")  # they share a file
    assert unused_clouds([None], "s3://b/r") == unused_clouds(["aws"], "abfs://b/r") == []


# Pools are those of SkyPilot's own catalog, and a launch in one of them can go nowhere else.

WANTED = {
    "ordered": [
        {"infra": "aws/us-east-1", "accelerators": "H100:8"},
        {"infra": "aws", "accelerators": {"A10G": 1}, "disk_size": 300},
    ]
}
A10G = Pool("aws", "us-west-2", "usw2-az1", "g5.xlarge", "A10G:1", Market.SPOT)
# SkyPilot's real catalog code over prices that are made up, in a home of its own: it reads it once imported.
_REAL = f"""
import os
from pathlib import Path
from tests.rigs.sky import home
home._make_catalog(Path(os.environ["HOME"]) / ".sky/catalogs/v8")
import sky
from sky.utils import resources_utils
from grpo_orch.orchestrator.clouds.sky.offers import offers_of, resources_in
from grpo_orch.orchestrator.clouds.sky.skypilot import _offers
from grpo_orch.policies.model.vocabulary import Role
wanted = {WANTED!r}
for one in offers_of(Role.ROLLOUT, wanted, None, lambda asked, spot: _offers(asked, spot, ["aws"])):
    (asked,) = sky.Resources.from_yaml_config(resources_in(wanted, Role.ROLLOUT, one.pool))
    asked.validate()
    (machine,) = asked.cloud.get_feasible_launchable_resources(asked, 1).resources_list
    (there,) = resources_utils.make_launchables_for_valid_region_zones(machine)
    assert there.infra.to_str() == one.pool.zone_path, there
    assert (there.instance_type, there.use_spot) == (one.pool.instance_type, one.pool.market == "spot"), there
    print(one.pool)
"""


def test_pinned_machine_has_one_place_in_skypilot(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _REAL], env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    pools = done.stdout.splitlines()
    assert {str(A10G), "aws/us-east-1 p5.48xlarge H100:8 on demand"} <= set(pools)
    assert len(pools) == 11


def ask(asked: dict[str, object], spot: bool) -> list[SkyOffer]:
    gpu = "H100:8" if asked["accelerators"] == "H100:8" else "A10G:1"
    return [SkyOffer("aws/us-east-1/a", gpu, gpu, spot, 2.0)]


def test_order_is_a_rank_and_unpriced_places_leave_no_choice() -> None:
    found = offers_of(Role.ROLLOUT, WANTED, None, ask)
    assert [(one.pool.accelerators, one.rank) for one in found[::2]] == [("H100:8", 0), ("A10G:1", 1)]
    free = offers_of(Role.ROLLOUT, WANTED, None, lambda *_: [SkyOffer("kubernetes/c", "4CPU", "", False, 0.0)])
    assert free == []


def test_pinned_launch_keeps_only_its_alternatives_settings() -> None:
    assert resources_in(WANTED, Role.ROLLOUT, A10G) == {
        "infra": "aws/us-west-2/usw2-az1",
        "instance_type": "g5.xlarge",
        "accelerators": "A10G:1",
        "disk_size": 300,
        "use_spot": True,
    }
    with pytest.raises(CloudRefused, match="no longer allows"):
        resources_in(WANTED, Role.ROLLOUT, replace(A10G, cloud="gcp"))


def place(accelerators: str, instance_type: str = "g5") -> Pool:
    return Pool("aws", "us-west-2", "usw2-az1", instance_type, accelerators, Market.SPOT)


@pytest.mark.parametrize("words", ["24GB+", "nvidia:24GB", "24gb+:1", "nvidia:24GB+:1", ["80GB+", "24GB"], "a10"])
def test_machines_found_by_memory_or_part_of_name_can_launch(words: str | list[str]) -> None:
    found = resources_in({"accelerators": words}, Role.ROLLOUT, place("A10G:1"))
    assert found["accelerators"] == "A10G:1"


def test_best_matching_alternative_sets_the_other_fields() -> None:
    listed: list[dict[str, object]] = [
        {"cpus": "4+"},
        {"accelerators": "24GB+:4"},
        {"accelerators": "A10G"},
        {"accelerators": {"A10G": 4}},
        {"accelerators": "H100:8"},
        {"accelerators": ["A10G:2", "L4:2"]},
    ]
    wanted = {"any_of": [{**one, "disk_size": size} for size, one in enumerate(listed)]}

    def disk(accelerators: str) -> int:
        return int(resources_in(wanted, Role.ROLLOUT, place(accelerators))["disk_size"])

    assert [disk(one) for one in ("", "L4:4", "A10G:1", "A10G:4", "A10G:2", "H100:8")] == [0, 1, 2, 3, 5, 4]
    with pytest.raises(CloudRefused, match="no longer allows"):
        resources_in({"accelerators": "H100:8"}, Role.ROLLOUT, place("A10G:1"))
