"""What losing a spot machine costs on SkyPilot, second by second: `make bench-sky`.

One run of the tiny example on the tests' stand-in for EC2, through real SkyPilot. Each fault strikes a rollout
node while all nodes serve. In the same account a managed job of SkyPilot's own loses its machine silently.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.rig.local_run import ROOT
from benchmarks.rig.managed_job import ManagedJob
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import from_json
from grpo_orch.policies.serving.gateway_status import GatewayStatus, MemberStatus
from tests.e2e.sky_harness import BUCKET, MACHINE, SkyRun
from tests.rigs.sky.image import image
from tests.rigs.sky.missing import missing
from tests.rigs.sky.rig import SkyRig

NOTICE_S = 120.0  # AWS's
# The slot that is struck, and how its machine is lost.
FAULTS: dict[str, tuple[str, Callable[[SkyRig, str], None]]] = {
    "notice": ("rollout-0", lambda rig, machine: rig.preempt(machine, NOTICE_S)),
    "silent_preemption": ("rollout-1", lambda rig, machine: rig.preempt(machine, 0)),
    "crash": ("rollout-0", lambda rig, machine: rig.crash(machine)),
}
MANAGED = "managed_job"
SLOTS = ("trainer-0", "rollout-0", "rollout-1")
WAITED_FOR = ("has_machines", "confirm", "launch")  # of SkyPilot's calls: the others run beside

console = Console()


class Call(NamedTuple):
    """One call of SkyPilot's, with when it began and ended, in seconds since the epoch."""

    name: str
    began_s: float
    ended_s: float


class Watch:
    """What the run's store and the daemon's log say of nodes."""

    def __init__(self, rig: SkyRig, run: SkyRun) -> None:
        self._rig = rig
        self._run = run
        with rig.inside():
            self._s3 = rig.client("s3")

    def in_rotation(self, node: str) -> bool:
        """Whether the gateway counts on the node, as it last told the store."""
        return any(member.node == node and not member.draining for member in self._members())

    def serves(self, node: str) -> bool:
        """Whether the gateway sends it requests: between two policies it sends none to anybody."""
        return any(member.node == node and member.serving for member in self._members())

    def _members(self) -> list[MemberStatus]:
        with self._rig.inside():
            found = self._s3.list_objects_v2(Bucket=BUCKET, Prefix=f"tiny/{layout.MEMBERS}/").get("Contents", [])
            newest = max(one["Key"] for one in found)
            body = self._s3.get_object(Bucket=BUCKET, Key=newest)["Body"].read()
        return from_json(body, GatewayStatus, newest).members

    def calls(self, *nodes: str) -> Iterator[Call]:
        """What was waited for of SkyPilot's calls about these nodes."""
        for line in self._run.daemon_log().splitlines():
            said: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
            if said.get("call") in WAITED_FOR and said["cluster"].endswith(nodes):
                ended_s = datetime.fromisoformat(said["timestamp"]).timestamp()
                yield Call(said["call"], ended_s - said["seconds"], ended_s)


def strike(rig: SkyRig, run: SkyRun, watch: Watch, fault: str) -> dict[str, float]:
    """Seconds from the loss of a node, or the notice of it, to what follows."""
    slot, lose = FAULTS[fault]
    node = run.node(slot)
    machine = run.instance(node).id
    lost_at_s = time.time()
    lose(rig, machine)
    run.until(f"{node} is out of rotation", lambda: not watch.in_rotation(node))
    out_at_s = time.time()
    run.replaced(slot, node)
    other = run.node(slot)
    run.until(f"{other} serves", lambda: watch.serves(other))
    serving_at_s = time.time()
    run.until(f"{machine} is gone", lambda: machine not in {instance.id for instance in run.running()})
    run.serving(*SLOTS)
    run.stepped()
    requested_at_s = min(call.began_s for call in watch.calls(other))
    return {
        "out_of_rotation": out_at_s - lost_at_s,
        "replacement_requested": requested_at_s - lost_at_s,
        "replacement_serving": serving_at_s - lost_at_s,
        "sky_share": covered_s(watch.calls(node, other), lost_at_s, serving_at_s),
    }


