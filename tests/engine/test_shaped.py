"""Penalties, biases, least lengths and grammars under speculation: the text of plain decoding, token for token."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import DraftSettings, Grammar, SamplingParams
from card.engine.engine import Engine
from card.engine.request import CORRECTED, PLAIN, Request, Update
from card.errors import SettingsError
from card.tree.logits import log_softmax, top
from tests.decoding import PROMPT, decode, fake, inline, make_engine, make_request, plain, toy_draft, toy_target
from tests.engine.test_exactness import agreements, faults, shapes
from tests.examples import settings
from tests.local_writing import WRITERS
from tests.shaping import ToyGrammar, shapings, slow_decode, slowly_shaped
from tests.toy import TableModel

ENDS = frozenset({ToyGrammar.END})
samplings = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**40), "max_tokens": st.integers(12, 30)},
    optional={"temperature": st.sampled_from([0.0, 0.7, 1.3]), "top_k": st.just(4), "top_p": st.just(0.8)},
)
some_writers = st.sampled_from([(), ("suffix",), WRITERS])
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=40)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=40)
TREE = DraftSettings(verify="tree", beam_width=8, budget=8, lead=6, min_verify_prob=0.0)
PENALISED = SAMPLED.replace(presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.2, min_tokens=9)


def run_to_end(engine: Engine, requests: list[Request]) -> dict[int, list[Update]]:
    """Run requests that begin together; return what each got."""
    updates: dict[int, list[Update]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(engine.check(request))
    while engine.has_work:
        for update in engine.step():
            assert update.error is None
            updates[update.request_id].append(update)
    return updates


def tokens_of(updates: list[Update]) -> list[int]:
    return [token for update in updates for token in update.token_ids]


# ---- the same text --------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    seed=st.integers(0, 99),
    agreement=agreements,
    changes=shapings,
    sampling=samplings,
    shape=shapes,
    faults=faults,
    writers=some_writers,
)
def test_shaped_text_is_that_of_a_slow_loop_under_any_message_order(
    seed, agreement, changes, sampling, shape, faults, writers
):
    target, params = toy_target(seed), SamplingParams(**changes, **sampling)
    wanted = slow_decode(target, params, PROMPT, ENDS)
    link = fake(toy_draft(target, agreement), faults)
    given_ids, _, _ = decode(target, link, params=params, draft=shape, end_ids=ENDS, writers=writers)
    assert given_ids == wanted
    assert plain(target, params=params, end_ids=ENDS)[0] == wanted
    assert not link.status.reason, "no message of an honest drafter is rejected"


@settings(max_examples=40)
@given(
    seed=st.integers(0, 99),
    length=st.integers(0, 20),
    sampling=samplings,
    shape=shapes,
    faults=faults,
    writers=some_writers,
    min_tokens=st.integers(0, 12),
)
def test_text_of_a_grammar_is_that_of_plain_decoding_and_keeps_to_it(
    seed, length, sampling, shape, faults, writers, min_tokens
):
    target = toy_target(seed)
    params = SamplingParams(grammar=Grammar("regex", "toy"), min_tokens=min_tokens, **sampling)
    of_grammar = partial(decode, params=params, end_ids=ENDS, grammar=ToyGrammar(length))
    wanted, reason, _ = of_grammar(target, None, method="vanilla")
    link = fake(toy_draft(target, 0.8), faults)
    assert of_grammar(target, link, draft=shape, writers=writers)[:2] == (wanted, reason)
    assert ToyGrammar(length).has(wanted)
    assert reason == ("stop" if length < params.max_tokens else "length")


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("agreement", [0.0, 0.8])
def test_requests_of_one_batch_are_shaped_each_by_its_own_rule(params, agreement):
    target = toy_target()
    changes = [
        {},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.8, "frequency_penalty": 0.5},
        {"logit_bias": {4: 3.0, 7: -100.0}},
        {"min_tokens": 20},
        {"grammar": Grammar("regex", "toy")},
        {"speculates": False, "frequency_penalty": 1.0},
    ]
    requests = [
        make_request(
            idx,
            params=params.replace(**one, seed=idx),
            draft=TREE,
            prompt=(3, 1, idx),
            end_ids=ENDS,
            grammar=ToyGrammar(15) if "grammar" in one else None,
        )
        for idx, one in enumerate(changes)
    ]
    together = run_to_end(make_engine(target, inline(toy_draft(target, agreement)), writers=("suffix",)), requests)
    for request in requests:
        alone = run_to_end(make_engine(target, None, "vanilla"), [replace(request, uses_drafter=False)])
        assert tokens_of(together[request.request_id]) == tokens_of(alone[request.request_id])
    stats = together[6][-1].stats
    assert (stats.verified_tokens, stats.drafter_passes, stats.speculation) == (0, 0, "off: the request turns it off")


def test_candidates_that_the_grammar_forbids_are_not_verified():
    target = toy_target()
    params = SAMPLED.replace(grammar=Grammar("regex", "toy"), max_tokens=30)
    _, _, stats = decode(
        target, inline(toy_draft(target, 0.9)), params=params, draft=TREE, end_ids=ENDS, grammar=ToyGrammar(30)
    )
    free = decode(target, inline(toy_draft(target, 0.9)), params=SAMPLED, draft=TREE)[2]
    assert 0 < stats.verified_tokens / stats.target_passes < free.verified_tokens / free.target_passes
    assert stats.accepted_tokens > 0


def test_a_grammar_goes_with_its_parameters():
    with pytest.raises(SettingsError, match="go together"):
        replace(make_request(1), grammar=ToyGrammar(3))
    with pytest.raises(SettingsError, match="go together"):
        make_request(1, params=GREEDY.replace(grammar=Grammar("json_object")))


def test_a_drafter_that_knows_the_penalties_agrees_as_if_there_were_none():
    target = toy_target()
    rates = {}
    endless = PENALISED.replace(min_tokens=40, logit_bias={3: 2.0})  # what follows an end would not be accepted
    for name, params in (("plain", SAMPLED), ("penalised", endless)):
        ends = ENDS if params.min_tokens else frozenset()
        _, _, stats = decode(target, inline(toy_draft(target, 1.0)), method="sps", params=params, end_ids=ends)
        rates[name] = stats.acceptance_rate
    assert rates == {"plain": 1.0, "penalised": 1.0}


# ---- what is told of tokens -----------------------------------------------------------------------------------------


def reported(params: SamplingParams, target: TableModel, **changes: object) -> list[Update]:
    engine = make_engine(target, inline(toy_draft(target, 0.7)), writers=("suffix",))
    return run_to_end(engine, [make_request(1, params=params, draft=TREE, **changes)])[1]


@pytest.mark.parametrize("params", [GREEDY, PENALISED], ids=["greedy", "penalised"])
@pytest.mark.parametrize("num_top", [0, 3, 20])
def test_logprobs_are_those_of_the_bare_target_after_each_prefix(params, num_top):
    target = toy_target()
    updates = reported(params.replace(logprobs=num_top), target)
    told = [one for update in updates for one in update.details.logprobs]
    token_ids = tokens_of(updates)
    assert [one.token_id for one in told] == token_ids
    for idx, one in enumerate(told):
        expected = log_softmax(target.logits_after([*PROMPT, *token_ids[:idx]]))
        assert one.logprob == pytest.approx(float(expected[one.token_id]), abs=1e-5)
        tokens, logprobs = top(expected[None], num_top)
        assert [token for token, _ in one.top] == tokens[0].tolist()
        assert [value for _, value in one.top] == pytest.approx(logprobs[0].tolist(), abs=1e-5)
    unasked = reported(params, target)
    assert tokens_of(unasked) == token_ids
    assert not any(update.details.logprobs or update.details.alternatives for update in unasked)


def test_each_token_says_where_it_came_from():
    updates = reported(SAMPLED, toy_target())
    assert updates[0].details.origins == (PLAIN,), "the prompt's pass has no candidates"
    for update in updates:
        *accepted, last = update.details.origins
        assert len(update.details.origins) == len(update.token_ids)
        assert all({*origin.split("+")} <= {"beam", "suffix"} for origin in accepted)
        if update.finish_reason is None:
            assert last in (CORRECTED, PLAIN)
    origins = [origin for update in updates for origin in update.details.origins]
    assert {"beam", CORRECTED} <= set(origins)
    stats = updates[-1].stats
    assert sum(origin not in (CORRECTED, PLAIN) for origin in origins) == stats.accepted_tokens


def test_the_tree_beside_the_text_is_shown_on_request():
    updates = reported(SAMPLED.replace(shows_tree=True), toy_target())
    assert len({len(update.details.alternatives) - len(update.token_ids) for update in updates}) == 1
    shown = 0
    for update in updates:
        for token, beside in zip(update.token_ids, update.details.alternatives, strict=True):
            shown += len(beside)
            assert token not in [other for other, _, _ in beside], "what was accepted is not beside itself"
            assert all(a[1] >= b[1] for a, b in itertools.pairwise(beside))
            assert all(value <= 0 and {*writer.split("+")} <= {"beam", "suffix"} for _, value, writer in beside)
    assert shown > 0


def test_a_request_without_speculation_runs_one_token_a_pass():
    target = toy_target()
    updates = reported(SAMPLED.replace(speculates=False), target)
    assert tokens_of(updates) == plain(target, params=SAMPLED)[0]
    assert {len(update.token_ids) for update in updates} == {1}
    assert {update.details.origins for update in updates} == {(PLAIN,)}


def test_the_slow_reference_finds_a_penalty_that_forgets_the_path():
    """The control: shaped as if the candidates before it did not count, a row is another one."""
    row = np.linspace(-3, 3, 12, dtype=np.float32).tolist()
    ahead = slowly_shaped(row, PENALISED, PROMPT, [7, 7], ENDS)
    assert ahead != slowly_shaped(row, PENALISED, PROMPT, [], ENDS)
