"""The candidate cache: its properties one by one."""

from __future__ import annotations

import random
from typing import Any

import pytest

from card.errors import ProtocolError
from card.tree.nodes import NO_NODES, NewNodes
from tests.trees import GARBAGE, grow, ids_of, make_cache, nodes, state, two_layers

# ---- re-rooting: hit, miss, late hit --------------------------------------------------------------------------------


def test_hit_keeps_the_subtree_of_the_new_root_and_drops_the_rest() -> None:
    cache = two_layers()
    assert cache.advance([10]) == 1
    assert (cache.root_id, cache.pending, cache.alive_ids(), cache.depth) == (1, (), [3, 4], 1)
    assert [cache.is_alive(i) for i in range(6)] == [False, True, False, True, True, False]
    assert cache.frontier(9) == [3, 4]  # the new root is expanded and stays so


def test_path_scores_count_from_the_current_root() -> None:
    cache = two_layers()
    assert cache.path_logprob(4) == -2.5
    cache.advance([10])
    assert [cache.path_logprob(i) for i in (1, 3, 4)] == [0.0, -0.25, -2.0]
    assert cache.query(9, "tree").path_logprobs == (-0.25, -2.0)


def test_path_scores_do_not_drift_over_many_hits() -> None:
    rng = random.Random(5)
    cache = make_cache(lead=6)
    for _ in range(6):
        grow(cache, {i: [(7, -rng.random()), (8, -3 - rng.random())] for i in cache.frontier(2)}, width=2)
    for _ in range(300):
        cache.advance(cache.query(1, "chain").tokens)
        grow(cache, {i: [(7, -rng.random()), (8, -3 - rng.random())] for i in cache.frontier(2)}, width=2)
    rebuilt = make_cache(lead=6)
    rebuilt.restart(cache.epoch, cache.root_id)
    rebuilt.extend(cache.epoch, cache.snapshot())
    assert rebuilt.query(100, "tree") == cache.query(100, "tree")  # bit for bit
    assert cache.depth == 6


def test_miss_leaves_the_rest_pending_and_offers_nothing() -> None:
    cache = two_layers()
    assert cache.advance([10, 99, 5]) == 1
    assert (cache.root_id, cache.pending, cache.num_nodes, cache.depth) == (1, (99, 5), 0, 0)
    assert len(cache.query(8, "chain")) == len(cache.query(8, "tree")) == 0


def test_tokens_committed_while_others_are_pending_wait_behind_them() -> None:
    cache = two_layers()
    cache.advance([99])
    assert cache.advance([10]) == 0
    assert cache.pending == (99, 10)
    assert cache.walk([99]) == ()


def test_late_hit_moves_the_root_when_the_node_arrives() -> None:
    cache = two_layers()
    cache.advance([10, 13, 14])
    assert cache.extend(0, nodes((6, 1, 15, -0.1), (7, 1, 13, -3.0), (8, 6, 1, -0.1))) == 1  # 15 is out of reach
    assert (cache.root_id, cache.pending, cache.num_nodes) == (7, (14,), 0)
    assert cache.extend(0, nodes((9, 7, 14, -0.5), (10, 9, 3, -0.5), (11, 9, 4, -0.1))) == 3
    assert (cache.root_id, cache.pending) == (9, ())
    assert ids_of(cache, cache.query(9, "tree")) == [11, 10]
    assert cache.query(9, "tree").path_logprobs == (-0.1, -0.5)


def test_one_message_settles_several_pending_tokens_whatever_it_holds_besides() -> None:
    cache = make_cache()
    cache.restart(4, 10, [1, 2])
    message = nodes(
        (11, 10, 9, -0.1), (12, 10, 1, -0.2), (13, 12, 8, -0.3), (14, 11, 7, 0.0), (15, 12, 2, -1), (16, 15, 5, -2)
    )
    assert cache.extend(4, message) == 3
    assert (cache.root_id, cache.pending, cache.alive_ids()) == (15, (), [16])


def test_restart_forgets_everything_and_counts_ids_from_its_root() -> None:
    cache = two_layers()
    cache.advance([99])
    cache.restart(1, 40)
    assert (cache.epoch, cache.root_id, cache.pending, cache.num_nodes, cache.depth) == (1, 40, (), 0, 0)
    assert cache.frontier(3) == [40]
    assert not cache.is_alive(1)
    assert grow(cache, {40: [(1, -1.0)]}).ids == (41,)


