"""One `card serve` for all clients of this folder: the demo pair in float32, behind a key, always speculating.

Programs run as their users run them, in processes of their own. LangChain is a library: its tests import it, and only
when they run, since `make test` collects them without it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.running import KEY
from tests.server.running import Command, command


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    folder = tmp_path_factory.mktemp("server")
    options = ("demo-target", "--dtype", "float32", "--policy", "fixed", "--max-num-seqs", "4")
    with command(folder, *options, env={"CARD_API_KEY": KEY}) as running:
        yield running
