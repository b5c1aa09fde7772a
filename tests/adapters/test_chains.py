"""The chain that is handed over is the best one, and rows cost what the steps say."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.adapters.chains import RowCosts, best_chain
from card.tree.nodes import ROOT, Nodes


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
def test_no_other_chain_is_worth_more(seed: int, cost: float, most: int):
    tree, chances = random_tree(seed)
    worth = {
        idx: sum(chances[node] - cost for node in path_to(tree, idx))
        for idx in range(ROOT, len(tree))
        if idx == ROOT or tree.depths[idx] <= most
    }
    chain = best_chain(tree, chances, cost, most)
    assert chain == path_to(tree, chain[-1] if chain else ROOT)
    assert sum(chances[node] - cost for node in chain) == pytest.approx(max(worth.values()))


def test_a_row_costs_what_steps_of_more_rows_take_longer():
    costs = RowCosts()
    rng = random.Random(1)
    for _ in range(300):
        num_rows = rng.randint(1, 9)
        costs.observe(1, num_rows, 2, 0.010 + 0.001 * num_rows)  # two tokens in 15 ms: a row is worth 0.13 of them
    assert costs.cost(1) == pytest.approx(0.001 * 2 / 0.015, rel=0.15)


def test_sizes_of_batches_are_learnt_apart_and_a_disturbed_step_counts_little():
    costs = RowCosts()
    first = costs.cost(1)
    for idx in range(100):
        costs.observe(16, 16 + idx % 50, 32, 0.01 + 0.002 * (16 + idx % 50))
        costs.observe(1, 1 + idx % 8, 1, 5.0 if idx % 10 == 9 else 0.010)
    assert costs.cost(1) < first < costs.cost(16)


def test_a_cost_that_is_given_stays_and_no_cost_is_out_of_bounds():
    fixed = RowCosts(0.3)
    fixed.observe(1, 5, 1, 1.0)
    assert fixed.cost(1) == 0.3
    odd = RowCosts()
    for idx in range(20):
        odd.observe(1, 1 + idx, 1, 1.0 / (1 + idx))  # the more rows the faster
    assert 0.0 <= odd.cost(1) <= 1.0
