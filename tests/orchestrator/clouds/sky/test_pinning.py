"""Pools are those of SkyPilot's own catalog, and a launch in one of them can go nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_orch.orchestrator.clouds.protocol import CloudRefused
from grpo_orch.orchestrator.clouds.sky.offers import offers_of, resources_in
from grpo_orch.orchestrator.clouds.sky.records import SkyOffer
from grpo_orch.policies.model.pools import Pool
from grpo_orch.policies.model.vocabulary import Market, Role

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
