"""The run page in a real browser, on a run in files, served by the command itself."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.rig.long_run import LongRun
from grpo_orch.orchestrator.web.app import PAGES
from grpo_orch.policies.model.events import PitfallFound
from tests.budget import HANG_S

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.slow

STEPS, STEP_S = 1000, 3.0  # more steps than the window has points
CUT_OFF = """
const { clientWidth: wide, scrollWidth: needed } = document.documentElement;
const parts = [...document.querySelectorAll(".strip dt, .strip dd, nav a")];
const cut = (one) => one.clientWidth && one.scrollWidth > one.clientWidth + 1;
const outside = (one) => cut(one) || one.getBoundingClientRect().right > wide;
return [...(needed > wide ? ["the page"] : []), ...parts.filter(outside).map((one) => one.textContent)];
"""
HOSTILE = "<img src=x onerror='document.title=1'><script>document.title = 2</script>"


def until(browser: Chrome, holds: Callable[[], object]) -> None:
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.support.ui import WebDriverWait

    # Live pages replace their parts, also between finding one and reading it.
    WebDriverWait(browser, HANG_S, ignored_exceptions=[StaleElementReferenceException]).until(lambda _: holds())


def points_of(browser: Chrome) -> tuple[int, float, float]:
    """How many, and the first and the last step among them; what was drawn last."""
    told = browser.execute_script("return {...document.getElementById('charts').dataset}")
    return int(told.get("points", 0)), float(told.get("from", 0)), float(told.get("to", 0))


def lanes_of(browser: Chrome) -> tuple[int, float, float]:
    """How many, and from when until when; what was drawn last."""
    told = browser.execute_script("return {...document.getElementById('lanes').dataset}")
    return int(told.get("lanes", 0)), float(told.get("from", 0)), float(told.get("to", 0))


def complaints(browser: Chrome) -> list[dict[str, Any]]:
    """What the browser's console holds since the last call: errors, and what the content policy stopped."""
    found: list[dict[str, Any]] = browser.execute("getLog", {"type": "browser"})["value"]
    return found


def cut_off(browser: Chrome, url: str) -> object:
    """What stands at the head or leads to a page, and is not to be seen whole, on a phone's screen."""
    screen = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.get(url)
    found = browser.execute_script(CUT_OFF)
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    return found


def figure(browser: Chrome, label: str) -> str:
    find = (
        "return [...document.querySelectorAll('.strip div')].map(one => [...one.children].map(x => x.textContent))"
    )
    return next(str(value) for name, value, _ in browser.execute_script(find) if name == label)


@contextmanager
def served(url: str) -> Iterator[str]:
    argv = [sys.executable, "-m", "grpo_orch", "web", url, "--port", "0", "-o", "json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
        assert process.stdout.read() == ""  # nor does it complain of pages that were left


def test_in_a_browser(tmp_path: Path) -> None:
    browsers = pytest.importorskip("benchmarks.rig.browser", reason="selenium is not installed: run `make env`")
    if not Path(browsers.DRIVER).exists():
        pytest.skip("chromium-driver is not installed: run `make test-packages`")
    run = LongRun(f"file://{tmp_path}/run", STEPS, 6, time.time(), STEP_S)
    with served(run.store.url) as url, browsers.chromium("--window-size=620,900") as browser:
        from selenium.webdriver import ActionChains

        for page in PAGES:
            if page.name and "{" not in page.path:
                assert cut_off(browser, url.rstrip("/") + page.path) == []
                browser.get(url.rstrip("/") + page.path)
                assert browser.title == f"math-7b · {page.name}"
                if page.path == "/money":
                    until(browser, lambda: "spot" in browser.find_element("id", "dollars-info").text)
                assert complaints(browser) == []
        browser.get(url)
        until(browser, lambda: len(browser.find_elements("css selector", "#charts canvas")) == 3)
        browser.execute_script("window.opened = 'once'")

        # All of it in fewer points than it has steps; a part of it step by step.
        count, first, last = points_of(browser)
        assert count < STEPS * 0.7
        assert (first, last) == pytest.approx((1, STEPS), abs=3)
        panel = browser.find_element("css selector", "#charts .u-over")
        quarter = panel.size["width"] // 4
        drag = ActionChains(browser).move_to_element(panel).click_and_hold().move_by_offset(quarter, 0).release()
        drag.perform()
        until(browser, lambda: points_of(browser)[1] > first)
        count, near, far = points_of(browser)
        assert count == far - near + 1
        until(browser, lambda: browser.find_elements("css selector", "#split canvas"))
        until(browser, lambda: "rewards" in browser.find_element("id", "split-info").text)
        assert 0.45 * STEPS < near < far < 0.8 * STEPS
        assert complaints(browser) == []
        # The machines below are those of the same part, over time; a part of that is one of the curves, too.
        until(browser, lambda: lanes_of(browser)[1] > run.began_s + STEP_S * 0.4 * STEPS)
        part = browser.find_element("css selector", "#lanes canvas")
        ActionChains(browser).move_to_element(part).click_and_hold().move_by_offset(
            quarter // 2, 0
        ).release().perform()
        until(browser, lambda: points_of(browser)[1] > run.began_s)
        until(browser, lambda: lanes_of(browser)[2] < run.began_s + STEP_S * far)  # they are asked for apart
        count, since_s, until_s = lanes_of(browser)
        assert count == 7
        assert since_s <= points_of(browser)[1] <= points_of(browser)[2] <= until_s
        assert "rollout" in browser.find_element("id", "lanes-info").text
        ActionChains(browser).double_click(part).perform()
        until(browser, lambda: lanes_of(browser)[1] == run.began_s)
        browser.find_element("id", "axis").click()
        until(browser, lambda: points_of(browser)[1] == first)

        # What happens arrives by itself.
        run.goes_on()
        until(browser, lambda: figure(browser, "step") == f"{STEPS + 1:,}")
        until(browser, lambda: points_of(browser)[2] > last)

        # What others wrote is text, drawn by the server's own page and by the script's.
        run.happens(PitfallFound("reward_hacking", STEPS, HOSTILE))
        until(browser, lambda: HOSTILE in browser.find_element("id", "live").text)
        assert not browser.find_elements("css selector", "main img, main script")
        assert browser.title == "math-7b · Run"
        assert browser.execute_script("return window.opened") == "once"
        assert complaints(browser) == []
