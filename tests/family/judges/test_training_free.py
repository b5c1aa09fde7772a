"""Each judge tolerates what its rule says, a forbidden token never, and with a knob of 0 nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from card.family.judges.choosing import verifier_of
from card.family.judges.judge import JudgingVerifier
from card.family.judges.knobs import KNOBS
from card.family.judges.training_free import Fly, KullbackLeibler, Relaxed, Typical
from card.tree.nodes import ROOT, Nodes
from card.tree.verify import Verdict, Verification, match

V = 6


def seen_of(
    tokens: Sequence[int], probs: Sequence[Sequence[float]], drafted: Sequence[float], **offer: tuple[int, ...]
) -> Verification:
    """Return a chain of candidates and the target's probabilities, which chooses the likeliest."""
    rows = torch.tensor(probs).log()
    paths = tuple(math.log(math.prod(drafted[: i + 1])) for i in range(len(tokens)))
    nodes = Nodes(tuple(tokens), tuple(range(-1, len(tokens) - 1)), paths, **offer)
    return Verification(nodes, rows, rows.argmax(-1).tolist(), 0)


UNSURE, SURE = [0.40, 0.30, 0.15, 0.10, 0.05, 0.0], [0.95, 0.03, 0.01, 0.01, 0.0, 0.0]


def keeps(verifier: JudgingVerifier, token: int, probs: Sequence[float], drafted: float = 0.4) -> bool:
    return bool(verifier.decide(seen_of([token], [probs, SURE], [drafted])).accepted)


def test_typical_asks_less_of_a_candidate_where_the_target_is_unsure() -> None:
    typical = JudgingVerifier(Typical(1.0))
    assert keeps(typical, 1, UNSURE) and keeps(typical, 3, UNSURE)
    assert not keeps(typical, 4, UNSURE)  # 0.05 is less than delta * exp(-entropy), 0.075
    assert not keeps(typical, 1, SURE)
    assert keeps(JudgingVerifier(Typical(4.0)), 1, SURE)


def test_relaxed_takes_three_tokens_that_are_near_the_likeliest() -> None:
    assert keeps(JudgingVerifier(Relaxed(0.5)), 1, UNSURE) and not keeps(JudgingVerifier(Relaxed(0.2)), 1, UNSURE)
    assert keeps(JudgingVerifier(Relaxed(1.0)), 2, UNSURE) and not keeps(JudgingVerifier(Relaxed(1.0)), 3, UNSURE)


def test_kl_compares_target_and_drafter_and_is_strict_where_the_target_is_sure() -> None:
    judge = JudgingVerifier(KullbackLeibler(0.05))
    assert keeps(judge, 1, UNSURE, drafted=0.35) and not keeps(judge, 1, UNSURE, drafted=0.9)
    assert not keeps(JudgingVerifier(KullbackLeibler(1e6)), 1, SURE, drafted=0.03)


def test_kl_does_not_take_the_guesses_of_a_writer_without_a_model_for_chances() -> None:
    judge = JudgingVerifier(KullbackLeibler(1e6))
    assert not judge.decide(seen_of([1], [UNSURE, SURE], [0.3], writers=(2,))).accepted
    assert judge.decide(seen_of([1], [UNSURE, SURE], [0.3], writers=(3,))).accepted


def test_fly_waits_for_six_candidates_that_agree_and_opens_where_the_target_is_unsure() -> None:
    judge, drafted = JudgingVerifier(Fly(0.7)), [0.9] * 7
    agreeing = seen_of([1] + [0] * 6, [UNSURE] + [SURE] * 7, drafted)
    assert judge.decide(agreeing) == Verdict(tuple(range(7)), 0)
    assert judge.decide(seen_of([1] + [0] * 5, [UNSURE] + [SURE] * 6, drafted)).accepted == ()  # too short to tell
    assert judge.decide(seen_of([1] + [0] * 5 + [2], [UNSURE] + [SURE] * 7, drafted)).accepted == ()
    assert judge.decide(seen_of([1] + [0] * 6, [SURE] * 8, drafted)).accepted == ()


