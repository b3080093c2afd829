"""How much memory is planned for training, and how much TRL's own step allocates: `make bench-sizing`.

The step is TRL's, with its loss, optimizer and clipping, over tensors without content, so that real sizes need
no GPU and no model; `-o json` prints the figures alone. What the arithmetic leaves out is in docs/plan.md.
"""

from __future__ import annotations

import json
import subprocess
import sys

from rich.console import Console
from rich.table import Table

from benchmarks.rig.local_run import NODE_PYTHON, ROOT

GB = 1e9
console = Console(width=140)


def main() -> None:
    """Compare and print."""
    argv = [str(NODE_PYTHON), "-m", "benchmarks.rig.sizing.cases"]
    found = []
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as cases:
        assert cases.stdout is not None
        for line in cases.stdout:
            if not line.startswith("{"):  # DeepSpeed's greeting
                continue
            found.append(one := json.loads(line))
            print(f"{len(found)}: {one['name']}", file=sys.stderr)
    if cases.returncode:
        raise SystemExit(f"{' '.join(argv)} failed; run it by itself to see why")
    worst = max((one["planned"] / one["allocated"] for one in found), key=lambda ratio: abs(ratio - 1))
    if "json" in sys.argv[1:]:
        print(json.dumps({"cases": found, "worst_ratio": round(worst, 3)}))
        return
    table = Table("training", "highest at", "planned, GB", "allocated, GB", "ratio")
    for one in found:
        planned, allocated = one["planned"], one["allocated"]
        figures = (f"{planned / GB:.2f}", f"{allocated / GB:.2f}", f"{planned / allocated:.3f}")
        table.add_row(one["name"], one["moment"], *figures)
    console.print(table)
    console.print(f"the worst of {len(found)}: {worst:.3f}")


if __name__ == "__main__":
    main()
