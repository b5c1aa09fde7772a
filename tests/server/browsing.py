"""A real browser for tests."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


@contextlib.contextmanager
def chromium(*arguments: str) -> Iterator[Browser]:
    """Run Chromium with these arguments besides; where there is none the test is skipped, or fails if it must run."""
    found = next(filter(None, map(shutil.which, _CHROMIUM)), None)
    if found is None:
        message = "there is no Chromium to drive; install one, on Debian with: apt install chromium"
        if os.environ.get("CARD_REQUIRE_BROWSER"):
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=[*_ARGUMENTS, *arguments])
        yield browser
        browser.close()
