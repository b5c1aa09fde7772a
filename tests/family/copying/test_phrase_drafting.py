"""A chain drafted by phrases: several tokens a pass, those of the draft model itself; kept phrases, plain texts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import DraftSettings, SamplingParams
from card.drafting.beam import BeamSequence, BeamWriter
from card.drafting.drafter import DrafterWorker
from card.family.copying.phrase_drafting import PhraseDraftSequence, PhraseDraftWriter
from card.links.in_process import InlineLink
from card.tree.nodes import NewNodes
from tests.decoding import assert_plain_in_turns, assert_plain_under_any_order, decode, plain, toy_draft, toy_target
from tests.drafting.test_drafter import Clock
from tests.drafts import assert_rows_fit_the_tree, draft_spec
from tests.engine.test_exactness import agreements, faults, sampling, shapes
from tests.examples import settings
from tests.toy import TableModel

TEXT = [3, 1, 4, 1, 5]


def toy(seed: int = 0, **changes: int) -> TableModel:
    return TableModel(seed, 12, 2, spread=1.5, **{"max_model_len": 128, "num_tree_rows": 256, **changes})


def opened(writer: BeamWriter, text: list[int] = TEXT, **changes: Any) -> BeamSequence:
    shape = {"beam_width": 1, "branch": 1, "lead": 24, "growth": "phrases"} | changes
    return writer.open(text, draft_spec(**shape), epoch=0)


def drafted(writer: BeamWriter, sequence: BeamSequence, num_passes: int = 100) -> list[NewNodes]:
    """Draft as deep as the sequence goes, or so many passes, and return what each of them made."""
    made: list[NewNodes] = []
    while len(made) < num_passes and (num_tokens := sequence.num_tokens_to_run()):
        (found,) = writer.step([(sequence, num_tokens)])
        assert isinstance(found, NewNodes)
        made.append(found)
    return made


def chain_of(sequence: BeamSequence) -> list[int]:
    cache = sequence.cache
    return [cache.token(node) for node in cache.best_path(cache.root_id, cache.depth)]


def worker_of(model: TableModel) -> DrafterWorker:
    return DrafterWorker(PhraseDraftWriter(model), clock=Clock())


@settings(max_examples=30)
@given(seed=st.integers(0, 99), temperature=st.sampled_from([0.0, 1.0]), room=st.integers(24, 80))
def test_the_chain_is_what_the_draft_model_writes_token_by_token(seed: int, temperature: float, room: int) -> None:
    chains = []
    for kind, growth in ((BeamWriter, "layer"), (PhraseDraftWriter, "phrases")):
        writer = kind(toy(seed, max_model_len=40, num_tree_rows=room))
        sequence = opened(writer, growth=growth, temperature=temperature, seed=seed, coupled_noise=True)
        assert isinstance(sequence, PhraseDraftSequence) == (growth == "phrases")
        drafted(writer, sequence)
        first = chain_of(sequence)
        sequence.commit([*first[:3], (first[3] + 1) % 12])  # and the next one is refused
        drafted(writer, sequence)
        chains.append((first, chain_of(sequence)))
    assert chains[0] == chains[1]


@settings(max_examples=30)
@given(seed=st.integers(0, 99), num_right=st.integers(0, 6), num_passes=st.integers(1, 5))
def test_rows_are_those_of_text_and_chain_after_every_pass_and_commit(
    seed: int, num_right: int, num_passes: int
) -> None:
    model = toy(seed)
    writer = PhraseDraftWriter(model)
    sequence = opened(writer)
    for _ in range(4):
        for _ in range(num_passes):
            drafted(writer, sequence, 1)
            assert_rows_fit_the_tree(model, sequence)
        chain = chain_of(sequence)[:num_right]
        sequence.commit([*chain, seed % 12])
        assert_rows_fit_the_tree(model, sequence)


def test_a_pass_of_the_draft_model_yields_several_tokens_once_phrases_are_known() -> None:
    writer = PhraseDraftWriter(toy())
    once = drafted(writer, opened(writer))
    again = drafted(writer, opened(writer))
    num_tokens = sum(len(made) for made in again)
    assert num_tokens == 24
    assert len(again) <= len(once) <= num_tokens
    assert num_tokens >= 3 * len(again), "the second request drafts with the phrases of the first"
    assert max(len(made) for made in once) > 1, "the first one learns phrases of its own passes"


def test_other_growths_are_drafted_as_ever_and_a_beam_of_several_paths_is() -> None:
    writer = PhraseDraftWriter(toy())
    assert type(opened(writer, growth="layer")) is BeamSequence
    wide = opened(writer, beam_width=3, branch=4)
    assert [len(made) for made in drafted(writer, wide, 3)] == [3, 3, 3]


@settings(max_examples=30)
@given(seed=st.integers(0, 99), agreement=agreements, params=sampling, shape=shapes)
def test_text_is_that_of_plain_decoding_when_taking_turns(**drawn: Any) -> None:
    assert_plain_in_turns(worker_of, method="ouroboros", **drawn)


@settings(max_examples=30)
@given(seed=st.integers(0, 99), agreement=agreements, params=sampling, shape=shapes, faults=faults)
def test_text_is_that_of_plain_decoding_under_any_message_order(shape: DraftSettings, **drawn: Any) -> None:
    assert_plain_under_any_order(worker_of, shape=shape.replace(growth="phrases", beam_width=1), **drawn)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_second_request_takes_fewer_draft_passes_and_both_texts_are_those_of_plain_decoding(
    temperature: float,
) -> None:
    target = toy_target()
    link = InlineLink(worker_of(toy_draft(target, 0.9)))
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=60)
    passes = []
    for _ in range(2):
        token_ids, _, stats = decode(target, link, method="ouroboros", params=params, writers=("phrases",))
        assert token_ids == plain(target, params=params)[0]
        passes.append(stats.drafter_passes)
    assert passes[1] < passes[0]
    assert passes[1] < 60
