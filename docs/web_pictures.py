"""Make docs/web.md's pictures: `.venv/bin/python -m docs.web_pictures`, with Chromium; two minutes.

They are of the made-up run that `long_run` writes: a real one of 10,000 steps and 60 nodes nobody has paid for.
"""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from selenium.webdriver import Chrome
from selenium.webdriver.support.ui import WebDriverWait

from benchmarks.rig.browser import chromium
from benchmarks.rig.long_run import LongRun

IMAGES = Path(__file__).resolve().parent / "images"
STEPS, NODES, WIDTH = 10_000, 60, 1280
PICTURES = {"run": ("", "light", 1400), "nodes": ("nodes", "dark", 1180), "rollbacks": ("rollbacks", "light", 560)}
LONGEST_S, BEAT_S = 120.0, 1.0
DRAWN = """
const lanes = document.getElementById("lanes"), charts = document.getElementById("charts");
const speed = [...document.querySelectorAll(".strip dt")].find((one) => one.textContent === "tokens a second");
return (!lanes || lanes.dataset.lanes > 0) && /[0-9]/.test(speed.nextElementSibling.textContent)
  && (!charts || charts.querySelectorAll("canvas").length === 3)
  && (!charts || document.getElementById("split").dataset.points > 0)
  && !document.body.classList.contains("lost")
"""


@contextmanager
def going_on(run: LongRun) -> Iterator[None]:
    """Its trainer and gateway are heard from: of a gateway that says nothing new the page tells no queues."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            run.beat()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def take(browser: Chrome, url: str, mode: str, height: int) -> Image.Image:
    """Return the top of a page, once it is drawn."""
    scheme = {"features": [{"name": "prefers-color-scheme", "value": mode}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
    screen = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.get(url)
    WebDriverWait(browser, LONGEST_S).until(lambda it: it.execute_script(DRAWN))
    taken = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
    return Image.open(io.BytesIO(base64.b64decode(taken))).convert("RGB")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        run = LongRun(f"file://{Path(name).resolve()}/math-7b", STEPS, NODES, time.time())
        argv = [sys.executable, "-m", "grpo_orch", "web", run.store.url, "--port", "0", "-o", "json"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                url = json.loads(server.stdout.readline())["url"]
                with going_on(run), chromium("--hide-scrollbars") as browser:
                    for picture, (page, mode, height) in PICTURES.items():
                        # A palette makes it a third as large; this method keeps colours that are rare.
                        image = take(browser, url + page, mode, height)
                        palette = image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
                        palette.save(IMAGES / f"web-{picture}.png", optimize=True)
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
