"""`card draft-server`: one draft model for the targets of a network."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import click

from card.assembly.drafters import load_drafter, make_worker
from card.cli.parts.starting import spinner
from card.config import parse_size
from card.errors import SettingsError
from card.links.keys import check_may_listen, load_server_keys
from card.links.process import DraftModel
from card.links.server import DraftServer, ServerLimits


def run(
    listen: str,
    draft: str,
    keys: Path | None,
    threads: int,
    cores: tuple[int, ...] | None,
    kv_cache_memory: str | None,
    max_sessions: int,
    max_sessions_per_client: int | None,
    **model: Any,
) -> None:
    """Run `card draft-server`."""
    kv_cache_bytes = parse_size(kv_cache_memory, "kv_cache_memory") if kv_cache_memory else None
    server_keys = load_server_keys(keys) if keys else None
    check_may_listen(listen, has_keys=server_keys is not None)  # before a large model is loaded
    limits = ServerLimits(max_sessions=max_sessions, max_sessions_per_client=max_sessions_per_client)
    if cores:
        _stay_on(cores)
    drafting = DraftModel.to_serve(draft, kv_cache_bytes=kv_cache_bytes, **model)
    with spinner(f"loading {draft}"):
        writer, ready = load_drafter(drafting, threads=threads)
    server = DraftServer(listen, partial(make_worker, writer), ready, keys=server_keys, limits=limits)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.stop())
    try:
        click.echo(f"card draft-server: {draft} ready on {server.address}")
        server.run()
    finally:
        server.close()


def _stay_on(cores: tuple[int, ...]) -> None:
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, AttributeError) as error:
        raise SettingsError(f"cannot run on cores {cores}: {error}; leave --cores out") from error