def covered_s(calls: Iterable[Call], from_s: float, to_s: float) -> float:
    """Seconds between the two in which at least one of the calls was under way."""
    covered = 0.0
    for call in sorted(calls, key=lambda call: call.began_s):
        began_s, ended_s = max(call.began_s, from_s), min(call.ended_s, to_s)
        if ended_s > began_s:
            covered += ended_s - began_s
            from_s = ended_s
    return covered


def strike_managed(rig: SkyRig, run: SkyRun, job: ManagedJob) -> dict[str, float]:
    """Seconds from the loss of a managed job's machine to what SkyPilot makes of it."""
    job.launch(MACHINE)
    run.until("the managed job runs", lambda: job.status() == "RUNNING")
    run.stepped()
    lost_at_s = time.time()
    rig.preempt(job.instance().id, 0)
    run.until("the managed job recovers", lambda: job.status() == "RECOVERING")
    recovering_at_s = time.time()
    run.until("the managed job runs again", lambda: job.status() == "RUNNING")
    return {"recovering": recovering_at_s - lost_at_s, "running": time.time() - lost_at_s}


def measure(base: Path, seconds: dict[str, dict[str, float]]) -> None:
    """Put into `seconds` what each fault took. Raises AssertionError at one that takes too long."""
    (base / "run").mkdir()
    with SkyRig(image(ROOT / "build")) as rig:
        job = ManagedJob(rig)
        run = SkyRun(rig, base / "run")
        with console.status("three machines are bought"):
            run.up()
            run.serving(*SLOTS)
            run.stepped()
        watch = Watch(rig, run)
        for fault in FAULTS:
            with console.status(fault):
                seconds[fault] = strike(rig, run, watch, fault)
        with console.status(MANAGED):
            seconds[MANAGED] = strike_managed(rig, run, job)


def main() -> None:
    if reason := missing():
        raise SystemExit(f"no rig for SkyPilot: {reason}")
    held = conditions()
    seconds: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        try:
            measure(Path(name), seconds)
        finally:
            show(held, seconds)


def conditions() -> dict[str, Any]:
    """What the figures depend on, as it is before anything is started."""
    return {
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[1], 1),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        **{name: version(name) for name in ("skypilot", "moto")},
    }


def show(held: dict[str, Any], seconds: dict[str, dict[str, float]]) -> None:
    """Print the tables and write the figures."""
    console.print(
        f"Conditions: SkyPilot {held['skypilot']}, Python {held['python']}, EC2 played by moto {held['moto']}. "
        f"All machines, SkyPilot's API server and vLLM (CPU, the tiny example) share {held['cores']} cores and "
        f"{held['memory_gib']} GiB; the load was {held['load_before']} before. Seconds from the loss, or from the "
        f"notice of it {NOTICE_S:.0f} s before.",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(
        "a rollout node's", "out of rotation", "another asked for", "another serves", "of it in SkyPilot"
    )
    for fault in FAULTS:
        measured = seconds.get(fault, {}).values()
        table.add_row(fault.replace("_", " "), *(f"{figure:.1f}" for figure in measured))
    console.print(table)
    table = Table("a managed job's", "RECOVERING", "RUNNING")
    table.add_row("silent preemption", *(f"{figure:.1f}" for figure in seconds.get(MANAGED, {}).values()))
    console.print(table)
    figures = {
        "conditions": held,
        "seconds": {fault: seconds.get(fault) for fault in FAULTS},
        MANAGED: seconds.get(MANAGED),
    }
    out = ROOT / "benchmarks" / "results" / "sky.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(figures, indent=2) + "\n")
    console.print(f"Wrote {out.relative_to(ROOT)}", highlight=False)
    if lacking := [fault for fault in (*FAULTS, MANAGED) if fault not in seconds]:
        console.print(f"Not measured: {', '.join(lacking)}", highlight=False)


if __name__ == "__main__":
    main()
