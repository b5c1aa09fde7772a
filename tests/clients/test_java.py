"""Java's own client, which LangChain4j and Spring AI stand on; what it asks is in Ask.java."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.clients.running import FOLDER, KEY, run_client
from tests.server.running import Command

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]


def test_what_javas_client_asks_for_it_gets(server: Command, tmp_path: Path) -> None:
    java = shutil.which("java")
    if java is None:
        pytest.skip("there is no Java (Debian: apt-get install default-jdk-headless)")
    env = {"CLIENT_SERVER_URL": server.url, "CLIENT_API_KEY": KEY}
    told = run_client(java, str(FOLDER / "Ask.java"), folder=tmp_path, env=env)
    assert told.split("\n")[:7] == [*["whole 200 HTTP_1_1"] * 3, "chunked 200", "get 200", "stream 1", "together 8"]
