"""A real browser for tests, and what axe-core finds wrong with a page in it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)

PATIENCE_MS = 60_000.0  # for what takes a moment on an idle machine


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
        browser = playwright.chromium.launch(executable_path=found, args=[*_ARGUMENTS, *arguments], timeout=PATIENCE_MS)
        yield browser
        browser.close()


def faults_by_axe(page: Page) -> list[str]:
    """Return what keeps some people from using the page as it is now, best practices included."""
    found = Axe().run(page).response
    assert len(found["passes"]) > 10, "it has looked at something"
    return [
        f"{one['impact']} {one['id']}: {one['help']}: {node['html'][:200]}"
        for one in found["violations"]
        for node in one["nodes"]
    ]
