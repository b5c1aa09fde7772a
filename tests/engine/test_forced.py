"""The grammar as a writer: what it forces is verified as candidates, and changes how many passes a text takes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import DraftSettings, Grammar, SamplingParams
from card.engine.forced import ForcedText
from card.engine.offers import GRAMMAR
from card.engine.target import TargetWorker
from card.text.following import AtOnce, Following
from card.tree.masks import Path
from card.tree.nodes import PATH_END, ROOT
from tests.decoding import decode, fake, inline, make_engine, make_request, toy_draft, toy_target
from tests.engine.test_exactness import agreements, faults, shapes
from tests.engine.test_shaped import run_to_end, samplings, some_writers, tokens_of
from tests.examples import settings
from tests.shaping import TOY_VOCAB_SIZE, ToyGrammar

ENDS = frozenset({ToyGrammar.END})
PERIOD = 6  # a free token, then five that it forces
TREE = DraftSettings(verify="tree", budget=8, lead=6, min_verify_prob=0.0)
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=40, grammar=Grammar("regex", "toy"))
SAMPLED = GREEDY.replace(temperature=1.0, seed=5)


class Calls(ToyGrammar):
    """A grammar whose every sixth token is free; the others follow from the one before."""

    def follows(self, text: Sequence[int]) -> list[bool]:
        if len(text) >= self._length or len(text) % PERIOD == 0:
            return super().follows(text)
        return [token == (text[-1] + 1) % self.END for token in range(TOY_VOCAB_SIZE)]


class TwoFree(Calls):
    """A grammar in which two tokens of six are free."""

    def follows(self, text: Sequence[int]) -> list[bool]:
        return ToyGrammar.follows(self, text) if len(text) % PERIOD == 1 else super().follows(text)


class Liar(Calls):
    """It says that another token is forced than the one that is."""

    def forced(self, path: Path) -> Sequence[int]:
        return [(token + 1) % self.END for token in super().forced(path)]


class Broken(Calls):
    """It fails when it is asked what is forced."""

    def forced(self, path: Path) -> Sequence[int]:
        raise RuntimeError("no idea")


@settings(max_examples=40)
@given(
    seed=st.integers(0, 99),
    length=st.integers(0, 20),
    sampling=samplings,
    agreement=agreements,
    shape=shapes,
    faults=faults,
    writers=some_writers,
    kind=st.sampled_from([Calls, Liar, Broken]),
)
def test_texts_are_those_of_plain_decoding_whatever_a_grammar_says_that_it_forces(
    seed, length, sampling, agreement, shape, faults, writers, kind
):
    target = toy_target(seed)
    of_grammar = partial(decode, params=GREEDY.replace(**sampling), end_ids=ENDS, grammar=kind(length))
    wanted = of_grammar(target, None, method="vanilla")[:2]
    link = fake(toy_draft(target, agreement), faults)
    assert of_grammar(target, link, draft=shape, writers=writers, foresees=True)[:2] == wanted
    in_turns = inline(toy_draft(target, agreement))
    assert of_grammar(target, in_turns, method="sps", writers=writers, foresees=True)[:2] == wanted
    assert of_grammar(target, None, method="suffix", foresees=True)[:2] == wanted


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", [DraftSettings(), TREE], ids=["chain", "tree"])
def test_a_forced_span_takes_no_pass_of_its_own_at_any_temperature(params, draft):
    of_grammar = partial(
        decode, toy_target(), None, method="vanilla", params=params, draft=draft, end_ids=ENDS, grammar=Calls(30)
    )
    plain_ids, _, plain = of_grammar()
    token_ids, _, stats = of_grammar(foresees=True)
    assert token_ids == plain_ids and len(plain_ids) == 31
    # Of 31 tokens the prompt's pass brings the first, and each further pass five that are forced and a free one.
    assert (plain.target_passes, stats.target_passes) == (30, 5)
    assert stats.accepted_by_writer == stats.verified_by_writer == {GRAMMAR: 25}


def test_what_is_forced_goes_on_from_the_drafters_best_path():
    target, draft = toy_target(), TREE.replace(num_speculative_tokens=1)
    of_grammar = partial(decode, target, params=GREEDY, draft=draft, end_ids=ENDS, grammar=TwoFree(30))
    passes = {}
    for foresees in (False, True):
        for link in (None, inline(toy_draft(target, 1.0))):
            _, _, stats = of_grammar(link, method="card", foresees=foresees)
            passes[foresees, link is not None] = stats.target_passes
    # A drafter that knows the target's free tokens, but no grammar, joins two spans in one pass.
    assert passes[True, False] == 10, "two for each span of six"
    assert passes[True, True] < 10 < passes[False, True] < passes[False, False] == 30


def test_a_grammar_that_is_wrong_or_fails_costs_acceptance_alone(caplog):
    for kind, words in ((Liar, ""), (Broken, "not proposed: ")):
        _, reason, stats = decode(
            toy_target(), None, method="vanilla", params=GREEDY, end_ids=ENDS, grammar=kind(30), foresees=True
        )
        assert (reason, stats.accepted_tokens, stats.target_passes) == ("stop", 0, 30)
        assert words in caplog.text


@pytest.mark.parametrize("has_drafter", [False, True])
def test_in_a_batch_only_requests_with_a_grammar_ask_one(has_drafter, monkeypatch):
    target, free = toy_target(), SAMPLED.replace(grammar=None)
    queried, asked = list[int](), list[ForcedText]()
    query, propose = TargetWorker.query, ForcedText.propose
    monkeypatch.setattr(
        TargetWorker,
        "query",
        lambda self, one, **how: queried.append(one.request.request_id) or query(self, one, **how),
    )
    monkeypatch.setattr(ForcedText, "propose", lambda self, *how: asked.append(self) or propose(self, *how))
    requests = [
        make_request(
            idx,
            params=params.replace(seed=idx),
            draft=TREE,
            prompt=(3, 1, idx),
            end_ids=ENDS,
            uses_drafter=has_drafter,
            grammar=None if params.grammar is None else Calls(20),
        )
        for idx, params in enumerate([SAMPLED, free, GREEDY, free, SAMPLED.replace(speculates=False)])
    ]
    link = inline(toy_draft(target, 0.8)) if has_drafter else None
    engine = make_engine(target, link, "card" if has_drafter else "vanilla", foresees=True)
    together = run_to_end(engine, requests)
    assert len(set(map(id, asked))) == 2, "those of two texts"
    if not has_drafter:
        assert set(queried) == {0, 2}
    queried.clear()
    for request in requests:
        alone = run_to_end(make_engine(target, None, "vanilla"), [replace(request, uses_drafter=False)])
        assert tokens_of(together[request.request_id]) == tokens_of(alone[request.request_id])
    assert not queried, "plain decoding asks nobody"
    assert together[4][-1].stats.verified_tokens == 0, "the request turns speculation off"


def test_a_proposal_is_what_is_forced_and_empty_where_nothing_is():
    def proposed(text: Sequence[int], best_path: Sequence[int] = (), budget: int = 9, vocab_size: int = 12):
        masks = Following(Calls(30), AtOnce(), foresees=True)
        masks.advance(text)
        return ForcedText(masks, vocab_size).propose(best_path, budget)

    assert not proposed([]), "the first token is free"
    span = proposed([3])
    assert (span.tokens, span.parents, set(span.path_logprobs)) == ((4, 5, 6, 7, 8), (ROOT, 0, 1, 2, 3), {0.0})
    assert proposed([3], budget=2).tokens == (4, 5)
    assert proposed([3], vocab_size=6).tokens == (4, 5), "the target has no other tokens"
    assert proposed([3], [4, 5]).tokens == span.tokens, "the path keeps to it, and has nothing beyond"
    further = proposed([3], [4, 5, 6, 7, 8, 1])
    assert (further.tokens, further.parents) == ((2, 3, 4, 5, 6), (PATH_END, 0, 1, 2, 3))
    assert proposed([3], [4, 9]).tokens == span.tokens, "a path that is forbidden"
    assert proposed([], [3]).parents[0] == PATH_END
