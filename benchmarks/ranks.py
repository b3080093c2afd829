"""A trainer of many processes, over gloo on CPUs: `make bench-ranks`; a number of starts may follow.

How many of so many starts of eight processes come to train and end in order, and how much memory the first of two
takes to publish what they have divided. How often a checkpoint is read: `tests/node/ranks/test_restore.py`.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

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


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else STARTS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        memory = {how: publish_memory(how, folder) for how in ("all", "each")}
        codes = started(count, folder)
    shares = {how: round(one["extra_bytes"] / one["weights_bytes"], 3) for how, one in memory.items()}
    figures = {
        "starts": len(codes),
        "starts_in_order": codes.count(0),
        "processes": PROCESSES,
        "published_bytes": memory["each"]["weights_bytes"],
        "publish_memory_share": shares,
    }
    console.print_json(json.dumps(figures))
    if codes.count(0) < count:
        raise SystemExit(f"{count - codes.count(0)} of {count} starts failed")


if __name__ == "__main__":
    main()
