"""The unreliable link: its faults happen as asked and the same each time, and valid nonsense changes no text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import DraftSettings, SamplingParams
from card.drafting.drafter_pass import NO_END, TurnEnd
from card.drafting.messages import (
    Declined,
    DrafterMessage,
    Fault,
    Layer,
    Pong,
    Ready,
    Resync,
    TargetMessage,
    decode,
    encode,
)
from card.engine.metrics import RequestStats
from card.errors import ProtocolError
from card.links.link import DrafterLink, LinkStatus
from card.tree.nodes import NewNodes
from tests.decoding import decode as run
from tests.decoding import fake, plain, toy_draft, toy_target
from tests.examples import settings
from tests.unreliable_link import Faults

TARGET = toy_target()
DRAFT = toy_draft(TARGET, 0.9)


def counters(faults: Faults) -> tuple[list[int], RequestStats, LinkStatus]:
    """Return text, counters without times, and status of one run."""
    link = fake(DRAFT, faults)
    token_ids, _, stats = run(TARGET, link)
    for name in ("queued_s", "prefill_s", "wall_s", "target_busy_s", "waited_s", "drafter_busy_s"):
        setattr(stats, name, 0.0)
    return token_ids, stats, link.status


def test_the_same_seed_gives_the_same_run_and_another_one_another():
    faults = Faults(seed=1, drop=0.3, duplicate=0.3, max_delay=3, kill=0.05)
    assert counters(faults) == counters(faults)
    assert counters(faults)[1] != counters(Faults(seed=2, drop=0.3, duplicate=0.3, max_delay=3, kill=0.05))[1]


def test_a_link_that_loses_everything_leaves_plain_decoding():
    token_ids, stats, _ = counters(Faults(drop=1.0))
    assert token_ids == plain(TARGET)[0]
    assert (stats.verified_tokens, stats.drafter_passes, stats.mean_acceptance_length) == (0, 0, 1.0)


def test_a_drafter_that_never_gets_to_draft_leaves_plain_decoding():
    token_ids, stats, _ = counters(Faults(max_passes=0))
    assert token_ids == plain(TARGET)[0]
    assert stats.verified_tokens == 0


@pytest.mark.parametrize(
    "faults", [Faults(), Faults(duplicate=1.0), Faults(max_delay=1, max_passes=8), Faults(drop=0.2)]
)
def test_speculation_survives_mild_faults(faults):
    token_ids, stats, status = counters(faults)
    assert token_ids == plain(TARGET)[0]
    assert stats.accepted_tokens > 0
    assert status.state == "up"


def test_killed_drafters_are_counted_and_their_passes_add_up():
    link = fake(DRAFT, Faults(seed=3, kill=0.2, max_passes=8))
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=100)
    token_ids, _, stats = run(TARGET, link, params=params)
    assert token_ids == plain(TARGET, params=params)[0]
    assert stats.drafter_restarts == link.status.num_restarts > 1
    assert stats.drafter_passes > 0


class BabblingLink(DrafterLink):
    """Says whatever a test wants, well-formed but senseless."""

    runs_by_itself = True
    layers_per_pass = 1

    def __init__(self, messages: Iterator[list[DrafterMessage]]) -> None:
        self._messages = messages
        self.sent: list[TargetMessage] = []
        self.rejections: list[str] = []

    def start(self) -> None: ...

    def send(self, message: TargetMessage) -> None:
        self.sent.append(message)

    def receive(self) -> list[DrafterMessage]:
        return [message for sent in next(self._messages, []) for message in [decode(encode(sent, 0))[1]]]  # type: ignore[misc]

    def wait(self, timeout_s: float) -> None: ...

    def draft(self, num_passes: int, end: TurnEnd = NO_END) -> list[tuple[int, float]]:
        return []

    def reject(self, reason: str) -> None:
        self.rejections.append(reason)

    @property
    def status(self) -> LinkStatus:
        return LinkStatus("up")

    def close(self) -> None: ...


numbers = st.one_of(st.integers(0, 8), st.integers(-2, 60), st.sampled_from([-(2**63), 2**31, 2**63 - 1]))
floats = st.one_of(st.floats(-5, 0), st.floats())
request_ids = st.sampled_from([7, 7, 7, 7, 0])  # 7 is the one that runs


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    """Draw a layer that may be right by chance: increasing ids under a root that may exist."""
    size = draw(st.integers(0, 5))
    first = draw(st.integers(1, 12))
    root_position = draw(st.one_of(st.integers(3, 12), numbers))
    ids = draw(st.one_of(st.just(tuple(range(first, first + size))), st.lists(numbers, max_size=5).map(tuple)))
    return Layer(
        request_id=draw(request_ids),
        seq=draw(st.one_of(st.integers(0, 3), numbers)),
        epoch=draw(st.one_of(st.integers(0, 2), numbers)),
        is_reset=draw(st.booleans()),
        root_id=draw(st.one_of(st.just(0), numbers)),
        root_position=root_position,
        known_len=draw(st.one_of(st.just(min(root_position + 1, 2**63 - 1)), numbers)),
        nodes=NewNodes(
            ids=ids,
            parents=tuple(draw(st.lists(st.one_of(st.integers(0, first), numbers), min_size=size, max_size=size))),
            tokens=tuple(draw(st.lists(st.one_of(st.integers(0, 11), numbers), min_size=size, max_size=size))),
            logprobs=tuple(draw(st.lists(floats, min_size=size, max_size=size))),
        ),
        num_passes=draw(numbers),
        busy_s=draw(floats),
        num_reused=draw(numbers),
        num_dropped=draw(numbers),
        num_rolled_back=draw(numbers),
        pass_span_s=draw(st.none() | st.tuples(floats, floats)),
    )


nonsense = st.one_of(
    layers(),
    layers(),
    st.builds(Resync, request_id=request_ids, known_len=st.none() | numbers),
    st.builds(Ready, numbers, numbers, numbers),
    st.builds(Declined, request_id=request_ids, reason=st.text(max_size=8)),
    st.builds(Pong, numbers),
    st.builds(Fault, st.text(max_size=8)),
)


@settings(max_examples=50)
@given(
    said=st.lists(st.lists(nonsense, max_size=4), max_size=30),
    verify=st.sampled_from(["chain", "tree"]),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_valid_frames_of_nonsense_change_no_text_and_raise_nothing(said, verify, temperature):
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=20)
    link = BabblingLink(iter(said))
    token_ids, reason, _ = run(TARGET, link, request_id=7, params=params, draft=DraftSettings(verify=verify, budget=4))
    assert (token_ids, reason) == plain(TARGET, params=params)


@settings(max_examples=100)
@given(frame=st.binary(max_size=64))
def test_bytes_that_are_no_message_raise_a_protocol_error(frame):
    with pytest.raises(ProtocolError):
        decode(frame)
