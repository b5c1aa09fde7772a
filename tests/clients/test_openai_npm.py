"""The npm package `openai` against a running server; what it asks is in openai.test.mjs."""

from __future__ import annotations

import re

import pytest

from tests.clients.running import FOLDER, KEY, installed, run_client
from tests.server.running import Command

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]


def test_what_the_npm_client_asks_for_it_gets(server: Command) -> None:
    node = installed("node", "install Node.js 20 or later with npm (Debian: apt-get install nodejs npm)")
    is_there = (FOLDER / "node_modules" / "openai").is_dir()
    assert is_there, "the npm package openai is not installed; run make test-clients, or npm ci in tests/clients"
    env = {"CLIENT_SERVER_URL": server.url, "CLIENT_API_KEY": KEY}
    told = run_client(node, "--test", "--test-reporter=tap", "openai.test.mjs", folder=FOLDER, env=env)
    counts = {name: int(count) for name, count in re.findall(r"^# (\w+) (\d+)$", told, re.MULTILINE)}
    assert counts["pass"] == counts["tests"] >= 15, told
