"""`up --remote` on the rig's cloud: a daemon on a machine of its own, where a SkyPilot of its own buys the others.

The laptop is off while it does so, and needed again for `down` alone. `make soak`, for it takes minutes.
"""

from __future__ import annotations

import json

import pytest
import yaml

from tests.e2e.sky_harness import SkyRun
from tests.rigs.sky.rig import SkyRig

pytestmark = pytest.mark.soak

NODES = ("rollout-0-i1", "trainer-0-i1")


@pytest.fixture(scope="module")
def run(sky_rig: SkyRig, tmp_path_factory: pytest.TempPathFactory) -> SkyRun:
    folder = tmp_path_factory.mktemp("remote")
    made = SkyRun(sky_rig, folder)
    spec = yaml.safe_load((folder / "run.yaml").read_text())
    spec["rollout"]["replicas"] = 1
    (folder / "run.yaml").write_text(yaml.safe_dump(spec))
    settings = sky_rig.folder / "home/.sky/config.yaml"
    settings.write_text(yaml.safe_dump({"aws": {"labels": {"team": "rl"}}}))
    return made


def test_up_buys_one_machine_whose_daemon_buys_the_others(run: SkyRun, sky_rig: SkyRig) -> None:
    said = run.cli("up", "--remote", "-y", "-d").stdout
    assert "The daemon for tiny is running on grpo-controller-tiny-" in said
    sky_rig.turn_off()
    controller = run.instance("controller")
    assert controller.market == "on-demand"
    run.until("its machines run", lambda: all(any(node in i.cluster for i in run.running()) for node in NODES))
    assert [run.instance(node).market for node in NODES] == ["spot", "on-demand"]
    assert all(instance.tags.get("team") == "rl" for instance in run.running()), "settings were left at home"


def test_the_laptop_reads_of_it_in_the_store(run: SkyRun, sky_rig: SkyRig) -> None:
    status = json.loads(run.cli("status", "-o", "json").stdout)
    address = run.instance("controller").private_ip or ""
    assert status["daemon"]["host"] == f"ip-{address.replace('.', '-')}"
    assert sorted(node["node"] for node in status["nodes"]) == sorted(NODES)
    events = run.cli("events").stdout
    assert all(f"{node} was requested" in events for node in NODES), events
    assert sky_rig.api_server_pids() == []
    assert "grpo-orch controller: starting the daemon: up" in run.cli("logs", "daemon").stdout


def test_down_leaves_no_machine_nor_that_of_the_daemon(run: SkyRun, sky_rig: SkyRig) -> None:
    said = run.cli("down").stdout
    assert "all its machines are returned" in said
    assert run.running() == []
    assert sky_rig.account() == {}
    assert json.loads(run.cli("status", "-o", "json").stdout)["phase"] == "stopped"
