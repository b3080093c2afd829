"""A run by `up` on one rollout machine with two engines, of which one is killed: it costs a moment and no weight.

The machine's two GPUs are a stand-in: names in CUDA_VISIBLE_DEVICES, which vLLM's build for CPUs does not look at.
The rest is real: daemon, trainer, gateway, two vLLM servers.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import yaml

from grpo_orch.policies.model.gpus import VISIBLE
from tests.e2e.harness import Run, kill
from tests.e2e.tiny import RUN_TIMEOUT_S, check_healthy, final_weights, finish, make_tiny, reach, step, tiny_run

pytestmark = [pytest.mark.whole, pytest.mark.slow]

MACHINE = "rollout-0-i1"
ENGINES = [f"{MACHINE}.0", f"{MACHINE}.1"]
STEPS = 12
# The trainer waits in its rewards while the file `hold` is there, and says so: the run must not be over before an
# engine is back.
HOLDING = """
import time
from pathlib import Path

HOLD = Path(__file__).with_name("hold")


def held_share(completions: list[str], **columns: Any) -> list[float]:
    while HOLD.exists():
        HOLD.with_name("held").touch()
        time.sleep(0.05)
    return digit_share(completions, **columns)
"""


def two_engines(folder: Path, tiny: Path) -> Run:
    run = tiny_run(folder, tiny, replicas=1, max_steps=STEPS, save_steps=4, eval_steps=STEPS)
    spec = yaml.safe_load(run.yaml.read_text())
    spec["rollout"]["resources"] = {"accelerators": "H100:2"}
    spec["trainer"]["reward_funcs"] = "rewards.held_share"
    run.yaml.write_text(yaml.safe_dump(spec))
    with (folder / "rewards.py").open("a") as rewards:
        rewards.write(HOLDING)
    run.env[VISIBLE] = "0,1"
    return run


def hold(run: Run) -> None:
    """Return once the trainer waits in its rewards."""
    held = run.yaml.with_name("held")
    held.unlink(missing_ok=True)
    run.yaml.with_name("hold").touch()
    run.until("the trainer is held", held.exists, RUN_TIMEOUT_S)


def let_go(run: Run) -> None:
    run.yaml.with_name("hold").unlink()


def serving(run: Run) -> dict[str, str]:
    """The boots of the engines that serve, by name."""
    return {one["node"]: one["boot_id"] for one in run.json("members", "ls", run.url) if one["state"] == "serving"}


def processes_of(run: Run, boot_id: str) -> list[int]:
    """The processes of one vLLM."""
    found = []
    for pid in run.pids(MACHINE):
        try:
            if psutil.Process(pid).environ().get("GRPO_ORCH_BOOT") == boot_id:
                found.append(pid)
        except psutil.Error:  # it has ended
            continue
    return found


def test_one_of_a_machines_two_engines_is_killed_and_comes_back(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "tiny")
    calm, run = two_engines(tmp_path / "calm", tiny), two_engines(tmp_path / "run", tiny)
    try:
        calm.cli("up", str(calm.yaml), "-y", "-d")
        finish(calm)
        undisturbed = final_weights(calm, STEPS)
    finally:
        calm.end()
    try:
        run.cli("up", str(run.yaml), "-y", "-d")
        reach(run, 1)
        hold(run)
        run.until("both serve", lambda: sorted(serving(run)) == ENGINES, RUN_TIMEOUT_S)
        before = serving(run)
        kill(processes_of(run, before[ENGINES[1]]))
        run.until("it is out", lambda: ENGINES[1] not in serving(run), RUN_TIMEOUT_S)
        killed_at = step(run)
        let_go(run)
        reach(run, killed_at + 2)  # on the other
        hold(run)
        run.until("it is back", lambda: sorted(serving(run)) == ENGINES, RUN_TIMEOUT_S)
        after = serving(run)
        assert after[ENGINES[0]] == before[ENGINES[0]]
        assert after[ENGINES[1]] != before[ENGINES[1]]
        let_go(run)
        finish(run)
        check_healthy(run, STEPS, gain=0.0)
        assert final_weights(run, STEPS) == undisturbed
        assert not list(Path(run.env["GRPO_ORCH_HOME"]).glob("*/machines/rollout-0-i2")), "its machine stayed"
    finally:
        run.end()
