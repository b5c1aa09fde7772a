"""The drafter's own process: load the draft model, connect to the target, draft until told to end.

Started by `card.links.child`; gets its settings as a line of JSON on standard input, and before them
perhaps another one with the model that they will name. Not for users.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import zmq

from card.assembly.drafters import load_drafter, load_likely, make_worker
from card.drafting.messages import DrafterMessage, Fault, decode, encode
from card.errors import CardError, ProtocolError, in_words
from card.links.process import FOLDER_PREFIX, DrafterConfig, LikelyModel
from card.machine.memory import give_back_memory
from card.models.loaded_model import LoadedModel

_IDLE_POLL_MS = 500
_PARENT_CHECK_S = 0.5


class _Connection:
    """The child's end of the link; frames that cannot be sent are dropped, as the protocol allows."""

    def __init__(self, config: DrafterConfig) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.connect(config.address)
        self._incarnation = config.incarnation

    def send(self, messages: list[DrafterMessage]) -> None:
        for message in messages:
            try:
                self._socket.send(encode(message, self._incarnation), zmq.NOBLOCK)
            except zmq.Again:
                return

    def poll(self, timeout_ms: int) -> bool:
        return bool(self._socket.poll(timeout_ms))

    def receive(self) -> bytes | None:
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def close(self) -> None:
        self._socket.close(linger=200)
        self._context.term()


def main() -> None:
    """Run the drafter; the exit status is 0 when told to end and 1 after a fault."""
    gc.freeze()  # what was imported stays
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the target's process decides what an interrupt means
    logging.getLogger("card").setLevel(logging.ERROR)  # the target's process logs the rest already
    received, likely, loaded = _next_message(), None, None
    if isinstance(received, LikelyModel):
        likely, loaded = received, load_likely(received)
        received = _next_message()
    assert isinstance(received, DrafterConfig)
    config = received
    if likely is not None and not likely.is_that_of(config.model):
        loaded = None
    threading.Thread(target=_end_with_parent, args=(config,), daemon=True).start()
    connection = _Connection(config)
    try:
        draft_until_told(config, connection, loaded)
    except (CardError, RuntimeError, MemoryError) as error:  # out of memory is a RuntimeError in torch
        connection.send([Fault(in_words(error))])
        connection.close()
        os._exit(1)
    connection.close()
    os._exit(0)  # to take torch down in order costs the target's process most of a second


def _next_message() -> LikelyModel | DrafterConfig:
    """Return the next line of standard input; at its end, end the process: it was not needed."""
    if not (line := sys.stdin.buffer.readline()):
        os._exit(0)
    return msgspec.json.decode(line, type=LikelyModel | DrafterConfig)


def draft_until_told(config: DrafterConfig, connection: _Connection, loaded: LoadedModel | None = None) -> None:
    """Load the model, unless it is ``loaded``, then draft until the target says to end."""
    writer, ready = load_drafter(config.model, threads=config.threads, loaded=loaded)
    worker = make_worker(writer)
    give_back_memory()
    gc.freeze()
    connection.send([ready])
    while not worker.is_shut_down:
        if worker.is_idle:
            connection.poll(_IDLE_POLL_MS)
        while (frame := connection.receive()) is not None:
            try:
                _, message = decode(frame)
                connection.send(worker.receive(message))  # type: ignore[arg-type]
            except ProtocolError as error:
                connection.send([Fault(str(error))])
                return
        connection.send(worker.step())


def _end_with_parent(config: DrafterConfig) -> None:
    """End this process when its parent is gone, and clear up after it.

    Linux's own death signal follows the thread that started us instead.
    """
    while os.getppid() == config.parent_pid:
        time.sleep(_PARENT_CHECK_S)
    folder = Path(config.address.removeprefix("ipc://")).parent
    if folder.name.startswith(FOLDER_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
