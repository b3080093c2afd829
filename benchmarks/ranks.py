"""The memory that a trainer of several processes takes to publish weights: `make bench-ranks`.

Two processes, over gloo on CPUs, have divided a model by FSDP2: what the first holds at most beyond its own part.
"""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.rig.local_run import NODE_PYTHON, ROOT

MEMORY_S = 1200.0
console = Console()


def publish_memory(how: str, folder: Path) -> dict[str, int]:
    """Bytes of the weights and of the memory beside them, by `benchmarks.rig.publish_memory`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    argv = [str(NODE_PYTHON), "-m", "benchmarks.rig.publish_memory", port]
    first, second = (
        subprocess.Popen([*argv, rank, str(folder), how], cwd=ROOT, stdout=subprocess.PIPE) for rank in "01"
    )
    said, _ = first.communicate(timeout=MEMORY_S)
    if first.returncode or second.wait(MEMORY_S):
        raise SystemExit("a process failed")
    found: dict[str, int] = json.loads(said)
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        memory = {how: publish_memory(how, Path(name)) for how in ("all", "each")}
    shares = {how: round(one["extra_bytes"] / one["weights_bytes"], 3) for how, one in memory.items()}
    figures = {"published_bytes": memory["each"]["weights_bytes"], "publish_memory_share": shares}
    console.print_json(json.dumps(figures))


if __name__ == "__main__":
    main()
