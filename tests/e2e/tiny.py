"""The tiny example as a run of a test: made, started, waited for, checked."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import yaml

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.metrics import read_metrics
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.checkpoint.stream.transfer import read_manifest
from grpo_orch.policies.model.vocabulary import RunPhase
from tests.e2e.harness import ROOT, Run
from tests.rigs import tiny_model
from tests.rigs.store.server import S3Server

NODE_PYTHON = ROOT / ".venv-node" / "bin" / "python"
TINY = tiny_model.TINY
STEPS = 30
RUN_TIMEOUT_S = 900.0
DRIFT = 1e-4  # between the log-probabilities of trainer and node, at most
IN_PARTS: dict[str, Any] = {
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 1,
}


def make_tiny(folder: Path) -> Path:
    """Put the model and its data into `folder`."""
    return tiny_model.make_tiny(folder, NODE_PYTHON)


def tiny_run(
    folder: Path,
    tiny: Path,
    replicas: int,
    server: S3Server | None = None,
    peft: dict[str, Any] | None = None,
    max_staleness: int = 0,
    **changes: Any,
) -> Run:
    spec = yaml.safe_load((TINY / "run.yaml").read_text())
    spec.pop("rehearse", None)
    spec["trainer"].pop("setup")  # the model is made once for all tests
    spec["trainer"]["model"] = str(tiny / "model")
    spec["trainer"]["dataset"] = str(tiny / "prompts.jsonl")
    spec["trainer"]["eval_dataset"] = str(tiny / "held_out.jsonl")
    if peft is not None:
        spec["trainer"]["peft"] = peft
    spec["grpo"] = {**spec["grpo"], "max_steps": STEPS, "save_steps": 10, "eval_steps": 10, **changes}
    spec["rollout"] |= {"replicas": replicas, "max_staleness": max_staleness}
    folder.mkdir(exist_ok=True)
    (folder / "rewards.py").write_text((TINY / "rewards.py").read_text())
    return Run(folder, spec, NODE_PYTHON, server)


def final_weights(run: Run, steps: int = STEPS) -> str:
    """The digest of the last checkpoint's weights."""
    newest = Catalog(run.store, "test").newest().checkpoints[-1]
    assert newest.at.step == steps
    files = read_manifest(run.store, newest).files
    return next(f.digest for f in files if f.name == "model.safetensors")


def step(run: Run) -> int:
    beat = documents.TRAINER.read(run.store)
    return beat.step if beat else 0


def reach(run: Run, wanted: int) -> None:
    run.until(f"step {wanted}", lambda: step(run) >= wanted, RUN_TIMEOUT_S)


def kill_trainer(run: Run) -> None:
    """Kill the first trainer, without its machine, and return once the next attempt has begun."""
    os.kill(run.pid("trainer-0-i1", "grpo_orch.tasks.trainer.main"), signal.SIGKILL)
    run.until(
        "another trainer",
        lambda: (beat := documents.TRAINER.read(run.store)) is not None and beat.attempt == 2,
    )


def finish(run: Run) -> None:
    run.until("the end", lambda: run.state.phase is RunPhase.FINISHED and not run.state.nodes, RUN_TIMEOUT_S)


def check_healthy(run: Run, steps: int = STEPS, gain: float = 0.2, drift: float = DRIFT) -> dict[str, Any]:
    """What must hold at the end of every run, however it went; `gain` is what it learned at least, in reward, and
    `drift` the most by which the log-probability of a token may differ from the present policy's."""
    rows = read_metrics(run.store)
    assert [row.step for row in rows if "reward" in row.values] == list(range(1, steps + 1))
    report: dict[str, Any] = run.json("report", run.url)
    assert report["steps"] == steps
    assert report["reward_last"] > report["reward_first"] + gain
    assert report["sampling_logp_difference_max"] < drift, (
        "a token was sampled from other weights than the trainer's"
    )
    return report
