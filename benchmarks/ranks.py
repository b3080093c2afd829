"""A trainer of many processes, over gloo on CPUs: `make bench-ranks`; a number of starts may follow.

How many of so many starts of eight processes come to train and end in order; how much memory the first of two
takes to publish what they have divided; and whether a run of two, of which one is killed in the middle of a
step, ends with an undisturbed run's weights, for each way to divide a model. How often a checkpoint is read:
`tests/node/ranks/test_restore.py`.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.rig.local_run import NODE_PYTHON, ROOT

STARTS, PROCESSES = 20, 8
MEMORY_S = 1200.0
console = Console()


def started(count: int, folder: Path) -> list[int]:
    """The exit codes of so many trainers, each for a run of one step."""
    argv = [str(NODE_PYTHON), "-m", "benchmarks.rig.rank_starts", str(count), str(PROCESSES), str(folder)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as starts:
        assert starts.stdout is not None
        codes = []
        for line in starts.stdout:
            codes.append(int(line))
            console.print(f"start {len(codes)} of {count}: exit code {codes[-1]}")
    return codes


def publish_memory(how: str, folder: Path) -> dict[str, int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    argv = [str(NODE_PYTHON), "-m", "benchmarks.rig.weights.publish_memory", port]
    first, second = (
        subprocess.Popen([*argv, rank, str(folder), how], cwd=ROOT, stdout=subprocess.PIPE) for rank in "01"
    )
    said, _ = first.communicate(timeout=MEMORY_S)
    if first.returncode or second.wait(MEMORY_S):
        raise SystemExit("a process failed")
    found: dict[str, int] = json.loads(said)
    return found


def killed(seed: int, folder: Path) -> list[dict[str, Any]]:
    """What became of a run with a process killed, for each way to divide a model."""
    argv = [str(NODE_PYTHON), "-m", "benchmarks.rig.rank_kills", str(seed), str(folder)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as kills:
        assert kills.stdout is not None
        found = []
        for line in kills.stdout:
            found.append(json.loads(line))
            console.print_json(line)
    return found


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else STARTS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        memory = {how: publish_memory(how, folder) for how in ("all", "each")}
        codes = started(count, folder)
        kills = killed(random.SystemRandom().randrange(10**6), folder / "kills")
    shares = {how: round(one["extra_bytes"] / one["weights_bytes"], 3) for how, one in memory.items()}
    figures = {
        "starts": len(codes),
        "starts_in_order": codes.count(0),
        "processes": PROCESSES,
        "published_bytes": memory["each"]["weights_bytes"],
        "publish_memory_share": shares,
        "kills": len(kills),
        "kills_with_the_same_weights": sum(one["same_weights"] for one in kills),
    }
    console.print_json(json.dumps(figures))
    if codes.count(0) < count:
        raise SystemExit(f"{count - codes.count(0)} of {count} starts failed")
    if other := [f"{one['way']} (seed {one['seed']})" for one in kills if not one["same_weights"]]:
        raise SystemExit(f"other weights after a kill: {', '.join(other)}")


if __name__ == "__main__":
    main()
