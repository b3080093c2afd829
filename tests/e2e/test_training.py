"""Windows ahead with real parts: TRL, vLLM servers on CPU, the gateway, and processes that are really killed.

Each run ends with the weights of the undisturbed one. `test_main_job.py` has a short run without windows ahead.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.metrics import AHEAD_S, REPLAYED, read_metrics
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.policies.model.gpus import VISIBLE
from grpo_orch.policies.model.node_contract import NOTICE
from tests.budget import HANG_S
from tests.e2e.harness import Run, kill
from tests.e2e.tiny import (
    IN_PARTS,
    RUN_TIMEOUT_S,
    STEPS,
    check_healthy,
    final_weights,
    finish,
    kill_trainer,
    reach,
    step,
    tiny_run,
)
from tests.rigs.store.server import S3Server

pytestmark = [pytest.mark.whole, pytest.mark.slow]

# Two windows a step, of the policy before.
OVERLAPPED: dict[str, Any] = {"max_staleness": 1, **IN_PARTS}
LEAVES_IN_S = 4.0
TRAINERS = (
    "grpo_orch.tasks.trainer.main",
    "grpo_orch.tasks.machine.uploader",
    "grpo_orch.orchestrator.gateway",
)  # all on its machine
MACHINE = "rollout-0-i1"
ENGINES = [f"{MACHINE}.0", f"{MACHINE}.1"]
# The trainer waits in its rewards while the file `hold` is there, and creates `held`: the run must not be over
# before an engine is back.
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


@pytest.fixture(scope="module")
def undisturbed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights after a run with one node that nobody disturbs."""
    run = tiny_run(tmp_path_factory.mktemp("one") / "run", tiny, replicas=1, **OVERLAPPED)
    with run.up():
        finish(run)
        report = check_healthy(run, drift=math.inf)
        assert (report["faults_survived"], report["tokens_regenerated"]) == (0, 0)
        assert sum(row.values.get(AHEAD_S, 0.0) for row in read_metrics(run.store)) > 0
        return final_weights(run)


def test_every_fault_is_survived_and_changes_no_weight(
    undisturbed: str, tiny: Path, tmp_path: Path, ceph: S3Server
) -> None:
    """On a real S3 store; the undisturbed run was on files."""
    run = tiny_run(tmp_path / "run", tiny, replicas=2, server=ceph, **OVERLAPPED)
    with run.up():
        reach(run, 3)

        kill(run.pids("rollout-0-i1"))  # a whole machine, without a word
        reach(run, step(run) + 2)

        os.kill(run.pid("trainer-0-i1", "grpo_orch.orchestrator.gateway"), signal.SIGKILL)
        reach(run, step(run) + 2)

        before = lasting(run)
        os.kill(run.daemon_pid, signal.SIGKILL)
        reach(run, step(run) + 2)  # training goes on without it
        run.cli("resume", run.url, "-d")
        assert before <= lasting(run), "resume adopts what runs"

        reach(run, 13)
        kill_trainer(run)
        os.kill(run.pid("trainer-0-i1", "grpo_orch.tasks.machine.uploader"), signal.SIGKILL)
        run.until("the requests under way", lambda: "batch_resumed" in run.last_words(1000), RUN_TIMEOUT_S)
        reach(run, 17)
        for node in list(run.state.nodes):
            if node.startswith("rollout"):
                kill(run.pids(node))
        finish(run)

        report = check_healthy(run, drift=math.inf)
        assert report["faults_survived"] >= 4  # two that are noticed in one tick may count as one
        assert sum(row.values.get(REPLAYED, 0) for row in read_metrics(run.store)) >= 1
        assert report["restarts"]["trainer-0"] == 1
        assert final_weights(run) == undisturbed  # of one node: how many there are changes nothing either
        run.cli("plot", run.url, "--out", str(tmp_path / "plot.png"))
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
        assert not ceph.client().list_multipart_uploads(Bucket=ceph.bucket).get("Uploads")