@pytest.mark.parametrize(
    ("probs", "is_kept"),
    [  # by hand, -p log p in nats of the three likeliest
        ([0.93, 0.04, 0.02, 0.01], False),  # 0.0675 + 0.1288 + 0.0782 = 0.2745; with the fourth it would be 0.3205
        ([0.92, 0.05, 0.02, 0.01], True),  # 0.0767 + 0.1498 + 0.0782 = 0.3047; divided by 0.99 first it would be 0.2978
        ([0.50, 0.50], True),  # 2 * 0.3466 = 0.6931, which is a tenth of log 1,000
        ([0.95, 0.04], False),  # 0.0487 + 0.1288 = 0.1775
    ],
)
def test_fly_opens_at_three_tenths_of_a_nat_over_the_three_likeliest_tokens(probs: list[float], is_kept: bool) -> None:
    row = probs + [(1 - sum(probs)) / 996 if len(probs) < 4 else 0.0] * (1000 - len(probs))
    seen = seen_of([1] + [0] * 6, [row] * 8, [0.9] * 7)
    assert bool(JudgingVerifier(Fly(0.7)).decide(seen).accepted) == is_kept


def test_the_knob_of_fly_is_what_its_gate_lies_below_one_nat() -> None:
    seen = seen_of([1] + [0] * 6, [[0.93, 0.04, 0.02, 0.01, 0.0, 0.0]] * 8, [0.9] * 7)  # 0.2745 nats
    kept = {knob: bool(JudgingVerifier(Fly(knob)).decide(seen).accepted) for knob in (0.0, 0.72, 0.73, 1.0)}
    assert kept == {0.0: False, 0.72: False, 0.73: True, 1.0: True}


def test_of_several_tolerated_candidates_the_likeliest_stays() -> None:
    offer = Nodes((2, 1), (ROOT, ROOT), (-1.0, -2.0))
    seen = Verification(offer, torch.tensor([UNSURE] * 3).log(), [0, 0, 0], 0)
    assert JudgingVerifier(Relaxed(1.0)).decide(seen).accepted == (1,)


@pytest.mark.parametrize("kind", KNOBS)
@given(data=st.data())
def test_with_a_knob_of_0_the_verdict_is_that_of_the_exact_verifier(kind: str, data: st.DataObject) -> None:
    seen = drawn(data)
    assert verifier_of(f"{kind}:0").decide(seen) == match(seen.offer.tokens, seen.offer.parents, seen.choices)


@pytest.mark.parametrize("kind", KNOBS)
@given(data=st.data())
def test_a_token_that_a_grammar_forbids_is_never_kept(kind: str, data: st.DataObject) -> None:
    seen = drawn(data)
    seen.logits[:, V - 1] = float("-inf")
    seen = Verification(seen.offer, seen.logits, [choice % (V - 1) for choice in seen.choices], 0)
    verdict = verifier_of(f"{kind}:{KNOBS[kind].most}").decide(seen)
    assert V - 1 not in [seen.offer.tokens[i] for i in verdict.accepted]


def drawn(data: st.DataObject) -> Verification:
    """Draw a tree of candidates with logits and choices, which need not be the likeliest tokens."""
    count = data.draw(st.integers(0, 8))
    parents, tokens = [data.draw(st.integers(ROOT, i - 1)) for i in range(count)], list[int]()
    for i, parent in enumerate(parents):
        taken = {tokens[j] for j in range(i) if parents[j] == parent}
        tokens.append(data.draw(st.sampled_from([t for t in range(V) if t not in taken] or [V + i])))
    kept = [i for i, token in enumerate(tokens) if token < V and all(tokens[p] < V for p in _above(parents, i))]
    scores = [-float(len(_above(parents, i)) + 1) for i in range(count)]
    offer = Nodes(tuple(tokens), tuple(parents), tuple(scores), tuple([1] * count)).take(kept)
    values = st.lists(st.floats(-4, 4), min_size=V, max_size=V)
    logits = torch.tensor([data.draw(values) for _ in range(len(kept) + 1)])
    return Verification(offer, logits, [data.draw(st.integers(0, V - 1)) for _ in range(len(kept) + 1)], 0)


def _above(parents: Sequence[int], node: int) -> list[int]:
    found = []
    while (node := parents[node]) != ROOT:
        found.append(node)
    return found
