"""How soon the run page is drawn for a long run: `make bench-web`.

A run of 10,000 steps and 1,000 rollout nodes on files, with losses, refusals and two rollbacks; `grpo-orch web`,
and headless Chromium on the same machine. A page is drawn once its three panels hold the curves and
the steps' time and the lanes are there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from selenium.webdriver.support.ui import WebDriverWait

from benchmarks.rig.browser import chromium
from benchmarks.rig.long_run import LongRun

STEPS, NODES, TIMES = 10_000, 1000, 7
LONGEST_S = 120.0
CLOSER = {"x": "step", "from": "5000", "to": "5500"}
DRAWN = (
    "return document.querySelectorAll('#charts canvas').length === 3"
    " && document.getElementById('lanes').dataset.lanes > 0"
    " && document.getElementById('split').dataset.points > 0"
)
SERIES = "return fetch('/series?' + new URLSearchParams(arguments[0])).then(answer => answer.text())"

console = Console(width=120)


def measure(url: str) -> tuple[list[float], list[float], dict[str, float]]:
    """Seconds until the run page is drawn, each time anew; until a part of it is fetched; of the other pages."""
    with chromium("--window-size=1280,1000") as browser:
        browser.get("about:blank")
        drawn, closer, others = [], [], {}
        for _ in range(TIMES):
            began_s = time.perf_counter()
            browser.get(url)
            WebDriverWait(browser, LONGEST_S, poll_frequency=0.01).until(lambda it: it.execute_script(DRAWN))
            drawn.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            browser.execute_script(SERIES, CLOSER)
            closer.append(time.perf_counter() - began_s)
        for page in ("nodes", "money", "checkpoints", "rollbacks", "events"):
            began_s = time.perf_counter()
            browser.get(url + page)
            others[page] = time.perf_counter() - began_s
        return drawn, closer, others


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        with console.status("a long run is written"):
            run = LongRun(f"file://{Path(name).resolve()}/run", STEPS, NODES, time.time())
        argv = [sys.executable, "-m", "grpo_orch", "web", run.store.url, "--port", "0", "-o", "json"]
        began_s = time.perf_counter()
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            opened_s = time.perf_counter() - began_s
            try:
                with console.status("it is looked at"):
                    drawn, closer, others = measure(url)
            finally:
                server.terminate()
    show(opened_s, drawn, closer, others)


def show(opened_s: float, drawn: list[float], closer: list[float], others: dict[str, float]) -> None:
    """Print the table."""
    size = f"{STEPS:,} steps, {NODES:,} rollout nodes"
    console.print(f"Conditions: {size}, a store of files, server and Chromium on one machine.", highlight=False)
    table = Table("", "seconds")
    table.add_row("the command, until it serves", f"{opened_s:.2f}")
    table.add_row("the run page until drawn, the first time", f"{drawn[0]:.2f}")
    table.add_row(f"the run page until drawn, median of {TIMES - 1} more", f"{median(drawn[1:]):.2f}")
    table.add_row("500 of the steps fetched anew, median", f"{median(closer):.2f}")
    for page, taken_s in others.items():
        table.add_row(f"{page}", f"{taken_s:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