def test_lost_engine_notice_and_down_lose_no_step(undisturbed: str, tiny: Path, tmp_path: Path) -> None:
    """One rollout machine with two engines, of which one is killed; the trainer's machine gets a notice; `down`.

    The machine's two GPUs are a stand-in: names in CUDA_VISIBLE_DEVICES, which vLLM's build for CPUs ignores. No
    checkpoint is due before the last step: each trainer continues from what the one before stored when it left.
    """
    run = two_engines(tmp_path / "run", tiny)
    with run.up():
        lose_an_engine(run)

        give_notice(run, "trainer-0-i1")
        run.until("another machine trains", lambda: trained_by(run) == "trainer-0-i2", RUN_TIMEOUT_S)
        run.until("the other one is gone", lambda: run.pids("trainer-0-i1") == [])
        assert stored(run) == [step_restored(run)], "it goes on from what was stored last"

        reach(run, step(run) + 3)
        said = run.json("down", run.url)
        assert (said["phase"], said["machines"]) == ("stopped", [])
        assert said["step"] == said["stored_step"] == stored(run)[-1]

        run.cli("resume", run.url, "-d")
        finish(run)
        check_healthy(run, drift=math.inf)
        assert final_weights(run) == undisturbed


def two_engines(folder: Path, tiny: Path) -> Run:
    run = tiny_run(folder, tiny, replicas=1, save_steps=10 * STEPS, **OVERLAPPED)
    with run.edited() as spec:
        spec["rollout"]["resources"] = {"accelerators": "H100:2"}
        spec["trainer"]["reward_funcs"] = "rewards.held_share"
    with (folder / "rewards.py").open("a") as rewards:
        rewards.write(HOLDING)
    run.env[VISIBLE] = "0,1"
    return run


def lose_an_engine(run: Run) -> None:
    """Kill one of the two engines. Its machine stays, and so does the other, which serves until it is back."""
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
    assert [node for node in run.state.nodes if node.startswith("rollout")] == [MACHINE], "its machine stayed"
    let_go(run)


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
    status = documents.read_members(run.store)
    return {} if status is None else {one.node: one.boot_id for one in status.members if one.serving}


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


def give_notice(run: Run, node: str) -> None:
    """A notice of which half will be over in a few seconds: then a trainer leaves that has stored nothing so far.
    The other half is long, for a busy one to store what it has. The daemon hears of it once the trainer has said
    that it leaves: one that is slow to say so would be replaced before."""
    part = run.machine(node) / "part"
    part.write_text(f"{2 * HANG_S}")
    begun_s = time.time() - HANG_S + LEAVES_IN_S
    os.utime(part, (begun_s, begun_s))
    os.kill(run.daemon_pid, signal.SIGSTOP)
    part.rename(run.machine(node) / "work" / NOTICE)
    run.until("it leaves", lambda: (beat := documents.TRAINER.read(run.store)) is not None and beat.leaving)
    os.kill(run.daemon_pid, signal.SIGCONT)


def lasting(run: Run) -> set[int]:
    """The machines' own processes, and those on the trainer's. What starts in a machine, as vLLM does on one that
    replaces another, starts processes that soon end."""
    beside = (run.pids("trainer-0-i1", module) for module in TRAINERS)
    return {*run.own_pids().values(), *itertools.chain(*beside)}


def trained_by(run: Run) -> str | None:
    """The machine whose trainer has begun to train."""
    beat = documents.TRAINER.read(run.store)
    return beat.node if beat is not None and beat.max_steps > 0 else None


def stored(run: Run) -> list[int]:
    return [one.at.step for one in Catalog(run.store, "test").newest().checkpoints]


def step_restored(run: Run) -> int:
    """Where the second machine's trainer went on."""
    log = (run.machine("trainer-0-i2") / "log").read_text()
    (found,) = re.findall(r"training .*from_policy=0-(\d+)", re.sub(r"\x1b\[[0-9;]*m", "", log))
    return int(found)
