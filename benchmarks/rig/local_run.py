"""A whole run of the tiny example in a folder of its own, by the command line, for benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from grpo_orch.checkpoint.records.metrics import MetricsRow, read_metrics
from grpo_orch.checkpoint.store.run_store import Store

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny"
NODE_PYTHON = ROOT / ".venv-node" / "bin" / "python"
RUN_TIMEOUT_S = 900.0


def make_tiny(folder: Path) -> None:
    """Make the tiny model and its prompts in `folder`."""
    subprocess.run([NODE_PYTHON, TINY / "make_model.py", "--out", folder], check=True, stdout=subprocess.DEVNULL)


def tiny_spec(model_folder: Path, **grpo: Any) -> dict[str, Any]:
    """The example's run.yaml on that model, without its evaluation and rehearsal, with `grpo` keys changed."""
    spec: dict[str, Any] = yaml.safe_load((TINY / "run.yaml").read_text())
    spec["trainer"]["model"] = str(model_folder / "model")
    spec["trainer"]["dataset"] = str(model_folder / "prompts.jsonl")
    spec["trainer"].pop("eval_dataset", None)
    spec.pop("rehearse", None)
    spec["trainer"].pop("setup")
    for key in ("eval_strategy", "eval_steps"):
        spec["grpo"].pop(key, None)
    spec["grpo"].update(grpo)
    return spec


def run(folder: Path, spec: dict[str, Any], extra: str = "") -> tuple[list[MetricsRow], dict[str, Any]]:
    """Run `spec` to its end below `folder`; return the logged steps and the report.

    Args:
        extra: code for the trainer's process, in the module of its rewards.
    """
    folder.mkdir(parents=True)
    (folder / "rewards.py").write_text((TINY / "rewards.py").read_text() + extra)
    (folder / "run.yaml").write_text(yaml.safe_dump({**spec, "storage": (folder / "store").as_uri()}))
    return run_file(folder / "run.yaml")


def run_file(run_yaml: Path) -> tuple[list[MetricsRow], dict[str, Any]]:
    """Run a file, whose store is `store` beside it, to its end; return the logged steps and the report."""
    folder = run_yaml.parent
    url = (folder / "store").as_uri()
    env = {**os.environ, "GRPO_ORCH_HOME": str(folder / "home"), "GRPO_ORCH_NODE_PYTHON": str(NODE_PYTHON)}
    command = [sys.executable, "-m", "grpo_orch"]
    up = subprocess.run(
        [*command, "up", run_yaml, "-y"], env=env, capture_output=True, text=True, timeout=RUN_TIMEOUT_S
    )
    if up.returncode != 0:
        raise SystemExit(f"the run failed:\n{up.stdout}\n{up.stderr}\nits logs are below {folder}")
    report = subprocess.run(
        [*command, "report", url, "-o", "json"], env=env, check=True, capture_output=True, text=True
    )
    return read_metrics(Store(url)), json.loads(report.stdout)
