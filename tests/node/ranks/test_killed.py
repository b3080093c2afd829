"""A trainer of several processes on one machine: one publishes, one restores, and none that is lost costs a step.

The machine's GPUs are what no test machine has: the processes meet over gloo, each on the CPU.
"""

from __future__ import annotations

import random
import subprocess
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from checkpoint.stream.catalog import Catalog
from checkpoint.stream.transfer import read_manifest
from policies.model import exit_codes
from policies.model.node_contract import TRAINER
from policies.model.vocabulary import PolicyVersion
from tasks.machine.exit_note import take_exit_code
from tests.budget import HANG_S
from tests.node.ranks import cpu_for_gpu
from tests.node.trainer.rig import GRPO, Rig, make_tiny, open_rig
from tests.node.trainer.test_resume import read, results

STEPS = 6
LAST = PolicyVersion(0, STEPS)


def of(processes: int, **grpo: Any) -> dict[str, Any]:
    """A run of eight completions a step, in as many processes as its machine is to have GPUs."""
    batch = {"max_steps": STEPS, "per_device_train_batch_size": GRPO["per_device_train_batch_size"] // processes}
    return {"grpo": {**batch, **grpo}, "accelerators": f"H100:{processes}"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def test_a_rank_that_is_killed_costs_no_weight(tiny: Path, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)
    with open_rig(tmp_path / "calm", tiny, **of(2)) as calm:
        assert calm.wait(calm.start_ranks()) == exit_codes.OK
    with open_rig(tmp_path / "killed", tiny, **of(2)) as killed:
        step, asked, killed_one = dice.randrange(2, STEPS - 1), threading.Event(), threading.Event()

        def hold(version: str) -> None:
            if PolicyVersion.parse(version).step == step:
                asked.set()
                killed_one.wait(HANG_S)

        killed.gateway.on_asked = hold
        launcher = killed.start_ranks()
        killed.until("that far", lambda: asked.is_set() and bool(killed.stored()))
        ranks = ranks_of(launcher)
        assert len(ranks) == 2
        dice.choice(ranks).kill()
        killed_one.set()
        assert launcher.wait(HANG_S) != 0
        assert take_exit_code(killed.work) in (None, exit_codes.FAILED), "the other rank lost its connection"
        assert killed.wait(killed.start_ranks(2), 2) == exit_codes.OK
        assert killed.log(2).read_text().count("checkpoint_restored") == 1
        assert [path.name for path in killed.work.glob("policy*")] == ["policy"]
        assert final_files(killed) == final_files(calm)
    assert killed.gateway.unproved == calm.gateway.unproved == []
    assert results(killed.store) == results(calm.store)
    assert read(calm.store), "what both processes measured is what one of them stored"


def test_ranks_end_with_their_launcher(tiny: Path, tmp_path: Path) -> None:
    with open_rig(tmp_path, tiny, **of(2)) as rig:
        asked, over = threading.Event(), threading.Event()

        def hold(version: str) -> None:  # they cannot end by themselves
            if PolicyVersion.parse(version).step >= 1:
                asked.set()
                over.wait(HANG_S)
                raise ConnectionError("who asked is gone")

        rig.gateway.on_asked = hold
        launcher = rig.start_ranks()
        rig.until("training", asked.is_set)
        ranks = ranks_of(launcher)
        assert len(ranks) == 2
        launcher.kill()
        launcher.wait()
        _, alive = psutil.wait_procs(ranks, timeout=HANG_S)
        over.set()
        assert not alive


def ranks_of(launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The trainer's processes that a launcher has started."""
    children = psutil.Process(launcher.pid).children()
    return [one for one in children if {TRAINER, cpu_for_gpu.__name__} & set(one.cmdline())]


def final_files(rig: Rig) -> dict[str, str]:
    """Digests of what the last checkpoint makes of the run, each rank's random state among it."""
    found = read_manifest(rig.store, Catalog(rig.store, "test").newest().find(LAST))
    kept = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth")
    digests = {file.name: file.digest for file in found.files if file.name in kept}
    assert len(digests) == len(kept)
    return digests
