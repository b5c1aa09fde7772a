"""For an engine that is not ours: rows cost what its steps say, and a drafter in turns drafts as far as that pays."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from card.engine.request import Verified
from card.inside.adapters.chains import ROW_SHARE, ChainPolicy, best_chain, next_budget
from card.tree.nodes import NO_NODES, ROOT, Nodes


def steps(policy: ChainPolicy, num_requests: int, num_rows: Sequence[int], first_s: float, row_s: float) -> None:
    """Let the policy see steps in which each request commits two tokens."""
    for rows in num_rows:
        policy.observe_step(num_requests, rows, 2 * num_requests, first_s + row_s * rows)


def test_rows_are_free_until_a_step_was_seen_and_then_cost_what_steps_of_more_rows_take_longer() -> None:
    policy, rng = ChainPolicy(), random.Random(1)
    assert policy.price(1) == 0.0
    steps(policy, 1, [rng.randint(1, 9) for _ in range(300)], 0.010, 0.001)
    assert policy.price(1) == pytest.approx(0.001 * 2 / 0.015, rel=0.1)  # two tokens in 15 ms


def test_steps_of_always_as_many_rows_say_nothing_of_what_a_row_costs() -> None:
    policy = ChainPolicy()
    steps(policy, 1, [5] * 50, 0.010, 0.001)
    assert policy.price(1) == pytest.approx(ROW_SHARE * 2 / 5)  # of the step's two tokens, for one of five rows


def test_sizes_of_batches_are_learnt_apart_and_a_disturbed_step_counts_little() -> None:
    policy = ChainPolicy()
    for idx in range(100):
        steps(policy, 16, [16 + idx % 50], 0.01, 0.002)
        steps(policy, 1, [1 + idx % 8], 5.0 if idx % 10 == 9 else 0.010, 0.0)
    assert policy.price(1) < 0.1 < policy.price(16)


def test_a_cost_that_is_given_stays_and_none_is_below_0() -> None:
    fixed, odd = ChainPolicy(0.3), ChainPolicy()
    steps(fixed, 1, [5, 6, 7], 0.0, 1.0)
    assert fixed.price(1) == 0.3
    steps(odd, 1, range(1, 20), 1.0, -0.04)  # the more rows the faster
    assert odd.price(1) == 0.0


def test_a_chain_ends_where_its_next_token_is_not_worth_a_row() -> None:
    offer = Nodes.chain((5, 6, 7), (-0.1, -0.7, -2.3))  # 0.90, 0.50 and 0.10
    assert ChainPolicy(0.3).choose(offer, 1, 8).tokens == (5, 6)
    assert ChainPolicy(0.3).choose(offer, 1, 1).tokens == (5,)
    assert ChainPolicy(0.95).choose(offer, 1, 8) == NO_NODES


def agreeing(num_agreed: int, num_compared: int) -> Verified:
    return Verified(0, NO_NODES, (), True, num_agreed, (0.7,) * num_compared)


def test_a_chain_is_chosen_by_what_became_of_earlier_ones() -> None:
    policy, offer = ChainPolicy(0.3), replace(Nodes.chain((5, 6), (-0.1, -0.2)), writers=(2, 2))
    for _ in range(100):
        policy.observe([0], [Verified(0, offer, (0,), True)])
    assert policy.choose(offer, 1, 8).tokens == (5,)


def test_what_is_known_of_a_draft_model_fades_with_each_step_so_that_it_is_tried_again() -> None:
    policy = ChainPolicy(0.3)
    steps(policy, 1, [2] * 10, 0.010, 0.0)
    policy.observe_pass(1, 0.001)
    assert policy.is_worth_a_pass([(0, 0.0)], 1, 4)
    for _ in range(100):
        policy.observe([0], [agreeing(0, 1)])
    assert not policy.is_worth_a_pass([(0, 0.0)], 1, 4)
    for _ in range(2000):
        policy.observe([], [])
    assert policy.is_worth_a_pass([(0, 0.0)], 1, 4)


def test_a_pass_is_worth_it_while_its_tokens_are_more_than_the_engine_brings_in_that_time() -> None:
    def is_worth(*best_paths: tuple[int, float], row_cost: float = 0.05) -> bool:
        policy = ChainPolicy(row_cost)
        steps(policy, 1, [1], 0.020, 0.0)  # 100 tokens/s
        steps(policy, 2, [2], 0.040, 0.0)
        for num_requests in (1, 2):
            policy.observe_pass(num_requests, 0.001)  # a tenth of a token
        return policy.is_worth_a_pass(best_paths, len(best_paths), 4)

    assert is_worth((1, -0.1))
    assert not is_worth((1, -2.3))
    assert not is_worth((4, 0.0))  # as deep as can be verified
    assert not is_worth((1, -0.1), row_cost=0.9)
    assert is_worth((4, 0.0), (1, -0.1))  # of two requests one is enough


def test_a_pass_that_gives_several_layers_is_worth_what_all_of_them_bring() -> None:
    policy = ChainPolicy(0.05)
    steps(policy, 1, [1], 0.020, 0.0)  # 100 tokens/s
    policy.observe_pass(1, 0.010)  # a token
    assert not policy.is_worth_a_pass([(0, 0.0)], 1, 4)
    assert policy.is_worth_a_pass([(0, 0.0)], 1, 4, layers_per_pass=4)


def test_as_long_as_the_price_of_a_pass_is_unknown_it_is_worth_any_token() -> None:
    policy = ChainPolicy(0.05)
    steps(policy, 1, [1], 1e-6, 0.0)
    assert policy.is_worth_a_pass([(0, 0.0)], 1, 4)
    policy.observe_pass(1, 0.001)
    assert not policy.is_worth_a_pass([(0, 0.0)], 1, 4)


def test_a_local_writer_is_asked_for_twice_what_was_verified_and_falls_slowly_to_one() -> None:
    assert next_budget(8, 10) == 16
    assert next_budget(0, 10) == 9
    assert next_budget(0, 1) == 1


def random_tree(seed: int) -> tuple[Nodes, list[float]]:
    """Return a tree and chances that no child has above its parent's."""
    rng = random.Random(seed)
    parents: list[int] = []
    depths: list[int] = []
    chances: list[float] = []
    for idx in range(rng.randint(0, 9)):
        parent = rng.randint(ROOT, idx - 1)
        parents.append(parent)
        depths.append(1 if parent == ROOT else depths[parent] + 1)
        chances.append(rng.random() * (1.0 if parent == ROOT else chances[parent]))
    count = len(parents)
    tree = Nodes(tuple(range(count)), tuple(parents), tuple(map(math.log, chances)), tuple(depths))
    return tree, chances


def path_to(tree: Nodes, idx: int) -> list[int]:
    return [] if idx == ROOT else [*path_to(tree, tree.parents[idx]), idx]


@given(seed=st.integers(0, 2**31), cost=st.floats(0.0, 1.0), most=st.integers(0, 5))
def test_no_other_chain_is_worth_more(seed: int, cost: float, most: int) -> None:
    tree, chances = random_tree(seed)
    worth = {
        idx: sum(chances[node] - cost for node in path_to(tree, idx))
        for idx in range(ROOT, len(tree))
        if idx == ROOT or tree.depths[idx] <= most
    }
    chain = best_chain(tree, chances, cost, most)
    assert chain == path_to(tree, chain[-1] if chain else ROOT)
    assert sum(chances[node] - cost for node in chain) == pytest.approx(max(worth.values()))
