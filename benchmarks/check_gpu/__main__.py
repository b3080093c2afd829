"""Whether this machine's GPUs do what a run asks of them: `make check-gpu`, in minutes, without a download.

It tries what of the stack is there: with torch and transformers a trainer's step, its memory, weights that follow
it in place and a hand-over; with PEFT adapters; with TRL real trainers, one of which is killed; with vLLM real
engines. Exit code 0 where nothing failed, 1 where something did, 2 where there is nothing to try.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def main() -> int:
    """Try all that can be tried here. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="check-gpu", description=__doc__.partition("\n\n")[0] if __doc__ else "")
    parser.add_argument("--cpu", action="store_true", help="try it all on the CPU, with tiny models")
    parser.add_argument("-o", dest="form", choices=["text", "json"], default="text", help="what to print")
    arguments = parser.parse_args()
    try:
        import torch
        import transformers  # noqa: F401  # whether it is there
    except ImportError as error:
        print(f"check-gpu: {error.name} is not installed here; torch and transformers are needed", file=sys.stderr)
        return 2
    gpus = 0 if arguments.cpu else torch.cuda.device_count()
    if not gpus and not arguments.cpu:
        print("check-gpu: torch sees no GPU on this machine; --cpu tries it all on the CPU", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="check-gpu-"))
    with _others_to(folder / "log") as out:
        failed = _try_all(gpus, folder, arguments.form, out)
    if failed:
        print(f"check-gpu: what the processes wrote is in {folder}/log", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    return int(failed)


def _try_all(gpus: int, folder: Path, form: str, out: TextIO) -> bool:
    import torch

    from benchmarks.check_gpu import engines, following, handing_over, step, trainers
    from benchmarks.check_gpu.lab import Lab
    from benchmarks.check_gpu.outcome import Outcome, tried

    checks = {
        "a step of a trainer": step.grpo_step,
        "memory": step.memory,
        "deltas, in place": following.deltas,
        "an adapter": following.adapters,
        "a hand-over, transformers": handing_over.by_transformers,
        "a killed trainer, TRL": trainers.killed,
        "several GPUs, TRL": trainers.several,
        "policies into vLLM": engines.apply,
    }
    lab = Lab(torch.device("cuda" if gpus else "cpu"), gpus, folder)
    machine = lab.described()
    if form == "text":
        print(", ".join(f"{key} {value}" for key, value in machine.items()), end="\n\n", file=out, flush=True)
    outcomes = list[Outcome]()
    for name, check in checks.items():
        one = tried(name, check, lab)
        outcomes.append(one)
        if form == "text":
            print(f"{one.outcome:9}  {name:25}  {one.took_s:5.0f} s  {one.found}", file=out, flush=True)
    count = Counter(one.outcome for one in outcomes)
    if form == "json":
        json.dump({"machine": machine, "checks": [dataclasses.asdict(one) for one in outcomes]}, out, indent=2)
        print(file=out)
    else:
        print(f"\n{count['passed']} passed, {count['failed']} failed, {count['not there']} not there", file=out)
    return count["failed"] > 0


@contextmanager
def _others_to(log: Path) -> Iterator[TextIO]:
    """Standard output for this program alone: what libraries and processes write goes into a file."""
    sys.stdout.flush()
    kept = [os.dup(1), os.dup(2)]
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    try:
        with os.fdopen(os.dup(kept[0]), "w") as out:
            yield out
    finally:
        for number, one in zip((1, 2), kept, strict=True):
            os.dup2(one, number)


if __name__ == "__main__":
    sys.exit(main())
