"""Headless Chromium, for the run page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from selenium.webdriver import Chrome, ChromeOptions, ChromeService

DRIVER = "/usr/bin/chromedriver"


@contextmanager
def chromium(*arguments: str) -> Iterator[Chrome]:
    """Yield a browser started with these arguments. It keeps what its console prints."""
    options = ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", *arguments):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = Chrome(options=options, service=ChromeService(DRIVER))
    try:
        yield browser
    finally:
        browser.quit()
