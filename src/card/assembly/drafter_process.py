"""The drafter's own process: load the draft model, connect to the target, draft until told to end.

Started by `card.transport.child`; gets its settings as JSON on standard input. Not for users.
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

from card.assembly.drafters import load_drafter, make_worker
from card.errors import CardError, ProtocolError, in_words
from card.protocol.messages import DrafterMessage, Fault, decode, encode
from card.transport.process import FOLDER_PREFIX, DrafterConfig

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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the target's process decides what an interrupt means
    logging.getLogger("card").setLevel(logging.ERROR)  # it has said already what users must know
    settings = sys.stdin.buffer.read()
    if not settings:
        os._exit(0)  # it was started ahead of need, and nobody needed it
    config = msgspec.json.decode(settings, type=DrafterConfig)
    threading.Thread(target=_end_with_parent, args=(config,), daemon=True).start()
    connection = _Connection(config)
    try:
        draft_until_told(config, connection)
    except (CardError, RuntimeError, MemoryError) as error:  # out of memory is a RuntimeError in torch
        connection.send([Fault(in_words(error))])
        connection.close()
        os._exit(1)
    connection.close()
    os._exit(0)  # to take torch down in order costs the target's process most of a second


def draft_until_told(config: DrafterConfig, connection: _Connection) -> None:
    """Load the model, then draft until the target says to end."""
    writer, ready = load_drafter(config.model, threads=config.threads)
    worker = make_worker(writer)
    gc.freeze()  # what is there now stays
    gc.enable()
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
