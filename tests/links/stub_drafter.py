"""A child process in place of the drafter that misbehaves as its argument says; starts in a fraction of a second."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator

sys.path.insert(0, sys.argv[-1])  # where the package of its parent lies

import msgspec
import zmq

from card.drafting.messages import PROTOCOL_VERSION, Fault, Layer, Open, Ping, Pong, Ready, Shutdown, decode, encode
from card.tree.nodes import NewNodes

FOREVER_S = 600.0
READY = Ready(12, 128, 0)


class Stub:
    """The child's end of the link."""

    def __init__(self) -> None:
        config = json.load(sys.stdin)
        self.incarnation = config["incarnation"]
        self.socket = zmq.Context().socket(zmq.PAIR)
        self.socket.connect(config["address"])

    def say(self, message: object, incarnation: int | None = None, version: int = PROTOCOL_VERSION) -> None:
        number = self.incarnation if incarnation is None else incarnation
        _, _, body = msgspec.msgpack.decode(encode(message, number))  # type: ignore[arg-type]
        self.socket.send(msgspec.msgpack.encode([version, number, body]))

    def heard(self) -> Iterator[object]:
        while True:
            yield decode(self.socket.recv())[1]


def start(stub: Stub, behaviour: str) -> None:
    """Be ready, or not in the chosen way."""
    match behaviour:
        case "not ready":
            time.sleep(FOREVER_S)
        case "foreign ready":
            stub.say(READY, incarnation=stub.incarnation + 1)
            time.sleep(FOREVER_S)
        case "fault at start":
            stub.say(Fault("no such model"))
            stub.socket.close(linger=200)
            sys.exit(1)
        case "dead at start":
            sys.exit(3)
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stub.say(READY)
    match behaviour:
        case "short life":
            time.sleep(0.02)
            sys.exit(0)
        case "mute":
            time.sleep(FOREVER_S)


def answer(stub: Stub, behaviour: str, message: object) -> None:
    """Answer a ping as one should, and everything else in the chosen way."""
    match behaviour, message:
        case _, Ping(nonce=nonce):
            stub.say(Pong(nonce))
        case "noise", _:
            stub.socket.send(b"\xc1 this is no message")
        case "huge frame", _:
            stub.socket.send(bytes(16 * 1024 * 1024 + 1))
        case "other version", _:
            stub.say(Pong(0), version=PROTOCOL_VERSION + 1)
        case "lies", Open(request_id=request_id):  # of a text of 501 tokens
            stub.say(Layer(request_id, 0, 0, True, 0, 500, 501, NewNodes.none(), 0, 0.0, 0, 0, 0))
        case "ghost", Open():  # frames of other incarnations, each of them harmful
            stub.say(Fault("of a ghost"), incarnation=stub.incarnation - 1)
            stub.say(Ready(1, 1, 1), incarnation=stub.incarnation + 1)
        case "fault", _:
            stub.say(Fault("RuntimeError: out of memory"))
        case "exit", _:
            sys.exit(7)


def main(behaviour: str) -> None:
    """Misbehave until told to end."""
    stub = Stub()
    start(stub, behaviour)
    for message in stub.heard():
        if isinstance(message, Shutdown) and behaviour != "stubborn":
            return
        answer(stub, behaviour, message)


if __name__ == "__main__":
    main(sys.argv[1])
