"""Record runs of TRL's GRPOTrainer, in .venv-node: `python -m benchmarks.recordings.record [NAME...] --out DIR`.

Writes DIR/seen/NAME.jsonl or DIR/unseen/NAME.jsonl, a row for each point that TRL logs, once the run has ended. A
run that is there already is left as it is. The models are trained first, where they are not there.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.recordings.grpo import run
from benchmarks.recordings.regime import Regime
from benchmarks.recordings.regimes import REGIMES, split

MODELS = Path("build/recordings")


def train_models(names: set[str]) -> None:
    """Those that are missing, all at once."""
    missing = [name for name in sorted(names) if not (MODELS / name / "tokenizer.json").exists()]
    argv = [sys.executable, "-m", "benchmarks.recordings.models"]
    started = [subprocess.Popen([*argv, name, "--out", str(MODELS / name)]) for name in missing]
    codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit("a model could not be trained")


def record(regime: Regime, out: Path) -> str:
    """Record one run; return a sentence about it."""
    torch.set_num_threads(1)
    path = out / split(regime) / f"{regime.name}.jsonl"
    if path.exists():
        return f"{regime.name}: is there"
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = run(regime, MODELS, Path(folder))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("".join(json.dumps(row) + "\n" for row in rows))
    unfinished.rename(path)
    return f"{regime.name}: {len(rows)} rows in {time.monotonic() - started_s:.0f} s"


def quiet() -> None:
    """Without what TRL and transformers print of each step."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    logging.disable(logging.WARNING)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a regime (default: all)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at once (default: one a core)")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(REGIMES)
    if unknown:
        parser.error(f"no such run: {', '.join(sorted(unknown))}")
    chosen = [REGIMES[name] for name in arguments.names] or list(REGIMES.values())
    train_models({regime.model for regime in chosen})
    with multiprocessing.get_context("fork").Pool(arguments.jobs, initializer=quiet) as pool:
        started = [(regime, pool.apply_async(record, (regime, arguments.out))) for regime in chosen]
        for regime, result in started:
            try:
                print(result.get(), flush=True)
            except Exception as error:  # noqa: BLE001  # the others are recorded all the same
                print(f"{regime.name}: {error!r}", flush=True)


if __name__ == "__main__":
    main()
