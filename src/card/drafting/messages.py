"""Messages between the workers, and their bytes.

The target owns the text, the drafter owns the tree. Every message can be lost, late, repeated or out of order without
harm: corrections carry absolute positions, layers are numbered, and each side can ask the other to send more.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from card.config import SamplingParams, SamplingRule, ShapingRule, TreeShape
from card.config.fields import Bounds, check, declared, require
from card.errors import ProtocolError, SettingsError, plain_words
from card.tree.nodes import NewNodes

PROTOCOL_VERSION = 7
MAX_FRAME_BYTES = 16 * 1024 * 1024
MAX_REQUEST_BYTES = 4 * 1024 * 1024  # of one frame of a target: a text of half a million tokens and more
# What a drafter grants one request at most: far above any use, and too little to exhaust it.
MAX_LEN = 1 << 20
MAX_COUNT = 1 << 40  # of passes, nodes or tokens; more is a forgery
# Bounds on the facts of a `Ready`: far above any model, and small enough to compute with.
MAX_VOCAB_SIZE = 1 << 24
_MAX_PARAMETERS = 1 << 50
_MAX_POINTS = 256
_MAX_PASS_S = 3600.0
_MAX_FINGERPRINT = 256
_BEAM_WIDTHS = declared(TreeShape)["beam_width"].rule.bounds
_OF_RULES = tuple(  # parts of a rule that are settings of a request with bounds of their own
    name
    for name, one in declared(ShapingRule).items()
    if one.kind in (int, float) and not one.is_list and name in declared(SamplingParams)
)


class DraftSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Drafting rules of one request."""

    sampling: SamplingRule
    shape: TreeShape
    max_len: int  # most tokens that the text can get, prompt included
    shaping: ShapingRule | None = None  # what else changes the logits; None: nothing
    vocab_size: int | None = None  # tokens that the target has: no others are drafted; None: as many as the draft model
    num_hidden: int = 0  # tokens of the prompt that the drafter is not sent: the target's positions are so much higher


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Target -> drafter across a network: begin a session, in which no request is known yet."""


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
    beam_width: int | None = None  # from now on; None: as before
    branch_below: float | None = None  # from now on; None: as before


@dataclass(frozen=True, slots=True)
class TargetStates:
    """Target -> drafter of the same process: hidden states of rows that became text. It has no bytes."""

    request_id: int
    first: int  # place of the first row in the text
    states: npt.NDArray[np.float32]  # [rows, layers * D]


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


class PassSeconds(msgspec.Struct, frozen=True):
    """Measured seconds of a draft model's passes."""

    points: tuple[tuple[int, float], ...]  # (tokens, seconds) of passes of one sequence
    per_sequence_s: float  # seconds that each further sequence adds to a pass of as many tokens
    per_context_row_s: float  # and each row of its text


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Drafter -> target: loaded and listening."""

    vocab_size: int
    max_model_len: int
    num_parameters: int
    passes: PassSeconds | None = None  # None: not measured
    tokenizer: str | None = None  # fingerprint of the draft model's tokenizer; None: the target chose the model
    layers_per_pass: int = 1  # most layers that one pass of the draft model makes


class Layer(msgspec.Struct, frozen=True, tag=True):
    """Drafter -> target: nodes made in one drafter pass, all layers of it, or with ``is_reset`` the whole tree."""

    request_id: int
    seq: int  # 0, 1, 2, ... per request and incarnation
    epoch: int
    is_reset: bool  # first layer of an epoch, or a snapshot: forget all other nodes first
    root_id: int
    root_position: int  # absolute position of the root's token
    known_len: int  # length of the committed text that the drafter holds
    nodes: NewNodes
    num_passes: int  # drafter passes for this request so far
    busy_s: float  # time spent in them, seconds
    num_reused: int  # tokens of the text whose KV rows were there already when this request was opened
    num_dropped: int  # nodes that corrections have ruled out so far
    num_rolled_back: int  # of these, those that were drafted on the path thought likeliest
    pass_span_s: tuple[float, float] | None = None  # when that pass began and ended, by its clock; None: no pass


class Resync(msgspec.Struct, frozen=True, tag=True):
    """Drafter -> target: a correction did not connect; send the text from ``known_len`` on."""

    request_id: int
    known_len: int | None  # committed tokens that the drafter holds; None: open the request again


class Declined(msgspec.Struct, frozen=True, tag=True):
    """Drafter -> target: it does not draft for this text, now or later, and why; other requests go on."""

    request_id: int
    reason: str


class Fault(msgspec.Struct, frozen=True, tag=True):
    """Drafter -> target: the worker cannot go on, and why."""

    reason: str


TargetMessage = Hello | Open | Correction | Close | Shutdown | Ping
DrafterMessage = Ready | Layer | Resync | Declined | Fault | Pong


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    version: int
    incarnation: int  # which start of the drafter this belongs to
    body: Hello | Open | Correction | Close | Shutdown | Ping | Ready | Layer | Resync | Declined | Fault | Pong


class _Head(msgspec.Struct, frozen=True, array_like=True):
    version: int
    incarnation: int
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Frame)
_head_decoder = msgspec.msgpack.Decoder(_Head)


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
    except (msgspec.DecodeError, SettingsError, UnicodeDecodeError, RecursionError) as error:
        _check_version(_version_of(frame))  # another version may have other messages
        raise ProtocolError(f"frame of {len(frame)} bytes is not a message: {error}") from error
    _check_version(decoded.version)
    body = decoded.body
    if isinstance(body, Declined | Fault):
        body = msgspec.structs.replace(body, reason=plain_words(body.reason))
    return decoded.incarnation, body


def check_ready(message: Ready) -> None:
    """Refuse a `Ready` that no drafter sends. Raises: ProtocolError."""
    end = " of a drafter"
    for name, most in (
        ("vocab_size", MAX_VOCAB_SIZE),
        ("max_model_len", MAX_VOCAB_SIZE),
        ("num_parameters", _MAX_PARAMETERS),
        ("layers_per_pass", MAX_LEN),
    ):
        value = getattr(message, name)
        require(0 <= value <= most, name + end, f"from 0 to {most}", value, ProtocolError)
    fingerprint = message.tokenizer or ""
    is_one = len(fingerprint) <= _MAX_FINGERPRINT and fingerprint.isprintable()
    require(
        is_one, f"tokenizer{end}", f"a fingerprint of {_MAX_FINGERPRINT} characters at most", fingerprint, ProtocolError
    )
    if message.passes is None:
        return
    points = message.passes.points
    name = f"the times of passes{end}"
    require(len(points) <= _MAX_POINTS, name, f"{_MAX_POINTS} at most", f"{len(points)} of them", ProtocolError)
    sizes = [0, *(num_tokens for num_tokens, _ in points)]
    is_rising = all(least < more <= MAX_LEN for least, more in pairwise(sizes))
    require(is_rising, name, f"those of rising numbers of tokens from 1 to {MAX_LEN}", sizes[1:], ProtocolError)
    seconds = [*(one for _, one in points), message.passes.per_sequence_s, message.passes.per_context_row_s]
    is_time = all(0.0 <= one <= _MAX_PASS_S for one in seconds)  # which no NaN is
    require(is_time, name, f"seconds from 0 to {_MAX_PASS_S:g}", seconds, ProtocolError)


def check_spec(spec: DraftSpec) -> None:
    """Refuse a spec that no drafter can follow, or that would cost it too much.

    Raises: ProtocolError that names the field.
    """
    end = " of a draft spec"
    check(spec.sampling, owner=end, by=SamplingParams, error=ProtocolError)
    check(spec.shape, owner=end, error=ProtocolError)
    require(1 <= spec.max_len <= MAX_LEN, f"max_len{end}", f"from 1 to {MAX_LEN}", spec.max_len, ProtocolError)
    require(0 <= spec.num_hidden <= MAX_LEN, f"num_hidden{end}", f"from 0 to {MAX_LEN}", spec.num_hidden, ProtocolError)
    has_tokens = spec.vocab_size is None or 1 <= spec.vocab_size <= MAX_VOCAB_SIZE
    require(has_tokens, f"vocab_size{end}", f"from 1 to {MAX_VOCAB_SIZE}", spec.vocab_size, ProtocolError)
    is_sound = spec.shaping is None or _is_sound(spec.shaping)
    require(is_sound, f"shaping{end}", "one that sampling parameters stand for", spec.shaping, ProtocolError)


def check_correction(message: Correction) -> None:
    """Refuse a correction that no target sends, or that would cost a drafter too much. Raises: ProtocolError."""
    for name, bounds in (
        ("start", Bounds(least=0)),
        ("beam_width", _BEAM_WIDTHS),
        ("branch_below", Bounds(least=0, most=1)),
    ):
        value = getattr(message, name)
        is_allowed = value is None or bounds.hold(value)
        require(is_allowed, f"{name} of a correction", str(bounds), value, ProtocolError)


def _is_sound(rule: ShapingRule) -> bool:
    ids = (*rule.end_ids, *(token_id for token_id, _ in rule.logit_bias))
    params = declared(SamplingParams)
    return (
        0 <= rule.num_prompt_tokens <= MAX_LEN
        and 0 <= rule.min_tokens <= MAX_COUNT
        and min(ids, default=0) >= 0
        and max(ids, default=0) < MAX_COUNT
        and not any(params[name].fault(getattr(rule, name)) for name in _OF_RULES)
        and all(abs(value) <= 100.0 for _, value in rule.logit_bias)
    )


def _version_of(frame: bytes) -> int:
    """Return the version that a frame claims; our own if it claims none."""
    try:
        return _head_decoder.decode(frame).version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return PROTOCOL_VERSION


def _check_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"frame has protocol version {version}, this side speaks {PROTOCOL_VERSION}; update both")
