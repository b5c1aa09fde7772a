"""Run the application: its socket, its signals, and a shutdown that loses no request and leaves no process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

from card.api.async_llm import AsyncLLM
from card.errors import WorkerError
from card.machine.packages import install_command
from card.server.accepting import Server, room_for
from card.server.app import make_app
from card.server.config import ServerSettings
from card.server.connections import ServerConfig
from card.server.logs import frames_of, log_event
from card.server.service import Service
from card.text.grammar_tokens import has_grammars

logger = logging.getLogger(__name__)

_CUT_OFF_S = 2.0  # for requests that are cut off to report it to their clients
_CLOSING_S = 5.0  # for the engine's thread to end its round and the drafter
_HASTY_CLOSING_S = 1.0  # the same after a second signal
_DEAD_ENGINE = 1  # exit status


def serve(
    make_llm: Callable[[], AsyncLLM],
    settings: ServerSettings,
    listener: socket.socket,
    *,
    announce: Callable[[str], None] = lambda _: None,
) -> int:
    """Load the model and serve it until a signal or the engine's death; return the exit status.

    The first SIGTERM, SIGINT or SIGHUP refuses new requests and gives running ones `shutdown_timeout_s`; the second one
    ends at once. Must be called in the main thread.

    Args:
        listener: listens on the address of the settings; closed at the end.
        announce: gets the address once requests are answered.
    Raises: SettingsError, ModelError, VocabularyError, WorkerError while starting.
    """
    settings = replace(settings, max_connections=room_for(settings.max_connections))
    try:
        llm = make_llm()
    except BaseException:
        listener.close()
        raise
    run = _Run(llm, settings, listener, announce)
    gc.collect()
    gc.freeze()  # loaded objects stay: collecting garbage among them would delay every request
    return run.run()


def heard_signals() -> list[signal.Signals]:
    """Return the signals that end a server; a hang-up does not, if the server was started to outlive its terminal."""
    names = ("SIGINT", "SIGTERM", "SIGHUP")  # not every system has all
    numbers = [signal.Signals[name] for name in names if name in signal.Signals.__members__]
    return [one for one in numbers if one.name != "SIGHUP" or signal.getsignal(one) != signal.SIG_IGN]


class _Server(Server):
    """A server without uvicorn's handling of signals."""

    def __init__(self, config: ServerConfig, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()


class _Run:
    """One server from its start to its end."""

    def __init__(
        self, llm: AsyncLLM, settings: ServerSettings, listener: socket.socket, announce: Callable[[str], None]
    ) -> None:
        self._llm, self._settings, self._socket, self._announce = llm, settings, listener, announce
        app = make_app(llm, settings)
        self._service: Service = app.state.service
        self._config = ServerConfig(app, settings)
        self._server = _Server(self._config, self._started)
        self._num_signals = 0
        self._status = 0
        self._draining: asyncio.Task[None] | None = None

    def run(self) -> int:
        """Serve, then close everything. Returns: the exit status."""
        with asyncio.Runner(loop_factory=self._config.get_loop_factory()) as runner:
            runner.run(self._main())
        log_event(logger, logging.INFO, "stopped")
        if self._llm.host.grammars.is_compiling:  # only the end of this process stops that
            sys.stderr.flush()
            os._exit(self._status)
        return self._status

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        heard = heard_signals()
        for number in heard:
            loop.add_signal_handler(number, self._on_signal, number)
        watch = loop.create_task(self._watch_engine())
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            watch.cancel()
            self._service.close()
            if not await self._close_engine(_CLOSING_S):
                os._exit(self._status or _DEAD_ENGINE)
            for number in heard:
                loop.remove_signal_handler(number)

    def _started(self) -> None:
        host, port = self._socket.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        log_event(logger, logging.INFO, "ready", address=address, **_settings_shown(self._llm, self._settings))
        if not has_grammars():
            wanted = "response_format, structured_outputs and forced tools get 501; run " + install_command("serve")
            log_event(logger, logging.WARNING, "llguidance is not installed", hint=wanted)
        self._announce(address)

    def _on_signal(self, number: int) -> None:
        self._num_signals += 1
        log_event(logger, logging.WARNING, "signal", name=signal.Signals(number).name, count=self._num_signals)
        if self._num_signals == 1:
            self._service.arrivals.is_open = False
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        elif self._num_signals == 2:
            self._status = 128 + number
            self._draining = asyncio.get_running_loop().create_task(self._leave(self._status))
        else:
            os._exit(128 + number)

    async def _drain(self) -> None:
        arrivals, limit_s = self._service.arrivals, self._settings.shutdown_timeout_s
        log_event(logger, logging.INFO, "draining", requests=len(arrivals), limit_s=limit_s)
        try:
            await asyncio.wait_for(arrivals.until_empty(), limit_s)
        except TimeoutError:
            log_event(logger, logging.WARNING, "cutting off", requests=len(arrivals))
            arrivals.cut_off()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(arrivals.until_empty(), _CUT_OFF_S)
        self._server.should_exit = True

    async def _watch_engine(self) -> None:
        """End the process once the engine has died, so that its supervisor can restart it."""
        cause = (await self._llm.ended()).__cause__
        if cause is None:  # it was shut down, after a second signal
            return
        self._status = _DEAD_ENGINE
        facts = {"exception": type(cause).__name__, "at": frames_of(cause.__traceback__)}
        log_event(logger, logging.ERROR, "the engine has died; the server ends", status=self._status, **facts)
        with contextlib.suppress(TimeoutError):  # clients with running requests first get their errors
            await asyncio.wait_for(self._service.arrivals.until_empty(), _CUT_OFF_S)
        self._server.should_exit = True

    async def _leave(self, status: int) -> None:
        """End without waiting for requests, but close the drafter."""
        await self._close_engine(_HASTY_CLOSING_S)
        os._exit(status)

    async def _close_engine(self, seconds: float) -> bool:
        """End the engine and the drafter; return whether they have ended.

        If the engine hangs, its thread ends only with this process; the drafter then notices and ends too.
        """
        try:
            await asyncio.wait_for(self._llm.shutdown(), seconds)
        except (TimeoutError, WorkerError):
            log_event(logger, logging.ERROR, "the engine hangs and is left behind")
            sys.stderr.flush()
            return False
        return True


def _settings_shown(llm: AsyncLLM, settings: ServerSettings) -> dict[str, Any]:
    """Return the settings in effect, keys left out."""
    engine = llm.host.settings
    shown = asdict(settings) | {"num_api_keys": len(settings.api_keys)}
    del shown["api_keys"]
    models = {"model": engine.target, "draft_model": engine.draft, "method": llm.method.name}
    models["generation_config"] = engine.generation_config
    return {**models, "max_model_len": llm.max_model_len, "max_num_seqs": engine.max_num_seqs, **shown}
