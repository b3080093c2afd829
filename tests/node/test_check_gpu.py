"""`make check-gpu`, on the CPU in place of a GPU: all of it passes, and each check finds what it is there for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.check_gpu import following, handing_over, step, trainers
from benchmarks.check_gpu.handing_over import COUNT, CUT, TOKENS
from benchmarks.check_gpu.lab import REPOSITORY, Lab
from benchmarks.check_gpu.outcome import Failed
from grpo_orch.tasks.rollout.vllm.loader_trace import Part

# One thread each, as the other tests' trainers: sums in one order, and no thread that waits for a core.
WITHOUT_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(torch.device("cpu"), 0, tmp_path)


def check_gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "benchmarks.check_gpu", *arguments]
    return subprocess.run(argv, cwd=REPOSITORY, env=WITHOUT_GPU, capture_output=True, text=True, check=False)


def test_all_checks_pass_on_the_cpu() -> None:
    done = check_gpu("--cpu", "-o", "json")
    said: dict[str, Any] = json.loads(done.stdout)
    assert {one["check"]: one["found"] for one in said["checks"] if one["outcome"] != "passed"} == {}
    assert (done.returncode, done.stderr) == (0, "")
    assert said["machine"]["device"].startswith("the CPU")
    found = {one["check"]: one["found"] for one in said["checks"]}
    page = (REPOSITORY / "docs" / "gpu-report.md").read_text()
    assert [name for name in found if f"\n| {name} |" not in page or f"\npassed     {name} " not in page] == []
    assert found["a killed trainer, TRL"] == "killed at step 3 of 6, the same weights bit for bit"
    assert found["deltas, in place"] == "4 steps; 2% of the bytes travelled; digests and all bits agree"


def test_missing_gpu_is_reported_in_one_line() -> None:
    done = check_gpu()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "check-gpu: torch sees no GPU on this machine; --cpu tries it all on the CPU\n"


def test_a_change_that_does_not_reach_the_memory_is_found(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Part, "write", lambda *_: True)
    with pytest.raises(Failed, match="is not in memory as it is in the file"):
        following.deltas(lab)


def test_a_step_that_leaves_a_tensor_alone_is_found(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda _: None)
    with pytest.raises(Failed, match="did not change, nor did 20 more"):
        step.grpo_step(lab)


def test_memory_beyond_arithmetic_is_found(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lab.model
    monkeypatch.setattr(Lab, "model", lambda _, **sizes: model(**sizes).double())
    with pytest.raises(Failed, match=r"^memory takes 21\.\d MiB, by arithmetic 10\.5$"):
        step.memory(lab)


@pytest.mark.parametrize(("off", "said"), [(0, "0 differ"), (30, "30 differ, the earliest from token 47")])
def test_differences_after_a_handover_are_counted(off: int, said: str) -> None:
    whole = [[(one * 7 + place) % 60 for place in range(TOKENS)] for one in range(COUNT)]
    rest = [[*row[CUT:-1], row[-1] + (one < off)] for one, row in enumerate(whole)]
    assert handing_over.judged(whole, rest) == f"of 32 completions, cut at token 24 of 48, {said}"


def test_engine_that_does_not_continue_from_tokens_is_found() -> None:
    whole = [[(one * 7 + place) % 60 for place in range(TOKENS)] for one in range(COUNT)]
    with pytest.raises(Failed, match="only 3% went on with the same token; chance gives 3%"):
        handing_over.judged(whole, [[1] * (TOKENS - CUT)] * COUNT)


def test_weights_after_a_kill_are_judged_by_calm_runs(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {"killed": 1.0, "calm": 0.0, "calm-again": 0.0}
    monkeypatch.setattr(trainers.Run, "__init__", lambda self, _, name: setattr(self, "name", name))
    monkeypatch.setattr(trainers.Run, "trained", lambda self, *_: {"w": torch.tensor(ends[self.name])})
    with pytest.raises(Failed, match="differ by up to 1, those of two undisturbed runs by 0"):
        trainers.killed(lab)
    ends["calm-again"] = 0.5
    assert "not bit for bit" in trainers.killed(lab)
