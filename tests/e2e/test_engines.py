"""A run on one rollout machine of two engines, from `up` to its end: an engine is killed, then the machine goes.

Its GPUs are a stand-in: names in CUDA_VISIBLE_DEVICES, which vLLM's build for CPUs does not look at.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from checkpoint.records import documents
from policies.model.gpus import VISIBLE
from policies.serving.wire import MemberStatus
from tasks.rollout.vllm_server import BOOT_ENV
from tests.e2e.harness import Run
from tests.e2e.tiny import RUN_TIMEOUT_S, check_healthy, final_weights, finish, make_tiny, reach, tiny_run

pytestmark = [pytest.mark.whole, pytest.mark.slow]

STEPS = 30


def members(run: Run) -> dict[str, MemberStatus]:
    status = documents.members(documents.newest_gateway(run.store)).read(run.store)
    return {} if status is None else {one.node: one for one in status.members}


def kill(run: Run, node: str, boot_id: str) -> None:
    """SIGKILL to all of one engine's processes at once."""
    found = psutil.process_iter(["environ"])
    mine = (one.pid for one in found if (one.info["environ"] or {}).get(BOOT_ENV) == boot_id)
    victims = sorted({*mine} & {*run.pids(node)})
    assert len(victims) > 1
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):  # it has ended with its parent
            os.kill(pid, signal.SIGKILL)


def test_neither_the_end_of_an_engine_nor_of_its_machine_changes_a_weight(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "tiny")
    changes: dict[str, Any] = {"max_steps": STEPS, "save_steps": 10, "eval_steps": STEPS}
    calm = tiny_run(tmp_path / "calm", tiny, replicas=1, **changes)
    preempted = {"at_step": 18, "preempt": "rollout-0", "notice_s": 4}
    run = tiny_run(tmp_path / "run", tiny, 1, accelerators="L4:2", faults=[preempted], **changes)
    run.env[VISIBLE] = "0,1"
    both = ["rollout-0-i1.0", "rollout-0-i1.1"]
    try:
        calm.cli("up", str(calm.yaml), "-y", "-d")
        finish(calm)

        run.cli("up", str(run.yaml), "-y", "-d")
        reach(run, 4)
        run.until("both engines serve", lambda: sorted(members(run)) == both, RUN_TIMEOUT_S)
        shown = next(one for one in run.json("status", run.url)["nodes"] if one["slot"] == "rollout-0")
        assert (shown["node"], shown["engines"]) == ("rollout-0-i1", 2)
        before = members(run)
        kill(run, "rollout-0-i1", before[both[1]].boot_id)
        reach(run, 8)
        assert members(run)[both[0]].boot_id == before[both[0]].boot_id
        finish(run)

        assert check_healthy(run, STEPS)["restarts"]["rollout-0"] == 1, "the machine, once"
        assert final_weights(run, STEPS) == final_weights(calm, STEPS)
    finally:
        calm.end()
        run.end()
