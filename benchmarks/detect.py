"""How soon divergence is told, how often wrongly, and how far back a run would go: `make bench-detect`.

Three sets of labelled runs, each by itself: synthetic ones, healthy and diverging, logged as TRL would
(`benchmarks/rig/divergence/families.py`); recorded ones that the detectors were made with in sight; and recorded
ones that nobody looked at meanwhile. Beside the detector, what most people would do: a fixed line for KL.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console

from benchmarks.rig.detect_runs import Judged, judge_all, microseconds_a_point
from benchmarks.rig.detect_tables import by_family, by_run, by_set, figures
from benchmarks.rig.divergence.diverging import SAVE_STEPS
from benchmarks.rig.local_run import ROOT

console = Console()


def main() -> None:
    with console.status("judging the runs"):
        judged = judge_all()
    show(judged, microseconds_a_point())


def show(judged: Sequence[Judged], point_us: float) -> None:
    """Print the tables and write the figures."""
    console.print(
        f"Conditions: {len(judged)} runs, the synthetic ones logged every 1, 5, 10 or 20 steps; a checkpoint "
        f"every {SAVE_STEPS} steps, of which the default retention keeps what it keeps. False: healthy runs that "
        "tripped, and diverging ones that did before their onset; for each 1,000 points logged while all was "
        "well. Delay: logged points from the first bad update to the trip, median and 90th percentile. Targets: "
        "how much of what was caught goes back to before the first bad update; good lost: the median of the good "
        f"steps that this throws away. The detector takes {point_us:.0f} µs a point.",
        highlight=False,
        soft_wrap=True,
    )
    for table in (by_set(judged), by_family(judged), by_run(judged)):
        console.print(table)
    out = ROOT / "benchmarks" / "results" / "detect.json"
    out.parent.mkdir(exist_ok=True)
    found = {"microseconds_a_point": round(point_us, 1), **figures(judged)}
    out.write_text(json.dumps(found, indent=2) + "\n")
    console.print(f"Wrote {out.relative_to(ROOT)}", highlight=False)


if __name__ == "__main__":
    main()
