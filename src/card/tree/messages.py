"""What the workers say to each other, and how it is put into bytes.

The target owns the text, the drafter owns the tree. Every message can be lost, late, repeated or out of order without
harm: corrections carry absolute positions, layers are numbered, and each side can ask the other to send more.
"""

from __future__ import annotations

import math
from typing import get_args

import msgspec

from card.config import Growth, ShapingRule
from card.errors import ProtocolError, SettingsError

PROTOCOL_VERSION = 5
MAX_FRAME_BYTES = 16 * 1024 * 1024
# What a drafter grants one request at most: far above any use, and too little to exhaust it.
MAX_BEAM_WIDTH = 256
MAX_BRANCH = 256
MAX_LEAD = 4096
MAX_NODES = 1 << 16
MAX_LEN = 1 << 20
MAX_FAN_OUTS = 64


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
    max_len: int  # most tokens that the text can get, prompt included
    growth: str  # which rule the tree grows by: one of `card.config.Growth`
    branch_below: float  # branch: a token less likely than this ends the trunk
    fan_out: tuple[int, ...]  # fan-out: branches at each position of the chain; the last number goes on
    num_speculative_tokens: int  # branch, fan-out: tokens of each branch beyond its first
    shaping: ShapingRule | None = None  # what else changes the logits; None: nothing


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
    beam_width: int  # from now on; 0: as before
    lead: int  # from now on; 0: as before
    branch_below: float  # from now on; -1: as before


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
    pass_s: tuple[tuple[int, float], ...] = ()  # (tokens, seconds) of drafter passes; () if not measured
    tokenizer: str = ""  # fingerprint of the draft model's tokenizer; empty if unknown
    per_sequence_s: float = 0.0  # seconds that each further sequence adds to a pass of as many tokens
    per_context_row_s: float = 0.0  # and each row of its text


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
    num_reused: int  # tokens of the text whose KV rows were there already when this request was opened
    num_dropped: int  # nodes that corrections have ruled out so far
    num_rolled_back: int  # of these, those that were drafted on the path thought likeliest
    pass_began_at: float = 0.0  # the pass that made these nodes, on the drafter's clock, seconds
    pass_ended_at: float = 0.0  # the same as pass_began_at if no pass made them


class Resync(msgspec.Struct, frozen=True, tag=True):
    """Drafter -> target: a correction did not connect; send the text from ``known_len`` on (0: open again)."""

    request_id: int
    known_len: int


class Fault(msgspec.Struct, frozen=True, tag=True):
    """Drafter -> target: the worker cannot go on, and why."""

    reason: str


TargetMessage = Hello | Open | Correction | Close | Shutdown | Ping
DrafterMessage = Ready | Layer | Resync | Fault | Pong


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    version: int
    incarnation: int  # which start of the drafter this belongs to
    body: Hello | Open | Correction | Close | Shutdown | Ping | Ready | Layer | Resync | Fault | Pong


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
    return decoded.incarnation, decoded.body


def check_spec(spec: DraftSpec) -> None:
    """Refuse a spec that no drafter can follow, or that would cost it too much.

    Raises: ProtocolError that names the field.
    """
    rules = (
        ("temperature", 0.0 <= spec.temperature < math.inf, "0 or more"),
        ("top_k", spec.top_k >= 0, "0 (keep all) or more"),
        ("top_p", 0.0 < spec.top_p <= 1.0, "above 0 and at most 1"),
        ("min_p", 0.0 <= spec.min_p < 1.0, "at least 0 and below 1"),
        ("seed", 0 <= spec.seed < 2**63, "an integer from 0 to 2**63 - 1"),
        ("beam_width", 1 <= spec.beam_width <= MAX_BEAM_WIDTH, f"from 1 to {MAX_BEAM_WIDTH}"),
        ("branch", 1 <= spec.branch <= MAX_BRANCH, f"from 1 to {MAX_BRANCH}"),
        ("lead", 1 <= spec.lead <= MAX_LEAD, f"from 1 to {MAX_LEAD}"),
        ("max_nodes", 1 <= spec.max_nodes <= MAX_NODES, f"from 1 to {MAX_NODES}"),
        ("min_path_logprob", spec.min_path_logprob <= 0.0, "0 or less"),
        ("max_len", 1 <= spec.max_len <= MAX_LEN, f"from 1 to {MAX_LEN}"),
        ("growth", spec.growth in get_args(Growth), "one of " + ", ".join(get_args(Growth))),
        ("branch_below", 0.0 <= spec.branch_below <= 1.0, "from 0 to 1"),
        ("fan_out", _are_fan_outs(spec.fan_out), f"1 to {MAX_FAN_OUTS} numbers from 0 to {MAX_BRANCH}"),
        ("num_speculative_tokens", 1 <= spec.num_speculative_tokens <= MAX_LEAD, f"from 1 to {MAX_LEAD}"),
        ("shaping", spec.shaping is None or _is_sound(spec.shaping), "one that sampling parameters stand for"),
    )
    for name, holds, allowed in rules:
        if not holds:
            raise ProtocolError(f"{name} of a draft spec must be {allowed}, got {getattr(spec, name)}")


def _are_fan_outs(counts: tuple[int, ...]) -> bool:
    return 1 <= len(counts) <= MAX_FAN_OUTS and 0 <= min(counts) <= max(counts) <= MAX_BRANCH


def _is_sound(rule: ShapingRule) -> bool:
    ids = (*rule.end_ids, *(token_id for token_id, _ in rule.logit_bias))
    penalties = (rule.presence_penalty, rule.frequency_penalty)
    return (
        rule.num_prompt_tokens >= 0
        and min(ids, default=0) >= 0
        and all(abs(value) <= 2.0 for value in penalties)
        and 0.0 < rule.repetition_penalty < math.inf
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
