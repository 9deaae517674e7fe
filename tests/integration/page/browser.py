"""A real browser for the tests of the page: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HAS_BROWSER = CHROMIUM is not None and importlib.util.find_spec("playwright") is not None
needs_browser = pytest.mark.skipif(
    # Continuous integration installs both (.ci/run), so there the tests fail instead.
    not HAS_BROWSER and "CI" not in os.environ,
    reason="needs Chromium (apt install chromium) and playwright (pip install -e '.[sweep]')",
)
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--force-color-profile=srgb"),
)
SCREENSHOTS = os.environ.get("IDLM_SCREENSHOTS")
"""Folder for the screenshots of the documentation; without it none are made."""
MILLISECONDS = 60_000.0
"""How long a test waits for what must come to pass."""


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None, "there is no Chromium: apt install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(browser: Any, url: str, **options: Any) -> Iterator[Any]:
    """The page at `url`, in a new profile. It must load nothing from elsewhere, break no rule of its policy
    and raise nothing; the browser's own report of an HTTP error is not a mistake of the page."""
    context = browser.new_context(**options)
    context.set_default_timeout(MILLISECONDS)
    page, faults, urls = context.new_page(), list[str](), list[str]()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: urls.append(request.url))
    page.goto(url)
    yield page
    assert not [text for text in faults if not text.startswith("Failed to load resource")]
    assert all(one.startswith((url, "data:")) for one in urls), urls
    context.close()


def store_screenshot(page: Any, name: str) -> None:
    """Store a screenshot of the page for the documentation, if screenshots are wanted."""
    if SCREENSHOTS is not None:
        page.evaluate("document.activeElement.blur()")
        page.screenshot(path=Path(SCREENSHOTS) / f"page_{name}.png")