# ---- queries --------------------------------------------------------------------------------------------------------


def test_chain_follows_the_most_probable_child_even_if_another_path_is_better() -> None:
    cache = make_cache()
    grow(cache, {0: [(1, -1.5), (2, -1.0)]})
    grow(cache, {1: [(3, -3.0)], 2: [(4, -0.01)]})  # node 1 has token 2
    assert cache.query(5, "chain").tokens == (2, 3)
    assert cache.query(1, "chain").tokens == (2,)
    assert cache.query(5, "chain").parents == (-1, 0)
    assert cache.query(5, "chain").path_logprobs == (-1.0, -4.0)


def test_chain_takes_the_older_of_two_equal_children_in_any_order_of_arrival() -> None:
    cache = make_cache()
    cache.extend(0, nodes((5, 0, 1, -1.0)))
    cache.extend(0, nodes((3, 0, 2, -1.0)))
    assert ids_of(cache, cache.query(1, "chain")) == ids_of(cache, cache.query(1, "tree")) == [3]


def test_tree_holds_the_best_nodes_by_path_score() -> None:
    cache = two_layers()
    answer = cache.query(3, "tree")
    assert ids_of(cache, answer) == [1, 3, 2]
    assert (answer.tokens, answer.parents, answer.depths) == ((10, 11, 20), (-1, 0, -1), (1, 2, 1))
    assert answer.path_logprobs == (-0.5, -0.75, -1.0)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_query_offers_nothing_below_max_depth_and_nothing_for_no_budget(shape: Any) -> None:
    cache = two_layers()
    assert max(cache.query(9, shape).depths) == 2
    assert set(cache.query(9, shape, 1).depths) == {1}
    for budget, max_depth in ((9, 0), (9, -1), (0, None), (-3, None)):
        assert cache.query(budget, shape, max_depth) == NO_NODES


# ---- what a replica drops, and what it refuses ----------------------------------------------------------------------


def test_replica_drops_other_epochs_dead_parents_and_duplicates() -> None:
    cache = two_layers()
    before = state(cache)
    assert cache.extend(1, nodes((9, 0, 5, -1.0))) == 0
    assert cache.extend(0, nodes((9, 8, 5, -1.0))) == 0
    assert cache.extend(0, nodes((5, 0, 9, -1.0))) == 0  # id known
    assert cache.extend(0, nodes((9, 0, 10, -1.0))) == 0  # token known below that parent
    assert cache.extend(0, NewNodes.none()) == 0
    assert state(cache) == before
    cache.advance([10])
    assert cache.extend(0, nodes((6, 2, 1, -1.0), (7, 3, 1, -1.0), (8, 6, 1, -1.0))) == 1
    assert cache.alive_ids() == [3, 4, 7]


@pytest.mark.parametrize("message", GARBAGE.values(), ids=GARBAGE.keys())
@pytest.mark.parametrize("epoch", [0, 5])
def test_garbage_raises_and_changes_nothing(message: NewNodes, epoch: int) -> None:
    cache = two_layers()
    before = state(cache)
    with pytest.raises(ProtocolError):
        cache.extend(epoch, message)
    assert state(cache) == before
    assert grow(cache, {3: [(1, -1.0)]}).ids == (6,)


def test_dead_nodes_cannot_be_asked_about() -> None:
    cache = two_layers()
    cache.advance([10])
    for ask in (cache.token, cache.parent, cache.children, cache.depth_of, cache.path_logprob, cache.path_tokens):
        with pytest.raises(KeyError):
            ask(2)


def test_nodes_of_several_parts_are_joined_in_order() -> None:
    one, two = nodes((1, 0, 5, -1.0)), nodes((2, 1, 6, -2.0), (3, 1, 7, -3.0))
    none = NewNodes.none()
    assert NewNodes.joined([one, none, two]) == nodes((1, 0, 5, -1.0), (2, 1, 6, -2.0), (3, 1, 7, -3.0))
    assert NewNodes.joined([none, none]) == NewNodes.joined([]) == none
