"""A headless Chromium that looks at pages, at any width and in both colour schemes."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

#: Nothing but the page: no first-run pages, no updates, no requests of its own.
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip

#: Elements whose content is wider than their box, or that reach beyond the page, unless a box that scrolls holds them.
_CUT = """
const scrolls = e => ['auto', 'scroll'].includes(getComputedStyle(e).overflowX);
const inside = e => e && (scrolls(e) || inside(e.parentElement));
const width = document.documentElement.clientWidth;
const cut = [];
if (document.documentElement.scrollWidth > width) cut.push('the page is ' + document.documentElement.scrollWidth);
for (const e of document.body.querySelectorAll('*')) {
  if (inside(e) || !e.getClientRects().length) continue;
  const box = e.getBoundingClientRect(), svg = e instanceof SVGElement;
  const wide = !svg && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== 'inline';
  const parent = svg && e.tagName === 'text' ? e.ownerSVGElement.getBoundingClientRect() : null;
  const out = parent && (box.left < parent.left - 2 || box.right > parent.right + 2 || box.top < parent.top - 2
    || box.bottom > parent.bottom + 2);
  if (wide || out || box.right > width + 1 || box.left < -1)
    cut.push(e.tagName + ' ' + e.textContent.slice(0, 60) + ' ' + JSON.stringify(box));
}
return cut;
"""


class Browser:
    """One window."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, width: int, dark: bool) -> None:
        """Open a file in a window of so many pixels."""
        do = self.driver.execute_cdp_cmd
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        do("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        do("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(path.as_uri())

    def cut(self) -> list[str]:
        """Return what of the page is cut, or stands out of it."""
        found: list[str] = self.driver.execute_script(_CUT)
        return found

    def console(self) -> list[str]:
        """Return what the page has written to the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def run(self, script: str) -> Any:
        """Return what a script returns."""
        return self.driver.execute_script(script)


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Give the block a browser with a new profile in a folder. The test is skipped where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (extra test)")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(driver, log_output=os.devnull)
    found = webdriver.Chrome(options, service)
    try:
        yield Browser(found)
    finally:
        found.quit()
