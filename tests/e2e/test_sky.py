"""The demo's work on spot machines through real SkyPilot, and everything that a cloud does to such machines.

One run, taken through it all in order: launching three machines takes a minute. The cloud is the rig's stand-in
for EC2, whose instances are namespaces with sshd; SkyPilot, SSH, vLLM, TRL, the store's protocol and the kills are
real.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.e2e.harness import kill
from tests.e2e.sky_harness import SkyRun
from tests.rigs.sky.rig import SkyRig

pytestmark = [pytest.mark.whole, pytest.mark.slow]

SLOTS = ("trainer-0", "rollout-0", "rollout-1")


@pytest.fixture(scope="module")
def run(sky_rig: SkyRig, tmp_path_factory: pytest.TempPathFactory) -> SkyRun:
    return SkyRun(sky_rig, tmp_path_factory.mktemp("sky"))


def test_up_buys_a_trainer_on_demand_and_rollout_nodes_on_spot(run: SkyRun) -> None:
    plan = run.up()
    assert re.search(r"trainer .*on_demand .*m6i.large", plan)
    assert re.search(r"rollout .*spot .*m6i.large", plan)
    run.serving(*SLOTS)
    assert sorted(instance.market for instance in run.running()) == ["on-demand", "spot", "spot"]
    run.stepped()


def test_lost_nodes_are_replaced_while_api_server_and_daemon_die(run: SkyRun, sky_rig: SkyRig) -> None:
    warned, taken = run.node("rollout-0"), run.node("rollout-1")
    zone = run.instance(warned).zone
    sky_rig.capacity(zone, "spot", ok=False)
    sky_rig.preempt(run.instance(warned).id, grace_s=60)
    sky_rig.preempt(run.instance(taken).id, grace_s=0)
    run.replaced("rollout-0", warned)
    run.replaced("rollout-1", taken)
    run.told(warned, "preemption notice")
    run.told(taken, "preempted")
    others = run.node("rollout-0"), run.node("rollout-1")
    run.until("a machine is bought", lambda: any(node in i.cluster for i in run.running() for node in others))
    kill(sky_rig.api_server_pids())
    os.kill(run.status()["daemon"]["pid"], signal.SIGKILL)
    run.cli("resume", "-d")
    run.serving(*SLOTS)
    for slot in ("rollout-0", "rollout-1"):  # what was half made was taken up
        assert run.instance(run.node(slot)).zone != zone
    sky_rig.capacity(zone, "spot", ok=True)
    run.stepped()


def test_dead_host_reported_running_is_replaced_after_shortage(run: SkyRun, sky_rig: SkyRig) -> None:
    sky_rig.capacity("*", "spot", ok=False)
    dead = run.node("rollout-0")
    machine = run.instance(dead).id
    sky_rig.crash(machine)
    run.replaced("rollout-0", dead)
    run.told(dead, "it does not answer, but its cloud lists it as running")
    run.until("another is refused", lambda: any(e.get("refusal") == "no_capacity" for e in run.events()))
    run.until("the dead one is returned", lambda: machine not in {instance.id for instance in run.running()})
    run.stepped()
    sky_rig.capacity("*", "spot", ok=True)
    run.until("there is another", lambda: len(run.running()) == len(SLOTS))


def test_down_leaves_nothing_billable_in_the_account(run: SkyRun, sky_rig: SkyRig) -> None:
    held = sky_rig.account()["security_groups"]
    assert {name.rpartition("-")[0] for name in held} == {"us-east-1/grpo-tiny"}  # the run's own
    said = run.cli("down").stdout
    assert "all its machines are returned" in said
    assert run.running() == []
    assert sky_rig.account() == {}


def test_no_step_was_lost_and_no_token_came_from_other_weights(run: SkyRun) -> None:
    report = json.loads(run.cli("report", "-o", "json").stdout)
    assert report["steps"] >= 10
    assert report["sampling_logp_difference_max"] < 1e-4
    assert report["reward_last"] > report["reward_first"]


def test_the_runs_secret_is_in_no_log_and_no_record_of_skypilots(run: SkyRun, sky_rig: SkyRig) -> None:
    (token,) = [path.read_text().strip() for path in Path(run.env["GRPO_ORCH_HOME"]).glob("*/token")]
    held = [
        path for root in (sky_rig.folder / "home", Path(run.env["GRPO_ORCH_HOME"])) for path in root.rglob("*")
    ]
    logs = [path for path in held if path.is_file() and path.suffix in (".log", ".yaml", ".yml")]
    assert logs
    assert [str(path) for path in logs if token.encode() in path.read_bytes()] == []
