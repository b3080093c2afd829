"""A run is taken over on another machine, which has nothing that SkyPilot knew on the first: `make soak`.

On the rig's cloud, through real SkyPilot; see `tests/e2e/test_sky.py`. Ten minutes or more.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from grpo_orch.policies.model import exit_codes
from tests.e2e.harness import kill
from tests.e2e.sky_harness import SkyRun
from tests.rigs.sky.home import make_home
from tests.rigs.sky.rig import SkyRig
from tests.rigs.sky.sweep import ssh_sockets, user_id

pytestmark = pytest.mark.soak

SLOTS = ("trainer-0", "rollout-0", "rollout-1")


def logs(state: Path) -> list[str]:
    """What the daemons of this machine have said."""
    return [log.read_text() for log in state.glob("*/daemon.log")]


def test_machines_work_new_ones_join_and_all_are_returned(
    sky_rig: SkyRig, sky_image: Path, tmp_path: Path
) -> None:
    run = SkyRun(sky_rig, tmp_path)
    run.up()
    run.serving(*SLOTS)
    run.stepped()
    bought = {instance.id for instance in run.running()}
    os.kill(run.status()["daemon"]["pid"], signal.SIGKILL)
    kill(sky_rig.api_server_pids())
    (sky_rig.folder / "home").rename(sky_rig.folder / "lost")

    name = f"{sky_rig.name}-elsewhere"
    home, state = sky_rig.folder / "elsewhere", tmp_path / "elsewhere"
    make_home(home, sky_rig.endpoint, sky_image / "wheels")
    run.env |= {"HOME": str(home), "GRPO_ORCH_HOME": str(state), "SKYPILOT_USER_ID": user_id(name)}
    try:
        (secret,) = (tmp_path / "home").glob("*/token")
        brought = state / secret.relative_to(tmp_path / "home")
        refused = run.cli("resume", "-d", code=exit_codes.FAILED)
        assert f"copy {brought}" in refused.stderr
        shutil.copy(secret, brought)
        run.cli("resume", "-d")
        run.stepped()
        assert {instance.id for instance in run.running()} == bought
        # It knows a machine as one on spot, and so a loss as a preemption, once AWS has told it.
        run.until("it has asked AWS", lambda: any('"machines_found"' in said for said in logs(state)))

        taken = run.node("rollout-0")
        sky_rig.preempt(run.instance(taken).id, grace_s=0)
        run.replaced("rollout-0", taken)
        run.told(taken, "preempted")
        run.serving(*SLOTS)
        run.stepped()

        run.cli("down")
        assert sky_rig.account() == {}
    finally:
        shutil.rmtree(ssh_sockets(name), ignore_errors=True)
