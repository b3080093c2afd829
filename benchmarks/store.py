"""What the run store costs: `make bench-store`.

The trainer's stall for a checkpoint, and what its steps lose beside the upload; a gigabyte up and down against the
fastest plain client of the same server; the journal's appends, and how long `resume` reads. Sides take turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.rig import journal
from benchmarks.rig.local_run import NODE_PYTHON, ROOT
from benchmarks.rig.weights.transfer import SIDES
from grpo_orch.checkpoint.store.run_store import OPTIONS_ENV, Store
from tests.rigs.store.ceph_server import ceph_server, missing_programs
from tests.rigs.store.moto_server import moto_server
from tests.rigs.store.server import S3Server, free_port, running, wait_for_port

FILE_BYTES, TURNS = 1 << 30, 3
APPENDS = 500
EVENTS = (100, 10_000, 100_000)

console = Console()


def python(executable: Path | str, *arguments: str, env: dict[str, str]) -> dict[str, Any]:
    """Run a module that prints JSON as its last line."""
    done = subprocess.run(
        [executable, "-m", *arguments], cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"{arguments[0]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@contextmanager
def any_server(folder: Path) -> Iterator[tuple[str, S3Server]]:
    """Ceph's gateway where it is installed, else moto; with its name."""
    folder.mkdir()
    if missing_programs():
        with moto_server(folder) as server:
            yield "moto", server
    else:
        with ceph_server(folder) as (server, _):
            yield "Ceph RGW", server


def measure_stall(folder: Path) -> dict[str, Any]:
    """The trainer beside an upload into a sink. See `benchmarks.rig.stall`."""
    port, log = free_port(), folder / "sink.log"
    options = {
        "endpoint": f"http://127.0.0.1:{port}",
        "region": "x",
        "access_key_id": "x",
        "secret_access_key": "x",
    }
    work = Path(tempfile.mkdtemp(prefix="grpo-orch-bench-", dir="/dev/shm"))
    (folder / "node").mkdir()
    env = {
        OPTIONS_ENV: json.dumps(options),
        "GRPO_ORCH_RUN": "s3://sink/run",
        "GRPO_ORCH_NODE": "trainer-0-i1",
        "GRPO_ORCH_TOKEN": "none",
        "GRPO_ORCH_ATTEMPT": "1",
        "GRPO_ORCH_WORKDIR": str(folder / "node"),
    }
    try:
        with running([sys.executable, "-m", "benchmarks.rig.gateway.sink", str(port)], log) as process:
            wait_for_port(port, process, log, timeout_s=20)
            return python(NODE_PYTHON, "benchmarks.rig.stall", str(work), env=env)
    finally:
        subprocess.run(["rm", "-rf", work], check=True)


def measure_transfers(folder: Path) -> tuple[str, dict[tuple[str, str], list[float]], float]:
    """Seconds by (side, direction), and the peak of our memory in MiB; a fresh server each turn."""
    file = folder / "file"
    file.write_bytes(os.urandom(FILE_BYTES))
    seconds: dict[tuple[str, str], list[float]] = {(side, way): [] for side in SIDES for way in ("up", "down")}
    rss_mib, names = 0.0, set()
    for turn in range(TURNS):
        with any_server(folder / f"server-{turn}") as (name, server):
            names.add(name)
            env = {OPTIONS_ENV: json.dumps(server.options())}
            for side in (*SIDES,) if turn % 2 else (*reversed(SIDES),):
                for way in ("up", "down"):
                    arguments = (side, way, server.url(f"turn-{side}"), str(file))
                    got = python(sys.executable, "benchmarks.rig.weights.transfer", *arguments, env=env)
                    seconds[side, way].append(got["seconds"])
                    if side == "ours":
                        rss_mib = max(rss_mib, got["rss_mib"])
    return ", ".join(names), seconds, rss_mib


def measure_journal(folder: Path) -> tuple[dict[str, float], list[journal.Recovery]]:
    """Appends a second by store, and how long runs of EVENTS take to be taken up, on files."""
    folder.mkdir()
    with moto_server(folder) as server:
        rates = {
            "files": journal.appends_per_s(Store((folder / "appends").as_uri()), APPENDS),
            "moto": journal.appends_per_s(Store(server.url("appends"), options=server.options()), APPENDS),
        }
    return rates, [journal.recovery(Store((folder / f"events-{count}").as_uri()), count) for count in EVENTS]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        with console.status("the trainer's stall, 1.5 GB"):
            stall = measure_stall(base)
        with console.status(f"1 GiB up and down, {TURNS} turns"):
            server, seconds, rss_mib = measure_transfers(base)
        with console.status("the journal"):
            appends, recoveries = measure_journal(base / "journal")
    show(stall, server, seconds, rss_mib, appends, recoveries)


def show(
    stall: dict[str, Any],
    server: str,
    seconds: dict[tuple[str, str], list[float]],
    rss_mib: float,
    appends: dict[str, float],
    recoveries: list[journal.Recovery],
) -> None:
    """Print the tables and write the figures."""
    middle = {pair: median(times) for pair, times in seconds.items()}
    fastest = {way: min((side for side in SIDES if side != "ours"), key=lambda s: middle[s, way]) for way in WAYS}
    figures = {
        "stall_ratio": median(stall["usual_s"]) / median(stall["ours_s"]),
        "step_slowdown": median(stall["beside_s"]) / median(stall["calm_s"]),
        "upload_ratio": middle[fastest["up"], "up"] / middle["ours", "up"],
        "restore_ratio": middle[fastest["down"], "down"] / middle["ours", "down"],
        "rss_mib_max": max(rss_mib, stall["uploader_rss_mib"]),
        "journal_appends_per_s": appends,
        "resume_seconds": {str(one.entries): one.seconds for one in recoveries},
    }
    console.print(
        f"Conditions: this machine alone. Stall: {stall['state_bytes'] / 1e9:.2f} GB of state, trainer and "
        f"uploader on the same {os.cpu_count()} processors, S3 requests into a sink. Transfers: 1 GiB, {server}, "
        f"{TURNS} turns, on loopback.",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("the trainer", "seconds", title="A checkpoint")
    for label, key in (
        ("waits: saved, then uploaded", "usual_s"),
        ("waits: spooled", "ours_s"),
        ("a step, nothing beside it", "calm_s"),
        ("a step beside the upload", "beside_s"),
        ("the upload beside it takes", "upload_s"),
    ):
        table.add_row(label, f"{median(stall[key]):.3f}")
    console.print(table)
    table = Table("1 GiB, MB/s", *WAYS, title=f"{server}")
    for side in SIDES:
        table.add_row(side, *(f"{FILE_BYTES / 1e6 / middle[side, way]:.0f}" for way in WAYS))
    console.print(table)
    table = Table("events", "seconds to resume", "objects read", title="Journal, on files")
    for one in recoveries:
        table.add_row(str(one.entries), f"{one.seconds:.3f}", str(one.objects))
    console.print(table)
    rates = ", ".join(f"{rate:.0f} on {store}" for store, rate in appends.items())
    console.print(f"Appends a second, one after another: {rates}", highlight=False)
    out = ROOT / "benchmarks" / "results" / "store.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(figures, indent=2) + "\n")
    console.print(json.dumps(figures, indent=2), highlight=False)


WAYS = ("up", "down")

if __name__ == "__main__":
    main()
