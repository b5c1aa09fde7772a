"""What the workers say to each other, and how it is put into bytes.

The target owns the text, the drafter owns the tree. Every message can be lost, late, repeated or out of order without
harm: corrections carry absolute positions, layers are numbered, and each side can ask the other to send more.
"""

from __future__ import annotations

import msgspec

from card.errors import ProtocolError

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 16 * 1024 * 1024


class DraftSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How one request is to be drafted: the sampling rule and the shape of the tree."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    coupled_noise: bool
    beam_width: int
    branch: int
    lead: int
    max_nodes: int
    min_path_logprob: float


class Open(msgspec.Struct, frozen=True, tag=True):
    """Target -> drafter: start (or start anew) drafting for a request from this text."""

    request_id: int
    token_ids: tuple[int, ...]  # the whole committed text
    spec: DraftSpec


class Correction(msgspec.Struct, frozen=True, tag=True):
    """Target -> drafter, after each verification: the committed text from position ``start`` on."""

    request_id: int
    round_idx: int
    start: int  # at most the length that the drafter is known to hold
    token_ids: tuple[int, ...]
    wants_snapshot: bool  # a layer was lost: send the whole tree once


class Close(msgspec.Struct, frozen=True, tag=True):
    """Target -> drafter: forget this request."""

    request_id: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Target -> drafter: end the worker."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Target -> drafter: answer with a Pong, whatever else there is to do."""

    nonce: int


class Pong(msgspec.Struct, frozen=True, tag=True):
    """Drafter -> target: alive."""

    nonce: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Drafter -> target: loaded and listening."""

    vocab_size: int
    max_model_len: int
    num_parameters: int


class Layer(msgspec.Struct, frozen=True, tag=True):
    """Drafter -> target: nodes made in one drafter pass, or with ``is_reset`` the whole tree."""

    request_id: int
    seq: int  # 0, 1, 2, ... per request and incarnation
    epoch: int
    is_reset: bool  # first layer of an epoch, or a snapshot: forget all other nodes first
    root_id: int
    root_position: int  # absolute position of the root's token
    known_len: int  # length of the committed text that the drafter holds
    ids: tuple[int, ...]
    parents: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_passes: int  # drafter passes for this request so far
    busy_s: float  # time spent in them, seconds


class Resync(msgspec.Struct, frozen=True, tag=True):
    """Drafter -> target: a correction did not connect; send the text from ``known_len`` on (0: open again)."""

    request_id: int
    known_len: int


class Fault(msgspec.Struct, frozen=True, tag=True):
    """Drafter -> target: the worker cannot go on, and why."""

    reason: str


TargetMessage = Open | Correction | Close | Shutdown | Ping
DrafterMessage = Ready | Layer | Resync | Fault | Pong


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    version: int
    incarnation: int  # which start of the drafter this belongs to
    body: Open | Correction | Close | Shutdown | Ping | Ready | Layer | Resync | Fault | Pong


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Frame)


def encode(message: TargetMessage | DrafterMessage, incarnation: int) -> bytes:
    """Return the message as one frame of msgpack."""
    return _encoder.encode(_Frame(PROTOCOL_VERSION, incarnation, message))


def decode(frame: bytes) -> tuple[int, TargetMessage | DrafterMessage]:
    """Return (incarnation, message).

    Raises: ProtocolError if the frame is oversized, malformed or of another protocol version.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame has {len(frame)} bytes; at most {MAX_FRAME_BYTES} are allowed")
    try:
        decoded = _decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"frame of {len(frame)} bytes is not a message: {error}") from error
    if decoded.version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"frame has protocol version {decoded.version}, this side speaks {PROTOCOL_VERSION}; update both"
        )
    return decoded.incarnation, decoded.body
