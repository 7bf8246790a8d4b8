"""A headless Chromium for tests of pages: ``with browser() as page``."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

from support.patience import PATIENCE_S

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"

_CHROMIUM, _DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (_CHROMIUM and _DRIVER),
    reason="needs chromium and chromedriver: apt-get install chromium chromium-driver",
)


class Page:
    """One tab. What a page shows is waited for, never slept for."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def script(self, code: str, *args: object) -> Any:
        return self.driver.execute_script(code, *args)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements that are there now, in one look."""
        code = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return self.script(code, selector)

    def until(self, true: Any, message: str = "") -> Any:
        wait = WebDriverWait(self.driver, PATIENCE_S, poll_frequency=0.05)
        return wait.until(lambda _: true(), message)

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def screenshot(self, name: str) -> Path:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        assert self.driver.save_screenshot(str(path))
        return path

    def complaints(self) -> list[str]:
        """What the browser's console was told since the last look: errors and blocked content."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@contextmanager
def browser() -> Iterator[Page]:
    options = webdriver.ChromeOptions()
    assert _CHROMIUM and _DRIVER
    options.binary_location = _CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.add_argument("--hide-scrollbars")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(_DRIVER))
    try:
        page = Page(driver)
        page.resize(1440, 1180)
        yield page
    finally:
        driver.quit()
