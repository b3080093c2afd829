"""Make the README's pictures from the demo's run: `.venv/bin/python examples/tiny/pictures.py`, after `make demo`.

The live view is drawn as `grpo-orch status` draws it: of a run that goes on, as it is now; of one that is over, as
of the moment at which it ended.
"""

from __future__ import annotations

import io
import re
import shutil
import time
from pathlib import Path

from rich.console import Console

from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.control.observe import GatewayWatch
from grpo_orch.orchestrator.views.reader import Reader
from grpo_orch.orchestrator.views.run_view import view_of
from grpo_orch.orchestrator.views.screen import Screen

ROOT = Path(__file__).resolve().parents[2]
DEMO, IMAGES = ROOT / "build" / "demo", ROOT / "docs" / "images"
WIDTH, HEIGHT = 100, 24


def draw_live_view(store: Store, out: Path) -> None:
    """Write the view of the run in `store` as an SVG that loads no font from elsewhere."""
    reader = Reader(store)
    view = view_of(reader, time.time(), GatewayWatch(store, trust_first=True).observe())
    if view.over and reader.last is not None:
        view = view_of(reader, reader.last.time_s, None)
    console = Console(record=True, width=WIDTH, height=HEIGHT, file=io.StringIO(), force_terminal=True)
    console.print(Screen(view, HEIGHT))
    svg = console.export_svg(title="grpo-orch status", unique_id="live-view")
    out.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    draw_live_view(Store((DEMO / "build" / "store").as_uri()), IMAGES / "live-view.svg")
    if (DEMO / "plot.png").exists():  # it is drawn when the run is over
        shutil.copyfile(DEMO / "plot.png", IMAGES / "plot.png")


if __name__ == "__main__":
    main()
