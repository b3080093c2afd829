"""The trainer's machine is taken in mid run, and with it the gateway, the uploader and the spool: `make soak`.

On the rig's cloud, through real SkyPilot; see `tests/e2e/test_sky.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_orch.checkpoint.records.metrics import REPLAYED, MetricsRow
from grpo_orch.checkpoint.store.codec import from_json
from tests.e2e.sky_harness import BUCKET, SkyRun
from tests.rigs.sky.rig import SkyRig

pytestmark = pytest.mark.soak

STEPS, SAVED_AT, LOST_AT = 30, 10, 14


def rows(rig: SkyRig) -> list[MetricsRow]:
    """What the trainers have logged, in the order of steps."""
    with rig.inside():
        s3 = rig.client("s3")
        keys = [item["Key"] for item in s3.list_objects_v2(Bucket=BUCKET, Prefix="tiny/metrics/")["Contents"]]
        chunks = [s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in sorted(keys)]
    return [from_json(line, MetricsRow, "metrics") for chunk in chunks for line in chunk.splitlines()]


def test_new_trainer_machine_resumes_from_newest_checkpoint(sky_rig: SkyRig, tmp_path: Path) -> None:
    run = SkyRun(sky_rig, tmp_path, max_steps=STEPS)
    run.up()
    run.until(f"step {LOST_AT}", lambda: run.status()["step"] >= LOST_AT)
    assert run.status()["checkpoint"]["version"] == f"0-{SAVED_AT}"
    trainer, rollouts = run.node("trainer-0"), [run.node("rollout-0"), run.node("rollout-1")]
    at_step = int(run.status()["step"])
    sky_rig.preempt(run.instance(trainer).id, grace_s=0)

    run.replaced("trainer-0", trainer)
    run.told(trainer, "the cloud no longer has it")
    run.until("the run is over", lambda: run.status()["phase"] == "finished")
    assert [run.node("rollout-0"), run.node("rollout-1")] == rollouts, "they found the gateway's new address"

    logged = rows(sky_rig)
    assert [row.step for row in logged if "reward" in row.values] == list(range(1, STEPS + 1))
    again = [row.step for row in logged if row.values.get(REPLAYED)]
    assert again[0] == SAVED_AT + 1
    assert again[-1] in (at_step, at_step + 1), "what was stored was not generated again"
    report = json.loads(run.cli("report", "-o", "json").stdout)
    assert report["steps"] == STEPS
    assert report["restarts"] == {"trainer-0": 1, "rollout-0": 0, "rollout-1": 0}
    assert report["sampling_logp_difference_max"] < 1e-4
    assert report["reward_last"] > report["reward_first"]
    run.until("all machines are gone", lambda: run.running() == [])
