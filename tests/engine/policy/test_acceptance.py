"""What is accepted: the path probability at first, the share of accepted candidates later; old texts count for less."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from card.engine.policy.acceptance import FIRST_AGREEMENT, Acceptance, Agreement, Chances
from card.engine.request import Verified
from card.tree.nodes import NO_NODES, Nodes
from tests.examples import settings

probs = st.floats(1e-4, 1.0)
depths = st.integers(1, 20)


BEAM, SUFFIX, RECYCLING = 1, 2, 4


def tree(*nodes: tuple[int, float], writers: tuple[int, ...] = ()) -> Nodes:
    """Return candidates from (parent index, path probability)."""
    depth: list[int] = []
    for parent, _ in nodes:
        depth.append(1 if parent < 0 else depth[parent] + 1)
    order = tuple(range(len(nodes)))
    parents = tuple(parent for parent, _ in nodes)
    return Nodes(order, parents, tuple(math.log(prob) for _, prob in nodes), tuple(depth), writers)


def verified(
    offer: Nodes,
    accepted: tuple[int, ...] = (),
    *,
    agreed: int = 0,
    claims: tuple[float, ...] = (),
    is_greedy: bool = True,
) -> Verified:
    return Verified(0, offer, accepted, is_greedy, agreed, claims)


# ---- the chance of a candidate --------------------------------------------------------------------------------------


@given(depth=depths, prob=probs)
@settings(max_examples=40)
def test_without_observations_the_path_probability_itself_is_returned(depth: int, prob: float) -> None:
    assert Chances().probability(depth, math.log(prob)) == pytest.approx(prob)


def test_scores_just_above_zero_and_of_minus_infinity_are_probabilities_too() -> None:
    chances = Chances()
    for score, prob in ((1e-7, 1.0), (-math.inf, 0.0)):
        assert chances.probability(1, score) == prob
        chances.observe(1, score, False)
    assert chances.probability(1, -math.inf) == 0.0


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 30])
@pytest.mark.parametrize("prob", [0.01, 0.4, 0.97, 1.0])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_after_many_observations_the_accepted_share_is_returned(depth: int, prob: float, share: float) -> None:
    chances, chance = Chances(), random.Random(1)
    for _ in range(2000):
        chances.observe(depth, math.log(prob), chance.random() < share)
    assert chances.probability(depth, math.log(prob)) == pytest.approx(share, abs=0.1)


def test_depths_and_probabilities_far_apart_are_learnt_apart() -> None:
    chances = Chances()
    for _ in range(500):
        chances.observe(1, math.log(0.9), False)
        chances.observe(9, math.log(0.9), True)
        chances.observe(1, math.log(0.2), True)
    found = [chances.probability(depth, math.log(prob)) for depth, prob in ((1, 0.9), (9, 0.9), (1, 0.2))]
    assert [round(one) for one in found] == [0, 1, 1]


def test_what_was_long_ago_is_forgotten() -> None:
    chances = Chances()
    for was_accepted in [True] * 3000 + [False] * 1500:
        chances.observe(3, math.log(0.7), was_accepted)
    assert chances.probability(3, math.log(0.7)) < 0.05


def test_a_bin_that_is_not_used_any_more_goes_back_to_the_path_probability() -> None:
    chances = Chances()
    for _ in range(1000):
        chances.observe(1, math.log(0.7), False)
    spoilt = chances.probability(1, math.log(0.7))
    for _ in range(20_000):
        chances.observe(1, math.log(0.99), True)
    assert spoilt < 0.05
    assert chances.probability(1, math.log(0.7)) > 0.65


def test_greedy_and_sampled_text_are_learnt_apart() -> None:
    acceptance, offer = Acceptance(), tree((-1, 0.6), writers=(SUFFIX,))
    for _ in range(300):
        acceptance.observe([verified(offer, (0,)), verified(offer, is_greedy=False)])
    assert acceptance.probabilities(offer, is_greedy=True)[0] > 0.9
    assert acceptance.probabilities(offer, is_greedy=False)[0] < 0.1


@given(
    seen=st.lists(st.tuples(st.sampled_from((2, 4)), probs, st.booleans()), max_size=40),
    rows=st.data(),
)
@settings(max_examples=40)
def test_siblings_are_together_never_likelier_than_their_parent(seen, rows) -> None:
    acceptance = Acceptance()
    for writer, prob, was_accepted in seen:
        acceptance.observe([verified(tree((-1, prob), writers=(writer,)), (0,) if was_accepted else ())])
    nodes = rows.draw(st.lists(st.tuples(st.integers(-1, 9), probs), min_size=1, max_size=10))
    offer = tree(*[(min(parent, idx - 1), prob) for idx, (parent, prob) in enumerate(nodes)])
    writers = tuple(rows.draw(st.sampled_from((2, 4, 6))) for _ in nodes)
    chances = acceptance.probabilities(replace(offer, writers=writers), is_greedy=True)
    assert all(0.0 <= chance <= 1.0 for chance in chances)
    for parent in {-1, *range(len(nodes))}:
        below = [chance for chance, above in zip(chances, offer.parents, strict=True) if above == parent]
        assert sum(below) <= (1.0 if parent < 0 else chances[parent]) + 1e-9


def test_what_one_writer_is_sure_of_leaves_little_to_what_another_says_instead() -> None:
    acceptance = Acceptance()
    for writer, share in ((SUFFIX, 0.95), (RECYCLING, 0.6)):
        offer = tree((-1, 0.7), writers=(writer,))
        for i in range(1000):
            acceptance.observe([verified(offer, (0,) if i * 37 % 100 < 100 * share else ())])
    said = tree((-1, 0.7), (-1, 0.7), (1, 0.7), writers=(RECYCLING, SUFFIX, RECYCLING))
    other, sure, below = acceptance.probabilities(said, is_greedy=True)
    assert sure == pytest.approx(0.95, abs=0.02)
    assert other == pytest.approx(1 - sure)
    assert below <= sure
    alone = tree((-1, 0.7), writers=(RECYCLING,))
    assert acceptance.probabilities(alone, is_greedy=True) == [pytest.approx(0.6, abs=0.02)]


# ---- the draft model and the others ---------------------------------------------------------------------------------


def test_agreement_is_the_share_of_compared_candidates_that_the_target_took() -> None:
    acceptance = Acceptance()
    assert acceptance.pair.value == FIRST_AGREEMENT
    for _ in range(200):
        acceptance.observe([verified(NO_NODES, agreed=2, claims=(0.4,) * 5)])
    assert acceptance.pair.value == pytest.approx(0.4, abs=0.02)


def test_rounds_that_compare_nothing_bring_back_what_the_draft_model_was_all_along() -> None:
    fallen, lasting = [], []
    for num_seen in (5, 50, 500):
        acceptance = Acceptance()
        for _ in range(num_seen):
            acceptance.observe([verified(NO_NODES, claims=(0.4,))])
        fallen.append(acceptance.pair.value)
        for _ in range(2000):
            acceptance.observe([verified(NO_NODES)])
        lasting.append(acceptance.pair.value)
    assert all(now > then for now, then in zip(lasting, fallen, strict=True))
    assert FIRST_AGREEMENT - 0.15 < lasting[0] < FIRST_AGREEMENT, "a few wrong places are bad luck"
    assert lasting[0] > 2 * lasting[1] > 4 * lasting[2], "many are no luck"


def test_a_pair_of_earlier_runs_is_hoped_to_exceed_what_it_showed_by_less_than_a_new_one() -> None:
    new, known = Agreement(), Agreement()
    known.recall(new.value)
    assert known.value == new.value
    assert new.value + 0.05 < known.hoped < new.hoped - 0.05


def test_a_new_text_lets_what_was_seen_of_old_ones_count_for_less_the_more_of_the_batch_it_is() -> None:
    def after(num_texts: int) -> float:
        acceptance = Acceptance()
        texts = range(num_texts)
        assert acceptance.begin(texts)
        for _ in range(30):
            acceptance.observe([verified(NO_NODES, claims=(0.4,))])
        assert not acceptance.begin(texts), "they are those of the last round"
        before = acceptance.pair.value
        assert acceptance.begin([*texts[1:], 99])
        return acceptance.pair.value - before

    assert after(1) > after(4) > 0


# ---- what the draft model claims ------------------------------------------------------------------------------------


def see(acceptance: Acceptance, share: float, claimed: float, num_rounds: int = 300, seed: int = 0) -> Acceptance:
    """Let it see single candidates of which this share agrees, each said to be as likely as ``claimed``."""
    rng = random.Random(seed)
    for _ in range(num_rounds):
        acceptance.observe([verified(NO_NODES, agreed=int(rng.random() < share), claims=(claimed,))])
    return acceptance


def see_all(share: Callable[[float], float], num_rounds: int = 600) -> Acceptance:
    """Let it see candidates of all claims; of those with a claim, this share agrees."""
    acceptance, rng = Acceptance(), random.Random(2)
    for _ in range(num_rounds):
        claim = rng.uniform(0.02, 1.0)
        acceptance.observe([verified(NO_NODES, agreed=int(rng.random() < share(claim)), claims=(claim,))])
    return acceptance


def chance(acceptance: Acceptance, *claims: float) -> float:
    """Return the chance of a path whose candidates the draft model says to be so likely."""
    return acceptance.pair.calibration.chance(len(claims), math.log(math.prod(claims)))


@given(share=st.floats(0.1, 1.0), seed=st.integers(0, 99))
@settings(max_examples=20)
def test_an_honest_draft_model_is_trusted_whatever_it_is_worth(share: float, seed: int) -> None:
    assert chance(see(Acceptance(), share, share, 1000, seed), share) == pytest.approx(share, abs=0.1)


@pytest.mark.parametrize(("share", "claimed"), [(0.4, 0.8), (0.7, 0.95), (0.5, 0.4), (0.9, 0.6)])
def test_a_claim_is_worth_the_share_that_agreed(share: float, claimed: float) -> None:
    acceptance = see(Acceptance(), share, claimed)
    assert chance(acceptance, claimed) == pytest.approx(share, rel=0.15)
    assert (chance(acceptance, claimed) < claimed) == (share < claimed)


def test_claims_of_an_honest_draft_model_tell_its_candidates_apart() -> None:
    acceptance = see_all(lambda claim: claim)
    for claim in (0.1, 0.3, 0.6, 0.95):
        assert chance(acceptance, claim) == pytest.approx(claim, rel=0.3)


def test_claims_that_say_nothing_count_for_nothing_and_the_share_holds_at_each_depth() -> None:
    acceptance = see_all(lambda claim: 0.8)
    for claim in (0.1, 0.3, 0.6, 0.95):
        assert chance(acceptance, claim) == pytest.approx(0.8, rel=0.2)
        assert chance(acceptance, claim, 0.4, claim, 0.7) == pytest.approx(0.8**4, rel=0.4)


def test_claims_that_are_the_wrong_way_round_count_for_nothing_at_most() -> None:
    acceptance = see_all(lambda claim: 1.0 - claim)
    assert acceptance.pair.calibration.slope == 0.0
    assert chance(acceptance, 0.1) == chance(acceptance, 0.9) == pytest.approx(0.5, abs=0.1)


def test_before_anything_was_seen_claims_are_believed() -> None:
    calibration = Acceptance().pair.calibration
    assert (calibration.level, calibration.slope) == pytest.approx((1.0, 1.0))
    assert calibration.chance(3, math.log(0.3)) == pytest.approx(0.3)


def test_claims_are_believed_again_when_they_become_true_and_when_nothing_more_is_seen() -> None:
    acceptance = see(Acceptance(), 0.3, 0.9)
    assert chance(acceptance, 0.9) < 0.5
    assert chance(see(acceptance, 0.9, 0.9, 1500), 0.9) > 0.8
    acceptance = see(Acceptance(), 0.3, 0.9, 20)
    before = chance(acceptance, 0.9)
    for _ in range(3000):
        acceptance.observe([verified(NO_NODES)])
    assert before < 0.75
    assert chance(acceptance, 0.9) > 0.85


def test_a_draft_model_that_is_never_right_leaves_no_chance_and_no_division_by_nothing() -> None:
    acceptance = see(Acceptance(lasts=True), 0.0, 0.9, 5000)
    assert 0.0 < chance(acceptance, 0.9) < 0.1
    calibration = see(Acceptance(), 0.0, 0.0, 5000).pair.calibration
    assert math.isfinite(calibration.level)
    assert 0.0 <= calibration.chance(1, -math.inf) <= 0.1


def test_paths_of_the_draft_model_are_as_likely_as_its_claims_are_worth_for_each_layer() -> None:
    acceptance = see(Acceptance(), 0.4, 0.8)
    offer = tree((-1, 0.9), (0, 0.8), (1, 0.7))
    level, slope = acceptance.pair.calibration.level, acceptance.pair.calibration.slope
    probs = acceptance.probabilities(offer, is_greedy=True)
    assert probs == pytest.approx([0.9**slope * level, 0.8**slope * level**2, 0.7**slope * level**3])
    modest = see(Acceptance(), 0.9, 0.5)
    assert modest.pair.calibration.chance(2, math.log(0.9)) == 1.0, "a chance, however much better it is than it says"


def test_what_the_draft_model_claims_says_nothing_of_candidates_that_others_propose() -> None:
    acceptance = see(Acceptance(), 0.1, 0.9)
    offer = tree((-1, 0.7), writers=(SUFFIX,))
    assert acceptance.probabilities(offer, is_greedy=True) == pytest.approx([0.7])
