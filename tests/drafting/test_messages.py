"""Frames: what goes in comes out, and nothing but a whole message of this version is let in."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import re
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import Grammar, Growth, SamplingRule, ShapingRule, TreeShape
from card.drafting.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Close,
    Correction,
    Declined,
    DrafterMessage,
    DraftSpec,
    Fault,
    Hello,
    Layer,
    Open,
    PassSeconds,
    Ping,
    Pong,
    Ready,
    Resync,
    Shutdown,
    TargetMessage,
    check_correction,
    check_ready,
    check_spec,
    decode,
    encode,
)
from card.errors import ProtocolError, plain_words
from card.tree.nodes import NewNodes
from tests.drafts import draft_spec
from tests.examples import settings

Message = TargetMessage | DrafterMessage
integers = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False)
id_lists = st.lists(integers, max_size=6).map(tuple)
points = st.lists(st.tuples(integers, floats), max_size=3).map(tuple)
shapes = st.builds(
    TreeShape,
    **dict.fromkeys(("min_path_logprob", "branch_below"), floats),
    **dict.fromkeys(("beam_width", "branch", "lead", "max_nodes", "num_speculative_tokens"), integers),
    growth=st.sampled_from(typing.get_args(Growth)),
    fan_out=id_lists,
    coupled_noise=st.booleans(),
)
shapings = st.builds(
    ShapingRule,
    num_prompt_tokens=integers,
    min_tokens=integers,
    end_ids=id_lists,
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), floats),
    logit_bias=st.lists(st.tuples(integers, floats), max_size=3).map(tuple),
    grammar=st.sampled_from([None, Grammar("json_object"), Grammar("regex", "a*")]),
)
specs = st.builds(
    DraftSpec,
    sampling=st.builds(SamplingRule, floats, integers, floats, floats, integers),
    shape=shapes,
    max_len=integers,
    shaping=st.none() | shapings,
)
MESSAGES: dict[type, st.SearchStrategy[Message]] = {
    Hello: st.builds(Hello),
    Open: st.builds(Open, integers, id_lists, specs),
    Correction: st.builds(
        Correction, integers, integers, integers, id_lists, st.booleans(), st.none() | integers, st.none() | floats
    ),
    Close: st.builds(Close, integers),
    Shutdown: st.builds(Shutdown),
    Ping: st.builds(Ping, integers),
    Pong: st.builds(Pong, integers),
    Ready: st.builds(
        Ready,
        integers,
        integers,
        integers,
        st.none()
        | st.builds(PassSeconds, st.lists(st.tuples(integers, floats), max_size=3).map(tuple), floats, floats),
        st.none() | st.text(max_size=8),
        integers,
    ),
    Layer: st.builds(
        Layer,
        **dict.fromkeys(
            ("request_id", "seq", "epoch", "root_id", "root_position", "known_len", "num_passes", "num_reused"),
            integers,
        ),
        num_dropped=integers,
        num_rolled_back=integers,
        pass_span_s=st.none() | st.tuples(floats, floats),
        nodes=st.builds(NewNodes, id_lists, id_lists, id_lists, st.lists(floats, max_size=6).map(tuple)),
        is_reset=st.booleans(),
        busy_s=floats,
    ),
    Resync: st.builds(Resync, integers, st.none() | integers),
    Declined: st.builds(Declined, integers, st.text(max_size=30).map(plain_words)),
    Fault: st.builds(Fault, st.text(max_size=30).map(plain_words)),
}
messages = st.one_of(*MESSAGES.values())
CORRECTION = {
    "type": "Correction",
    "request_id": 1,
    "round_idx": 2,
    "start": 3,
    "token_ids": [4],
    "wants_snapshot": False,
    "beam_width": None,
    "branch_below": 0.5,
}


def frame(body: object, version: object = PROTOCOL_VERSION, incarnation: object = 0) -> bytes:
    return msgspec.msgpack.encode([version, incarnation, body])


def test_the_round_trip_covers_every_message_type() -> None:
    assert set(MESSAGES) == {*typing.get_args(TargetMessage), *typing.get_args(DrafterMessage)}


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_comes_out_as_it_went_in(kind: type) -> None:
    @settings(max_examples=30)
    @given(message=MESSAGES[kind], incarnation=st.integers(0, 2**62))
    def check(message: Message, incarnation: int) -> None:
        assert decode(encode(message, incarnation)) == (incarnation, message)
        assert type(decode(encode(message, incarnation))[1]) is kind

    check()


@pytest.mark.parametrize("said", [Fault, lambda reason: Declined(1, reason)], ids=["fault", "declined"])
def test_what_the_other_side_says_is_one_short_line_that_is_safe_to_print(said: Callable[[str], Any]) -> None:
    hostile = "full\x1b[2J\x07\r\nmind \u202e\x00\x9b31m" + "a" * 100_000
    _, message = decode(encode(said(hostile), 1))
    assert message.reason.startswith("full [2J mind 31m")
    assert message.reason.isprintable()
    assert len(message.reason) == 300 + len("...")


def test_an_error_that_quotes_a_message_is_one_short_line_too() -> None:
    biases = tuple((i, float("nan")) for i in range(10_000))
    with pytest.raises(ProtocolError, match="shaping of a draft spec must be") as refused:
        check_spec(draft_spec(shaping=ShapingRule(num_prompt_tokens=1, logit_bias=biases)))
    assert len(str(refused.value)) <= 303
    with pytest.raises(ProtocolError) as malformed:
        decode(frame({"type": "\x1b[2J\n" + "x" * 5000}))
    assert str(malformed.value).isprintable() and len(str(malformed.value)) <= 303


_GOOD_READY = Ready(12, 128, 7, PassSeconds(((1, 0.001), (8, 0.002)), 0.0, 0.0), "abc")


def test_what_drafters_say_of_themselves_is_believed() -> None:
    check_ready(_GOOD_READY)
    check_ready(Ready(0, 0, 0))
    check_ready(msgspec.structs.replace(_GOOD_READY, passes=PassSeconds((), 0.0, 0.0)))


@pytest.mark.parametrize(
    "passes",
    [
        PassSeconds(((1, math.nan),), 0.0, 0.0),
        PassSeconds(((1, math.inf),), 0.0, 0.0),
        PassSeconds(((1, -0.1),), 0.0, 0.0),
        PassSeconds(((2, 0.1), (2, 0.1)), 0.0, 0.0),
        PassSeconds(((0, 0.1),), 0.0, 0.0),
        PassSeconds(((2**63, 0.1),), 0.0, 0.0),
        PassSeconds(tuple((i, 0.1) for i in range(1, 3001)), 0.0, 0.0),
        PassSeconds((), math.nan, 0.0),
        PassSeconds((), 0.0, 1e300),
    ],
    ids=["nan", "inf", "negative", "equal", "zero", "huge", "many", "per sequence", "per row"],
)
def test_times_that_no_passes_take_are_refused_in_one_short_line(passes: PassSeconds) -> None:
    with pytest.raises(ProtocolError, match="the times of passes of a drafter must be") as refused:
        check_ready(msgspec.structs.replace(_GOOD_READY, passes=passes))
    assert len(str(refused.value)) <= 303


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", -1),
        ("vocab_size", 10**9),
        ("max_model_len", -5),
        ("num_parameters", 2**63),
        ("tokenizer", "x" * 300),
        ("tokenizer", "\x1b[2J"),
    ],
)
def test_other_nonsense_of_a_drafter_is_refused_by_the_name_of_the_field(name: str, value: object) -> None:
    with pytest.raises(ProtocolError, match=f"{name} of a drafter must be"):
        check_ready(msgspec.structs.replace(_GOOD_READY, **{name: value}))


@given(message=messages, data=st.data())
def test_a_truncated_or_prolonged_frame_is_refused(message: Message, data: st.DataObject) -> None:
    whole = encode(message, 1)
    length = data.draw(st.integers(0, len(whole) - 1))
    for broken in (whole[:length], whole + b"\0"):
        with pytest.raises(ProtocolError, match=f"frame of {len(broken)} bytes is not a message"):
            decode(broken)


def test_a_frame_is_refused_by_its_size_alone() -> None:
    with pytest.raises(ProtocolError, match=f"has {MAX_FRAME_BYTES + 1} bytes; at most {MAX_FRAME_BYTES} are allowed"):
        decode(bytes(MAX_FRAME_BYTES + 1))
    with pytest.raises(ProtocolError, match="is not a message"):
        decode(bytes(MAX_FRAME_BYTES))


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1, -1])
def test_a_frame_of_another_version_is_refused(version: int) -> None:
    assert decode(frame(CORRECTION)) == (0, Correction(1, 2, 3, (4,), False, None, 0.5))
    with pytest.raises(ProtocolError, match=f"protocol version {version}, this side speaks {PROTOCOL_VERSION}"):
        decode(frame(CORRECTION, version))


def test_a_message_that_only_another_version_has_is_refused_for_its_version() -> None:
    with pytest.raises(ProtocolError, match=f"protocol version 99, this side speaks {PROTOCOL_VERSION}"):
        decode(frame({"type": "Telepathy", "thought": 1}, version=99))


NAN, INFINITY = float("nan"), float("inf")


def shaping(**changes: typing.Any) -> ShapingRule:
    return ShapingRule(**{"num_prompt_tokens": 4} | changes)


BOUNDS: dict[str, tuple[list[typing.Any], list[typing.Any]]] = {  # allowed and refused values
    "temperature": ([0.0, 5.0], [-0.1, NAN, INFINITY]),
    "top_k": ([0, 10**9], [-1]),
    "top_p": ([1e-9, 1.0], [0.0, 1.1, NAN]),
    "min_p": ([0.0, 0.99], [-0.1, 1.0, NAN]),
    "seed": ([0, 2**63 - 1], [-1, 2**63]),
    "beam_width": ([1, 256], [0, 257]),
    "branch": ([1, 256], [0, 257]),
    "lead": ([1, 4096], [0, 4097]),
    "max_nodes": ([1, 1 << 16], [0, (1 << 16) + 1]),
    "min_path_logprob": ([-1e-9, -INFINITY], [0.0, 0.1, NAN]),
    "max_len": ([1, 1 << 20], [0, (1 << 20) + 1]),
    "growth": (["layer", "best-first", "branch", "fan-out", "phrases"], ["", "deep"]),
    "branch_below": ([0.0, 1.0], [-0.1, 1.1, NAN]),
    "fan_out": ([(0,), (256,) * 64], [(), (3,) * 65, (257,), (3, -1)]),
    "num_speculative_tokens": ([1, 4096], [0, 4097]),
    "shaping": (
        [
            None,
            shaping(),
            shaping(presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=9.0),
            shaping(logit_bias=((3, -100.0),), min_tokens=10**9, end_ids=(5, 10**9), grammar=Grammar("regex", "a*")),
        ],
        [
            shaping(num_prompt_tokens=-1),
            shaping(presence_penalty=NAN),
            shaping(frequency_penalty=2.1),
            shaping(repetition_penalty=0.0),
            shaping(repetition_penalty=INFINITY),
            shaping(logit_bias=((-1, 0.0),)),
            shaping(logit_bias=((3, NAN),)),
            shaping(end_ids=(-1,)),
        ],
    ),
}


def test_every_number_of_a_spec_has_bounds() -> None:
    parts = {field.name for kind in (SamplingRule, TreeShape) for field in dataclasses.fields(kind)}
    assert {*BOUNDS, "coupled_noise"} == parts | {"max_len", "shaping"}


def test_a_spec_with_a_grammar_that_cannot_be_meant_is_refused() -> None:
    spec = draft_spec(shaping=shaping(grammar=Grammar("regex", "abcabc")))
    whole = encode(Open(1, (5,), spec), 0)
    assert decode(whole) == (0, Open(1, (5,), spec))
    for broken in (whole.replace(b"abcabc", b" " * 6), whole.replace(b"regex", b"regop")):
        with pytest.raises(ProtocolError, match="is not a message"):
            decode(broken)


@pytest.mark.parametrize("name", BOUNDS)
def test_a_spec_out_of_bounds_is_refused_by_the_name_of_the_field(name: str) -> None:
    allowed, refused = BOUNDS[name]
    for value in allowed:
        check_spec(draft_spec(**{name: value}))
    for value in refused:
        with pytest.raises(ProtocolError, match=re.escape(f", got {value!r}")) as caught:
            check_spec(draft_spec(**{name: value}))
        assert str(caught.value).startswith(f"{name} of a draft spec must be ")


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("start", [0, 10**9], [-1]),
        ("beam_width", [None, 1, 256], [0, 257]),
        ("branch_below", [None, 0.0, 1.0], [-1.0, 1.1, NAN]),
    ],
)
def test_a_correction_out_of_bounds_is_refused(name: str, allowed: list[typing.Any], refused: list[typing.Any]) -> None:
    def changed(value: object) -> Correction:
        return msgspec.structs.replace(Correction(1, 2, 3, (4,), False), **{name: value})

    for value in allowed:
        check_correction(changed(value))
    for value in refused:
        with pytest.raises(ProtocolError, match=f"^{name} of a correction must be .*, got {value}"):
            check_correction(changed(value))


def test_what_is_not_said_is_not_there() -> None:
    _, correction = decode(encode(Correction(1, 2, 3, (4,), False), 0))
    assert (correction.beam_width, correction.branch_below) == (None, None), "as before"
    assert decode(frame({name: value for name, value in CORRECTION.items() if name != "beam_width"}))


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {},
        "Correction",
        {**CORRECTION, "type": "Rectification"},
        {**CORRECTION, "type": 7},
        {**CORRECTION, "token_ids": ["4"]},
        {**CORRECTION, "token_ids": [4.5]},
        {**CORRECTION, "token_ids": 4},
        {**CORRECTION, "start": None},
        {**CORRECTION, "wants_snapshot": 0},
        {name: value for name, value in CORRECTION.items() if name != "round_idx"},
        {"type": "Fault", "reason": b"bytes"},
    ],
)
def test_a_body_of_wrong_types_is_refused(body: object) -> None:
    with pytest.raises(ProtocolError, match="is not a message"):
        decode(frame(body))


@pytest.mark.parametrize(
    "broken",
    [
        frame(CORRECTION, version="1"),
        frame(CORRECTION, incarnation=None),
        msgspec.msgpack.encode([PROTOCOL_VERSION, 0]),
        msgspec.msgpack.encode(CORRECTION),
        encode(Fault("abc"), 0).replace(b"abc", b"\xff\xfe\xfd"),  # not UTF-8
        encode(Fault("abc"), 0).replace(b"Fault", b"F\xff\xff\xfft"),
        encode(Open(1, (5,), draft_spec()), 0).replace(
            b"token_ids\x91",
            b"token_ids\xdd\xff\xff\xff\xff",  # claims four billion tokens
        ),
        b"\x93\x01\x00\x83\xa4type\xa5Fault\xa1x" + b"\x91" * 100_000,  # nested too deep
    ],
)
def test_a_frame_that_lies_about_its_shape_is_refused(broken: bytes) -> None:
    with pytest.raises(ProtocolError, match="is not a message"):
        decode(broken)


@settings(max_examples=150)
@given(data=st.binary(max_size=80))
def test_random_bytes_raise_nothing_but_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@settings(max_examples=75)
@given(message=messages, seed=st.integers(0, 2**31))
def test_corrupted_frames_raise_nothing_but_a_protocol_error(message: Message, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        corrupt = bytearray(encode(message, 3))
        for _ in range(rng.randint(1, 4)):
            corrupt[rng.randrange(len(corrupt))] = rng.randrange(256)
        with contextlib.suppress(ProtocolError):
            decode(bytes(corrupt))
