"""What a drafter must never say, and lies that it could tell: messages and frames that are slipped into a link."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from card.drafting.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Correction,
    Declined,
    DrafterMessage,
    Layer,
    Open,
    Pong,
    Ready,
    Resync,
    TargetMessage,
    encode,
)
from card.engine.target import TargetWorker
from card.tree.nodes import NewNodes
from tests.drafts import draft_spec
from tests.reaching_in import expected_of_drafter, running

# The target goes on listening after these: late, foreign, or formally right and untrue.
LIES = (
    "wrong tokens",
    "stale epoch",
    "unknown parents",
    "foreign request",
    "repeated",
    "huge seq",
    "absurd counters",
    "false resync",
    "unasked ready",
    "declined",
    "pong",
)
# A drafter that says one of these is replaced.
OFFENCES = (
    "token outside the vocabulary",
    "negative token",
    "ids that fall",
    "unequal lengths",
    "no number",
    "probability above 1",
    "root beyond the text",
    "negative position",
)
_FAR = 2**62


class Forger:
    """Makes messages in the name of the drafter of ``worker``, about requests that run there."""

    def __init__(self, rng: random.Random, worker: TargetWorker) -> None:
        self._rng, self._worker = rng, worker

    def forge(self, kind: str) -> DrafterMessage | None:
        """Return a message of this kind; None if no request runs that it could be about."""
        generations = [g for g in running(self._worker) if g.request.uses_drafter]
        if not generations:
            return None
        generation = self._rng.choice(generations)
        text_len, vocab_size = len(generation.token_ids), self._worker.model.vocab_size
        tree = self._tree(vocab_size)
        believable = Layer(
            request_id=generation.request.request_id,
            **expected_of_drafter(generation.replica),
            is_reset=True,
            root_id=0,
            root_position=text_len - 1,
            known_len=text_len,
            num_passes=3,
            busy_s=0.001,
            num_reused=0,
            num_dropped=0,
            num_rolled_back=0,
            nodes=NewNodes(**tree),
        )
        return self._spoil(believable, kind, vocab_size)

    def _spoil(self, layer: Layer, kind: str, vocab_size: int) -> DrafterMessage:
        match kind:
            case "false resync":
                return Resync(layer.request_id, self._rng.choice([None, -_FAR, -1, 0, 1, layer.known_len, _FAR]))
            case "unasked ready":
                return Ready(vocab_size, 1, 1)
            case "declined":
                return Declined(layer.request_id, self._rng.choice(["", "no time\nfor this"]))
            case "pong":
                return Pong(_FAR)
        changes = self._changes(layer, vocab_size)[kind]
        nodes = {name: changes.pop(name) for name in NewNodes.__struct_fields__ if name in changes}
        return msgspec.structs.replace(layer, nodes=msgspec.structs.replace(layer.nodes, **nodes), **changes)

    def _changes(self, layer: Layer, vocab_size: int) -> dict[str, dict[str, Any]]:
        """Return what turns a believable layer into one of each kind."""
        pick, one_less = self._rng.choice, layer.nodes.tokens[:-1]
        is_reset = pick([True, False])
        return {
            "wrong tokens": {},
            "stale epoch": {"is_reset": False, "epoch": pick([-1, 0, _FAR])},
            "unknown parents": {"ids": tuple(i + _FAR for i in layer.nodes.ids), "is_reset": is_reset},
            "foreign request": {"request_id": pick([-1, _FAR, 2**64 - 1])},
            "repeated": {"seq": layer.seq - 1},
            "huge seq": {"seq": _FAR, "is_reset": is_reset},
            "absurd counters": {
                "busy_s": pick([math.nan, math.inf, -1e300]),
                "num_passes": pick([-_FAR, _FAR]),
                "num_reused": -_FAR,
                "num_dropped": pick([-_FAR, _FAR]),
                "num_rolled_back": pick([-_FAR, _FAR]),
                "pass_span_s": (0.0, pick([math.nan, math.inf, -1.0])),
            },
            "token outside the vocabulary": {"tokens": (*one_less, pick([vocab_size, _FAR]))},
            "negative token": {"tokens": (*one_less, -1)},
            "ids that fall": {"ids": layer.nodes.ids[::-1]},
            "unequal lengths": {"parents": layer.nodes.parents[1:]},
            "no number": {"logprobs": (*layer.nodes.logprobs[:-1], pick([math.nan, -math.inf]))},
            "probability above 1": {"logprobs": (*layer.nodes.logprobs[:-1], 5.0)},
            "root beyond the text": {"root_position": layer.known_len + 7, "known_len": layer.known_len + 8},
            "negative position": {"root_position": -1},
        }

    def _tree(self, vocab_size: int) -> dict[str, tuple[Any, ...]]:
        """Return nodes that a drafter can have made, with tokens out of the blue that it calls almost certain."""
        size = self._rng.randint(2, 8)
        return {
            "ids": tuple(range(1, size + 1)),
            "parents": tuple(self._rng.randint(max(0, i - 2), i) for i in range(size)),
            "tokens": tuple(self._rng.randrange(vocab_size) for _ in range(size)),
            "logprobs": tuple(-self._rng.random() / 10 for _ in range(size)),
        }


def noise(rng: random.Random, incarnation: int) -> bytes:
    """Return a frame that is no message."""
    whole = encode(Pong(5), incarnation)
    _, number, body = msgspec.msgpack.decode(whole)
    return rng.choice(
        [
            b"",
            b"\xc1",
            whole[:-1],
            b"\x91" * 5000,  # nested deeper than anything can be read
            bytes(MAX_FRAME_BYTES + 1),
            msgspec.msgpack.encode([PROTOCOL_VERSION + 1, number, body]),
            msgspec.msgpack.encode([PROTOCOL_VERSION, number, {"type": "Layer", "seq": "one"}]),
            rng.randbytes(rng.randint(2, 200)),
        ]
    )


def forged_order(rng: random.Random) -> TargetMessage:
    """Return a message that no target sends."""
    correction = Correction(1, 0, 0, (0, 1), wants_snapshot=False)
    return rng.choice(
        [
            Open(_FAR, (0, 1), draft_spec(top_p=0.0)),
            Open(_FAR, (0, 1), draft_spec(beam_width=10**6)),
            msgspec.structs.replace(correction, start=-1),
            msgspec.structs.replace(correction, beam_width=_FAR),
            msgspec.structs.replace(correction, branch_below=math.nan),
        ]
    )


class TappedSocket:
    """A link's socket into which frames are slipped as if they had come from the drafter."""

    def __init__(self, socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
        self._socket, self._frames = socket, deque(frames)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv(self, flags: int = 0) -> bytes:
        """Return the next slipped frame, else what has really come."""
        return self._frames.popleft() if self._frames else self._socket.recv(flags)

    def poll(self, timeout_ms: int | None = None) -> int:
        """Say whether there is a frame, slipped or real."""
        return zmq.POLLIN if self._frames else self._socket.poll(timeout_ms)
