"""Draft servers and clients of them for tests: in threads, over real sockets on loopback."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar

import msgspec
import zmq

from card.assembly.drafters import make_worker
from card.config import DraftSettings
from card.drafting.beam import BeamWriter
from card.drafting.messages import (
    PROTOCOL_VERSION,
    Correction,
    DrafterMessage,
    DraftSpec,
    Hello,
    Open,
    PassSeconds,
    Ready,
    TargetMessage,
    decode,
    encode,
)
from card.links.keys import ServerKeys
from card.links.link import DrafterLink
from card.links.remote import RemoteLink
from card.links.server import DraftServer, ServerLimits
from card.models.protocol import LanguageModel
from tests.decoding import decode as decode_text
from tests.decoding import plain
from tests.drafts import draft_spec
from tests.toy import TableModel
from tests.waiting import PATIENCE_S, until

M = TypeVar("M")
_LONGEST_WAIT_S = 5.0  # for candidates, in one round
LOOPBACK = "tcp://127.0.0.1:0"


class Clock:
    """A clock that stands still until a test moves it; to be put in the place of a module's `time`."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now


def make_server(
    draft: LanguageModel,
    *,
    address: str = LOOPBACK,
    keys: ServerKeys | None = None,
    tokenizer: str = "",
    writer: BeamWriter | None = None,
    layers_per_pass: int = 1,
    **limits: Any,
) -> DraftServer:
    """Return a server that listens and is not run yet, with a writer of its own unless one is given."""
    cost = PassSeconds(((1, 0.001),), 0.0, 0.0)
    ready = Ready(draft.vocab_size, draft.max_model_len, 7, cost, tokenizer or None, layers_per_pass)
    open_worker = partial(make_worker, writer or BeamWriter(draft))
    return DraftServer(address, open_worker, ready, keys=keys, limits=ServerLimits(**limits))


def decode_until_accepted(
    target: TableModel, link: DrafterLink, *, max_wait_s: float = _LONGEST_WAIT_S, **request: Any
) -> None:
    """Decode again and again, always with the text of plain decoding, until candidates were accepted.

    The target waits for candidates while the drafter is up: on a busy machine it would be through before they come.
    """
    waiting = DraftSettings(max_wait_s=max_wait_s)
    expected = plain(target, **{name: value for name, value in request.items() if name == "params"})
    accepted: list[int] = []

    def is_accepted() -> bool:
        token_ids, reason, stats = decode_text(target, link, draft=waiting, **request)
        assert (token_ids, reason) == expected
        accepted.append(stats.accepted_tokens)
        return accepted[-1] > 0

    until(is_accepted)


@contextlib.contextmanager
def running(server: DraftServer) -> Iterator[DraftServer]:
    """Run the server in a thread; it must still be alive at the end."""
    thread = threading.Thread(target=server.run, name="draft-server", daemon=True)
    thread.start()
    try:
        yield server
        assert thread.is_alive(), "the server has fallen over"
    finally:
        server.stop()
        thread.join()  # the test's own timeout ends it
        server.close()


@contextlib.contextmanager
def connected(address: str, *, vocab_size: int = 12, start: bool = True, **settings: Any) -> Iterator[RemoteLink]:
    """Connect to a server and close the link afterwards."""
    timeouts = {"start_timeout_s": PATIENCE_S, "silence_timeout_s": PATIENCE_S}
    link = RemoteLink(address, vocab_size=vocab_size, **timeouts | settings)
    try:
        if start:
            link.start()
        yield link
    finally:
        link.close()


class RawClient:
    """A client that says whatever a test wants, byte by byte if need be."""

    def __init__(self, address: str, *, incarnation: int = 1, options: dict[int, Any] | None = None) -> None:
        self.incarnation = incarnation
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        for option, value in (options or {}).items():
            self._socket.setsockopt(option, value)
        self._socket.connect(address)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def say(self, *messages: TargetMessage, version: int = PROTOCOL_VERSION) -> None:
        for message in messages:
            _, number, body = msgspec.msgpack.decode(encode(message, self.incarnation))
            self.send(msgspec.msgpack.encode([version, number, body]))

    def begin(self, *requests: int, spec: DraftSpec | None = None) -> None:
        """Say hello and open requests, each with a text of its own."""
        self.say(Hello(), *(Open(i, (i % 12, 1, 2), spec or draft_spec()) for i in requests))

    def heard(self) -> list[DrafterMessage]:
        """Return what has arrived."""
        messages: list[DrafterMessage] = []
        while self._socket.poll(0):
            messages.append(decode(self._socket.recv())[1])  # type: ignore[arg-type]
        return messages

    def hear(self, kind: type[M]) -> M:
        """Wait for the next message of this kind; others are thrown away."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if self._socket.poll(100):
                message = decode(self._socket.recv())[1]
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"no {kind.__name__} has come")


def correction(request_id: int, start: int, *token_ids: int) -> Correction:
    """Return a correction that changes no setting."""
    return Correction(request_id, 0, start, token_ids, wants_snapshot=False)
