"""The drafter's tree: its properties one by one, then against a slow model, then with a replica."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from card.errors import ProtocolError
from card.tree.candidates import CandidateCache
from card.tree.nodes import NewNodes
from tests.examples import settings
from tests.trees import GARBAGE, NO_FLOOR, Row, grow, ids_of, make_cache, nodes, state, two_layers

# ---- before a commit -------------------------------------------------------------------------------------------------


def test_walk_names_the_nodes_that_advance_moves_along_and_changes_nothing() -> None:
    cache = two_layers()
    before = state(cache)
    assert cache.walk([10, 12]) == (1, 4)
    assert cache.walk([10, 99, 12]) == (1,)
    assert cache.walk([99]) == ()
    assert state(cache) == before
    assert cache.advance([10, 12]) == 2
    assert cache.root_id == 4


@pytest.mark.parametrize(
    ("tokens", "num_rolled_back"),
    [
        ([], 0),
        ([10], 0),
        ([10, 11], 0),
        ([10, 11, 13], 0),
        ([10, 11, 13, 99], 0),  # the path was right as far as it went
        ([10, 11, 99], 1),
        ([10, 12], 2),  # a side branch lives on; what was thought likelier does not
        ([10, 99], 2),
        ([20], 3),
        ([99, 11], 3),
    ],
)
def test_rolled_back_is_what_the_likeliest_path_holds_below_the_place_where_the_text_left_it(
    tokens: list[int], num_rolled_back: int
) -> None:
    cache = two_layers()
    grow(cache, {3: [(13, -4.0), (14, -5.0)], 5: [(22, -0.1)]})  # the likeliest path is 10, 11, 13
    before = state(cache)
    assert cache.num_rolled_back(tokens) == num_rolled_back
    assert state(cache) == before


def test_nothing_is_rolled_back_twice_while_tokens_are_pending() -> None:
    cache = two_layers()
    assert cache.num_rolled_back([99]) == 2
    cache.advance([99])
    assert cache.num_rolled_back([10, 11]) == 0


# ---- growing --------------------------------------------------------------------------------------------------------


def test_fresh_root_is_the_first_to_expand() -> None:
    cache = make_cache()
    assert cache.frontier(4) == [0]
    grow(cache, {0: []})
    assert cache.frontier(4) == []


def test_frontier_lists_the_best_unexpanded_nodes_by_path_score() -> None:
    cache = make_cache()
    grow(cache, {0: [(1, -0.5), (2, -4.0)]})
    grow(cache, {1: [(3, -1.0), (4, -2.0)], 2: [(5, -0.5)]})
    assert cache.frontier(9) == [3, 4, 5]  # -1.5, -2.5, -4.5
    assert cache.frontier(1) == [3]
    assert cache.frontier(0) == []
    assert cache.frontier(9, num_layers=2) == []
    assert cache.frontier(9, num_layers=3) == [3, 4, 5]
    grow(cache, {3: [(6, -2.0)]})
    assert cache.frontier(9) == [4, 6, 5]


def test_grow_takes_the_best_children_over_all_parents() -> None:
    cache = make_cache()
    grow(cache, {0: [(1, -0.5), (2, -1.0)]})
    made = grow(cache, {1: [(3, -2.0), (4, -3.0)], 2: [(5, -0.5), (6, -1.75)]}, width=3)
    assert made == nodes((3, 2, 5, -0.5), (4, 1, 3, -2.0), (5, 2, 6, -1.75))  # -1.5, -2.5, -2.75; not -3.5


def test_grow_ranks_equal_scores_in_the_order_given() -> None:
    cache = make_cache()
    grow(cache, {0: [(1, -1.0), (2, -1.0)]})
    made = grow(cache, {2: [(3, -1.0), (4, -1.0)], 1: [(5, -1.0)]}, width=2)
    assert (made.parents, made.tokens) == ((2, 2), (3, 4))


def test_grow_skips_parents_that_died_or_were_expanded() -> None:
    cache = two_layers()
    cache.advance([10])
    assert len(grow(cache, {2: [(1, -0.1)], 5: [(1, -0.1)], 1: [(1, -0.1)], 77: [(1, -0.1)]})) == 0
    assert len(cache.refill(9, NO_FLOOR)) == 0
    assert grow(cache, {5: [(1, -0.1)], 4: [(2, -0.5)]}).parents == (4,)


def test_grow_never_makes_nodes_of_probability_zero() -> None:
    cache = make_cache()
    assert grow(cache, {0: [(1, -math.inf), (2, -1.0), (3, -math.inf)]}, floor=-math.inf).tokens == (2,)
    assert len(cache.refill(5, -math.inf)) == 0


def test_siblings_have_distinct_tokens() -> None:
    cache = make_cache()
    assert grow(cache, {0: [(1, -2.0), (1, -1.0), (2, -3.0)]}, width=2).logprobs == (-1.0, -3.0)
    cache.extend(0, nodes((9, 1, 7, -1.0)))
    assert grow(cache, {1: [(7, -0.5), (8, -0.6)]}).tokens == (8,)
    assert cache.children(1) == [10, 9]


def test_rounding_above_zero_is_cut_off() -> None:
    cache = make_cache()
    assert grow(cache, {0: [(1, 5e-7)]}).logprobs == (0.0,)
    cache.extend(0, nodes((2, 1, 1, 1e-6)))
    assert cache.path_logprob(2) == 0.0


@pytest.mark.parametrize(
    ("parents", "tokens", "logprobs"),
    [
        ([0], [[1], [2]], [[-1.0], [-1.0]]),
        ([0], [[1]], [[-1.0], [-1.0]]),
        ([0], [[1, 2]], [[-1.0]]),
        ([0], [[1, 2]], [[-1.0, 0.1]]),
        ([0], [[1, 2]], [[math.nan, 0.1]]),
        ([0], [[1, 2]], [[-1.0, math.nan]]),
    ],
)
def test_grow_refuses_rows_that_do_not_fit_and_changes_nothing(parents: Any, tokens: Any, logprobs: Any) -> None:
    cache = make_cache()
    before = state(cache)
    with pytest.raises(ProtocolError):
        cache.grow(parents, tokens, logprobs, width=9, min_path_logprob=NO_FLOOR)
    assert state(cache) == before


# ---- secondary tier -------------------------------------------------------------------------------------------------


def test_refill_ranks_by_path_score_and_not_by_local_probability_alone() -> None:
    cache = make_cache()
    grow(cache, {0: [(1, -0.25), (2, -4.0)]})
    grow(cache, {1: [(3, -1.0), (4, -2.0)], 2: [(5, -0.5), (6, -1.0)]}, width=1)
    # local: 5 (-0.5), 6 (-1), 4 (-2); with the path: 4 (-2.25), 5 (-4.5), 6 (-5)
    assert cache.refill(2, NO_FLOOR).tokens == (4, 5)
    assert cache.refill(9, NO_FLOOR).tokens == (6,)
    assert len(cache.refill(9, NO_FLOOR)) == 0  # each entry is used once


def test_refill_gives_the_top_children_when_pruning_has_emptied_the_frontier() -> None:
    cache = make_cache()
    grow(cache, {0: [(1, -0.5), (2, -1.0)]})
    grow(cache, {1: [(3, -0.1), (4, -0.2)], 2: [(5, -3.0), (7, -2.0), (6, -2.5)]}, width=2)  # all of them below node 1
    cache.advance([2])
    assert cache.frontier(2) == []
    assert cache.refill(2, NO_FLOOR) == nodes((5, 2, 7, -2.0), (6, 2, 6, -2.5))
    assert cache.frontier(2) == [5, 6]


def test_refill_below_one_node_takes_its_best_entries_and_those_of_no_other() -> None:
    cache = make_cache()
    grow(cache, {0: [(1, -0.25), (2, -4.0)]})
    grow(cache, {1: [(3, -1.0), (4, -2.0)], 2: [(5, -1.5), (6, -0.5), (7, -3.0)]}, width=0)
    assert cache.refill_below(2, 2, NO_FLOOR) == nodes((3, 2, 6, -0.5), (4, 2, 5, -1.5))
    assert cache.refill_below(2, 9, -6.9) == NewNodes.none(), "the path below it is less likely"
    assert cache.refill_below(2, 0, NO_FLOOR) == cache.refill_below(2, -1, NO_FLOOR) == NewNodes.none()
    assert cache.refill_below(2, 9, NO_FLOOR).tokens == (7,)
    assert cache.refill_below(3, 9, NO_FLOOR) == NewNodes.none(), "it was not expanded"
    assert cache.refill(9, NO_FLOOR).tokens == (3, 4)
    with pytest.raises(KeyError):
        cache.refill_below(77, 1, NO_FLOOR)


def test_the_likeliest_continuation_is_that_of_both_tiers() -> None:
    cache = make_cache()
    assert cache.likeliest(0) == -math.inf
    grow(cache, {0: [(1, -0.5), (2, -1.0)]}, width=0)
    assert cache.likeliest(0) == -0.5
    cache.extend(0, nodes((4, 0, 9, -0.75)))
    assert cache.likeliest(0) == -0.5
    cache.refill(1, NO_FLOOR)
    assert cache.likeliest(0) == -0.5
    assert cache.likeliest(4) == -math.inf


def test_the_best_path_follows_the_most_probable_child_from_any_node() -> None:
    cache = two_layers()
    assert cache.best_path(0, 9) == [1, 3]
    assert cache.best_path(0, 1) == [1]
    assert cache.best_path(2, 9) == [5]
    assert cache.best_path(5, 9) == cache.best_path(0, 0) == []


def test_refill_forgets_entries_of_dead_nodes() -> None:
    cache = make_cache()
    grow(cache, {0: [(1, -0.5), (2, -1.0), (9, -1.1)]}, width=2)
    grow(cache, {1: [(3, -0.1)], 2: [(5, -3.0)]}, width=0)
    cache.advance([2])
    assert cache.refill(9, NO_FLOOR).tokens == (5,)


def test_refill_finds_a_pending_token_in_the_secondary_tier() -> None:
    cache = make_cache()
    grow(cache, {0: [(1, -0.5), (2, -1.0), (3, -2.0), (4, -0.7)]}, width=1)
    cache.advance([3, 8])
    assert cache.refill(5, NO_FLOOR) == nodes((2, 0, 3, -2.0))
    assert (cache.root_id, cache.pending, cache.frontier(3)) == (2, (8,), [2])


def test_grow_settles_a_pending_token_and_makes_nothing_that_is_out_of_reach() -> None:
    cache = make_cache()
    cache.advance([3, 8])
    assert grow(cache, {0: [(1, -0.5), (3, -2.0), (3, -1.0)]}, width=2) == nodes((1, 0, 3, -1.0))
    assert (cache.root_id, cache.pending, cache.num_nodes) == (1, (8,), 0)
    assert grow(cache, {1: [(8, -3.0), (8, -4.0)]}, floor=-1.0) == NewNodes.none()
    assert cache.refill(9, NO_FLOOR).tokens == (8,)
    assert cache.pending == ()


def test_a_child_that_settles_a_pending_token_leaves_nothing_of_its_parent_to_refill_from() -> None:
    cache = make_cache()
    cache.advance([3])
    assert grow(cache, {0: [(3, -1.0), (5, -2.0)]}, width=1).tokens == (3,)
    assert cache.refill(9, NO_FLOOR) == NewNodes.none()


# ---- bounds ---------------------------------------------------------------------------------------------------------


def test_grow_and_refill_stop_at_max_nodes_and_keep_the_rest_for_later() -> None:
    cache = make_cache(max_nodes=3)
    assert len(grow(cache, {0: [(t, -float(t)) for t in range(1, 6)]})) == 3
    assert len(cache.refill(9, NO_FLOOR)) == 0
    assert len(grow(cache, {1: [(9, -0.1), (8, -0.2)]})) == 0
    cache.advance([1])
    assert cache.refill(9, NO_FLOOR).tokens == (9, 8)


def test_extend_stops_at_max_nodes() -> None:
    cache = make_cache(max_nodes=2)
    assert cache.extend(0, nodes((1, 0, 1, -1.0), (2, 0, 2, -1.0), (3, 0, 3, -1.0))) == 2
    assert cache.extend(0, nodes((4, 0, 4, -1.0))) == 0
    assert cache.alive_ids() == [1, 2]


def test_nothing_is_made_deeper_than_the_lead() -> None:
    cache = make_cache(lead=2)
    grow(cache, {0: [(1, -1.0), (5, -1.5)]}, width=1)
    grow(cache, {1: [(2, -1.0), (3, -2.0)]}, width=1)
    assert cache.frontier(9) == []
    assert len(grow(cache, {2: [(4, -0.5)]})) == 0  # expanded all the same: kept in the secondary tier
    assert cache.refill(9, NO_FLOOR).tokens == (5, 3)  # depths 1 and 2, and not 4 at depth 3
    cache.advance([1])
    assert cache.refill(9, NO_FLOOR).tokens == (4,)


def test_floor_holds_back_unlikely_nodes_until_the_root_has_come_closer() -> None:
    cache = make_cache()
    grow(cache, {0: [(1, -2.0)]})
    assert grow(cache, {1: [(2, -1.0), (3, -1.5), (4, -2.5)]}, floor=-3.0).tokens == (2,)
    assert len(cache.refill(9, -3.0)) == 0
    assert cache.advance([1]) == 1
    assert cache.refill(9, -2.0).tokens == (3,)


# ---- against a slow model -------------------------------------------------------------------------------------------


class ModelNode:
    def __init__(self, node_id: int, token: int, logprob: float) -> None:
        self.id, self.token, self.logprob = node_id, token, logprob
        self.is_expanded = False
        self.kids: list[ModelNode] = []
        self.spare: list[tuple[float, int]] = []  # best first


class ModelCache:
    """The cache as one would explain it: a nested tree, everything else worked out by walking all of it."""

    def __init__(self, max_nodes: int, lead: int) -> None:
        self.max_nodes, self.lead = max_nodes, lead
        self.restart(0, 0, [])

    def restart(self, epoch: int, root_id: int, pending: list[int]) -> None:
        self.epoch, self.pending, self.next_id = epoch, list(pending), root_id + 1
        self.root = ModelNode(root_id, -1, 0.0)

    def walk(self) -> list[tuple[ModelNode, list[ModelNode]]]:
        """Return each alive node with its path from below the root, the root first."""
        found: list[tuple[ModelNode, list[ModelNode]]] = [(self.root, [])]
        for node, path in found:
            found += [(kid, [*path, kid]) for kid in node.kids]
        return found

    def find(self, node_id: int) -> tuple[ModelNode, list[ModelNode]] | None:
        return next((entry for entry in self.walk() if entry[0].id == node_id), None)

    def ranked(self) -> list[tuple[ModelNode, list[ModelNode]]]:
        return sorted(self.walk()[1:], key=lambda entry: (-score(entry[1]), entry[0].id))

    def settle(self) -> int:
        """Move the root along pending tokens, forget children that cannot lead to the next one; return how many."""
        num_settled = 0
        while self.pending:
            kid = next((kid for kid in self.root.kids if kid.token == self.pending[0]), None)
            if kid is None:
                self.root.kids = []
                self.root.spare = [entry for entry in self.root.spare if entry[1] == self.pending[0]]
                break
            self.root = kid
            self.pending.pop(0)
            num_settled += 1
        return num_settled

    def add(self, node_id: int, parent_id: int, token: int, logprob: float) -> ModelNode | None:
        parent = self.find(parent_id)
        if parent is None or self.find(node_id) or token in [kid.token for kid in parent[0].kids]:
            return None
        if self.pending and (parent[0] is not self.root or token != self.pending[0]):
            return None
        node = ModelNode(node_id, token, logprob)
        parent[0].kids.append(node)
        self.settle()
        return node

    def advance(self, tokens: list[int]) -> int:
        behind = len(self.pending)
        self.pending += tokens
        matched = self.settle()
        assert not (behind and matched)
        return matched

    def is_full(self) -> bool:
        return len(self.walk()) - 1 >= self.max_nodes

    def extend(self, epoch: int, entries: list[tuple[int, int, int, float]]) -> int:
        kept = 0
        for entry in entries if epoch == self.epoch else []:
            kept += not self.is_full() and self.add(*entry) is not None
            self.next_id = max(self.next_id, entry[0] + 1)
        return kept

    def grow(self, rows: list[tuple[int, Row]], width: int, floor: float) -> list[tuple[int, int, int, float]]:
        options: list[tuple[float, int, float, int, int]] = []
        parents: dict[int, tuple[ModelNode, list[ModelNode]]] = {}
        for parent_id, row in rows:
            found = self.find(parent_id)
            if found and not found[0].is_expanded:
                found[0].is_expanded = True
                parents[parent_id] = found
                for token, logprob in row:
                    if logprob != -math.inf and (not self.pending or token == self.pending[0]):
                        options.append((-(score(found[1]) + logprob), len(options), logprob, token, parent_id))
        made: list[tuple[int, int, int, float]] = []
        for cost, _, logprob, token, parent_id in sorted(options):
            node, path = parents[parent_id]
            if len(made) == width or self.is_full() or -cost < floor or len(path) >= self.lead:
                node.spare.append((logprob, token))
            elif self.add(self.next_id, parent_id, token, logprob):
                made.append((self.next_id, parent_id, token, logprob))
                self.next_id += 1
        return made

    def refill(self, count: int, floor: float) -> list[tuple[int, int, int, float]]:
        made: list[tuple[int, int, int, float]] = []
        was_pending = bool(self.pending)
        while len(made) < count and not self.is_full() and not (was_pending and made):
            options = [
                (-(score(path) + logprob), node.id, i, logprob, token)
                for node, path in self.walk()
                if len(path) < self.lead
                for i, (logprob, token) in enumerate(node.spare)
                if score(path) + logprob >= floor
            ]
            if not options:
                break
            _, parent_id, i, logprob, token = min(options)
            parent = self.find(parent_id)
            assert parent is not None
            del parent[0].spare[i]
            if self.add(self.next_id, parent_id, token, logprob):
                made.append((self.next_id, parent_id, token, logprob))
                self.next_id += 1
        return made

    def refill_below(self, node_id: int, count: int, floor: float) -> list[tuple[int, int, int, float]]:
        made: list[tuple[int, int, int, float]] = []
        while len(made) < count and not self.is_full() and (found := self.find(node_id)):
            node, path = found
            entries = [(-logprob, i) for i, (logprob, _) in enumerate(node.spare) if score(path) + logprob >= floor]
            if not entries or len(path) >= self.lead:
                break
            logprob, token = node.spare.pop(min(entries)[1])
            if self.add(self.next_id, node_id, token, logprob):
                made.append((self.next_id, node_id, token, logprob))
                self.next_id += 1
        return made

    def state(self) -> dict[str, Any]:
        """Return the same as `state` above, and the queries as lists of (id, parent id, token, score, depth)."""
        everything = sorted(self.walk(), key=lambda entry: entry[0].id)
        everything.remove((self.root, []))
        everything.insert(0, (self.root, []))
        above = {kid.id: node.id for node, _ in everything for kid in node.kids}
        below = everything[1:]
        return {
            "epoch": self.epoch,
            "root_id": self.root.id,
            "pending": tuple(self.pending),
            "depth": max(len(path) for _, path in everything),
            "num_nodes": len(below),
            "snapshot": nodes(*((node.id, above[node.id], node.token, node.logprob) for node, _ in below)),
            "parents": [above.get(node.id, node.id) for node, _ in everything],
            "children": [
                [kid.id for kid in sorted(node.kids, key=lambda kid: (-kid.logprob, kid.id))] for node, _ in everything
            ],
            "depths": [len(path) for _, path in everything],
            "scores": [score(path) for _, path in everything],
            "texts": [[node.token for node in path] for _, path in everything],
            "frontier": self.frontier(10**6),
        }

    def frontier(self, width: int) -> list[int]:
        root = [] if self.root.is_expanded else [self.root.id]
        return (root + [n.id for n, path in self.ranked() if not n.is_expanded and len(path) < self.lead])[:width]

    def query(self, budget: int, shape: str, max_depth: int) -> list[tuple[int, int, int, float, int]]:
        if shape == "chain":
            path: list[ModelNode] = []
            node = self.root
            while node.kids:
                node = min(node.kids, key=lambda kid: (-kid.logprob, kid.id))
                path.append(node)
            found = [(node, path[: i + 1]) for i, node in enumerate(path)]
        else:
            found = self.ranked()
        found = [(node, path) for node, path in found if len(path) <= max_depth][:budget]
        return [(node.id, [self.root, *path][-2].id, node.token, score(path), len(path)) for node, path in found]


def score(path: list[ModelNode]) -> float:
    return sum((node.logprob for node in path), 0.0)


tokens_st = st.integers(0, 4)
seeds_st = st.integers(0, 2**31)
floors_st = st.sampled_from([NO_FLOOR, NO_FLOOR, -2.0, -1.0])


def random_logprob(rng: random.Random) -> float:
    return -rng.randint(0, 8) / 8  # sums are exact, ties are common


def random_row(rng: random.Random) -> Row:
    """Return children with now and then a repeated token or one of probability zero."""
    tokens = rng.sample(range(5), rng.randint(1, 5)) + rng.choices(range(5), k=rng.choice([0, 0, 0, 1]))
    return [(token, -math.inf if rng.random() < 0.05 else random_logprob(rng)) for token in tokens]


class CacheAgainstModel(RuleBasedStateMachine):
    @initialize(max_nodes=st.integers(1, 40), lead=st.integers(1, 5), seed=seeds_st)
    def begin(self, max_nodes: int, lead: int, seed: int) -> None:
        self.cache = make_cache(max_nodes=max_nodes, lead=lead)
        self.model = ModelCache(max_nodes, lead)
        for i in range(3):
            self.grow_the_frontier(3, seed + i, 4, NO_FLOOR)

    @rule(epoch=st.integers(0, 2), root_id=st.integers(0, 9), pending=st.lists(tokens_st, max_size=2))
    def restart(self, epoch: int, root_id: int, pending: list[int]) -> None:
        self.cache.restart(epoch, root_id, pending)
        self.model.restart(epoch, root_id, pending)

    @rule(width=st.integers(1, 4), seed=seeds_st, top=st.integers(0, 6), floor=floors_st)
    def grow_the_frontier(self, width: int, seed: int, top: int, floor: float) -> None:
        rng = random.Random(seed)
        self._grow([(parent, random_row(rng)) for parent in self.model.frontier(width)], top, floor)

    @rule(seed=seeds_st, count=st.integers(1, 4), width=st.integers(0, 4), floor=floors_st)
    def grow_any_nodes(self, seed: int, count: int, width: int, floor: float) -> None:
        rng = random.Random(seed)
        self._grow([(rng.randint(0, self.model.next_id), random_row(rng)) for _ in range(count)], width, floor)

    def _grow(self, rows: list[tuple[int, Row]], width: int, floor: float) -> None:
        made = self.cache.grow(
            [parent for parent, _ in rows],
            [[token for token, _ in row] for _, row in rows],
            [[logprob for _, logprob in row] for _, row in rows],
            width=width,
            min_path_logprob=floor,
        )
        assert made == nodes(*self.model.grow(rows, width, floor))

    @rule(count=st.integers(0, 5), floor=floors_st)
    def refill(self, count: int, floor: float) -> None:
        assert self.cache.refill(count, floor) == nodes(*self.model.refill(count, floor))

    @rule(seed=seeds_st, count=st.integers(0, 3), floor=floors_st)
    def refill_below_a_node(self, seed: int, count: int, floor: float) -> None:
        node_id = random.Random(seed).choice([node.id for node, _ in self.model.walk()])
        assert self.cache.refill_below(node_id, count, floor) == nodes(*self.model.refill_below(node_id, count, floor))

    @precondition(lambda self: self.model.root.kids)
    @rule(seed=seeds_st, more=st.lists(tokens_st, max_size=1))
    def advance_along_a_path(self, seed: int, more: list[int]) -> None:
        _, path = random.Random(seed).choice(self.model.walk()[1:])
        self._advance([node.token for node in path] + more)

    @rule(tokens=st.lists(tokens_st, min_size=1, max_size=3))
    def advance_along_any_tokens(self, tokens: list[int]) -> None:
        self._advance(tokens)

    def _advance(self, tokens: list[int]) -> None:
        walked = self.cache.walk(tokens)
        matched = self.model.advance(list(tokens))
        assert self.cache.advance(tokens) == matched == len(walked)
        assert not walked or walked[-1] == self.cache.root_id

    @precondition(lambda self: self.model.pending)
    @rule(seed=seeds_st)
    def start_again_after_a_miss(self, seed: int) -> None:
        self.restart(self.model.epoch + 1, 0, [])
        for i in range(3):
            self.grow_the_frontier(3, seed + i, 4, NO_FLOOR)

    @rule(seed=seeds_st, length=st.integers(1, 8), epoch_ahead=st.sampled_from([0, 0, 0, 1]))
    def extend(self, seed: int, length: int, epoch_ahead: int) -> None:
        rng = random.Random(seed)
        entries: list[tuple[int, int, int, float]] = []
        node_id = rng.randint(max(0, self.model.next_id - 6), self.model.next_id)
        known = [node.id for node, _ in self.model.walk()]
        for _ in range(length):
            node_id += rng.randint(1, 2)
            parent = rng.choice([i for i in known if i < node_id] or [0])
            token = self.model.pending[0] if self.model.pending and rng.random() < 0.3 else rng.randint(0, 4)
            entries.append((node_id, parent, token, random_logprob(rng)))
            known += [node_id] * 2
        epoch = self.model.epoch + epoch_ahead
        assert self.cache.extend(epoch, nodes(*entries)) == self.model.extend(epoch, entries)

    @rule(message=st.sampled_from(list(GARBAGE.values())))
    def extend_with_garbage(self, message: NewNodes) -> None:
        with pytest.raises(ProtocolError):
            self.cache.extend(self.cache.epoch, message)

    @rule(budget=st.integers(0, 40), shape=st.sampled_from(["chain", "tree"]), max_depth=st.integers(0, 6))
    def query(self, budget: int, shape: Any, max_depth: int) -> None:
        answer = self.cache.query(budget, shape, max_depth)
        ids = ids_of(self.cache, answer)
        parent_ids = [ids[i] if i >= 0 else self.cache.root_id for i in answer.parents]
        found = list(zip(ids, parent_ids, answer.tokens, answer.path_logprobs, answer.depths, strict=True))
        assert found == self.model.query(budget, shape, max_depth)
        assert all(parent < i for i, parent in enumerate(answer.parents))

    @invariant()
    def all_that_can_be_seen_is_equal(self) -> None:
        if not hasattr(self, "cache"):
            return
        seen = state(self.cache)
        del seen["chain"], seen["tree"]
        assert seen == self.model.state()
        for node, _ in self.model.walk():
            assert self.cache.is_expanded(node.id) == node.is_expanded
            if not self.model.pending:  # what a pending token rules out need not be forgotten at once
                known = [logprob for logprob, _ in node.spare] + [kid.logprob for kid in node.kids]
                assert self.cache.likeliest(node.id) == max(known, default=-math.inf)
        assert self.cache.num_nodes <= self.cache.max_nodes


TestCacheAgainstModel = CacheAgainstModel.TestCase
TestCacheAgainstModel.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


# ---- drafter and replica together -----------------------------------------------------------------------------------


class Pair:
    """A drafter's cache and a target's replica with both mailboxes between them; the committed text is random."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.drafter, self.replica = make_cache(max_nodes=60, lead=4), CandidateCache(max_nodes=60)
        self.text: list[int] = []
        self.num_known = 0  # tokens of the text that the drafter has heard of
        self.layers: list[
            tuple[int, NewNodes, int | None, int]
        ] = []  # epoch, nodes, root id if it is a reset, position
        self.delivered: list[tuple[int, NewNodes]] = []
        self.corrections: list[list[int]] = []
        self.num_lost = 0

    def send(self, made: NewNodes, *, is_reset: bool = False) -> None:
        root_id = self.drafter.root_id if is_reset else None
        self.layers.append((self.drafter.epoch, made, root_id, self.num_known))

    def draft(self) -> None:
        frontier = self.drafter.frontier(3)
        tokens = [self.rng.sample(range(5), 4) for _ in frontier]
        logprobs = [[-self.rng.expovariate(1.0) for _ in range(4)] for _ in frontier]
        self.send(self.drafter.grow(frontier, tokens, logprobs, width=3, min_path_logprob=-9.0))

    def verify(self) -> None:
        offer = self.replica.query(6, self.rng.choice(["chain", "tree"]))
        path = self.replica.path_tokens(self.rng.choice(ids_of(self.replica, offer))) if offer else []
        if not path or self.rng.random() < 0.4:
            path.append(self.rng.randrange(5))
        self.replica.advance(path)
        self.text += path
        self.corrections.append(path)

    def hear(self) -> None:
        if not self.corrections:
            return
        tokens = self.corrections.pop(0)
        self.drafter.advance(tokens)
        self.num_known += len(tokens)
        self.send(self.drafter.refill(3, -9.0))
        if self.drafter.pending:
            self.drafter.restart(self.drafter.epoch + 1, self.rng.randrange(3))
            self.send(NewNodes.none(), is_reset=True)

    def deliver(self) -> None:
        if self.layers:
            epoch, made, root_id, position = self.layers.pop(0)
            if root_id is not None:
                self.replica.restart(epoch, root_id, self.text[position:])
            self.replica.extend(epoch, made)
            self.delivered.append((epoch, made))

    def deliver_again(self) -> None:
        if self.delivered:
            self.replica.extend(*self.rng.choice(self.delivered))

    def lose(self) -> None:
        if self.layers:
            self.layers.pop(0)
            self.num_lost += 1

    def finish(self) -> None:
        while self.corrections:
            self.hear()
        while self.layers:
            self.deliver()
        if self.num_lost:
            self.send(self.drafter.snapshot(), is_reset=True)
            self.deliver()

    def run(self, steps: dict[str, int]) -> None:
        """Do 60 random steps, then let all messages arrive."""
        for step in self.rng.choices(list(steps), list(steps.values()), k=60):
            getattr(self, step)()
        self.finish()

    def assert_equal(self) -> None:
        assert self.replica.pending == ()
        truth, seen = state(self.drafter), state(self.replica)
        del truth["frontier"], seen["frontier"]  # of the drafter alone
        assert seen == truth


STEPS = {"draft": 4, "verify": 2, "hear": 2, "deliver": 5, "deliver_again": 1}


@settings(max_examples=30, deadline=None)
@given(seed=seeds_st)
def test_replica_equals_the_drafter_once_all_messages_have_come(seed: int) -> None:
    pair = Pair(seed)
    pair.run(STEPS)
    pair.assert_equal()


@settings(max_examples=30, deadline=None)
@given(seed=seeds_st)
def test_replica_that_lost_messages_equals_the_drafter_after_a_snapshot(seed: int) -> None:
    pair = Pair(seed)
    pair.run(STEPS | {"lose": 1})
    pair.assert_equal()


def test_snapshot_taken_behind_the_target_is_settled_by_its_committed_tokens() -> None:
    drafter, replica = two_layers(), CandidateCache(max_nodes=1000)
    replica.restart(drafter.epoch, drafter.root_id, [10])
    assert replica.extend(drafter.epoch, drafter.snapshot()) == 3
    drafter.advance([10])
    assert replica.query(9, "tree") == drafter.query(9, "tree")
    assert replica.root_id == drafter.root_id
