"""The rules by which a candidate tree grows: which nodes a drafter pass expands, and which children become nodes.

A rule has no state of its own. Its next step follows from the tree, whose secondary tier keeps every child that the
draft model has named. So a rule can continue after any correction.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from card.config import TreeShape
from card.drafting.draft_tree import DraftTree
from card.tree.nodes import NewNodes

Demands = Generator[tuple[int, int], None, None]  # (node, children that it should have)


@dataclass(frozen=True, slots=True)
class GrowingTree:
    """A tree, its target shape, and how deep it may become now."""

    cache: DraftTree
    shape: TreeShape
    num_layers: int  # nodes at this depth below the root, or deeper, are not expanded


@dataclass(frozen=True, slots=True)
class Found:
    """Results of a pass over F nodes, b children of each; in the form that `DraftTree.grow` expects."""

    parents: Sequence[int]  # [F]
    tokens: Sequence[Sequence[int]]  # [F][b]
    logprobs: Sequence[Sequence[float]]  # [F][b]


class GrowthRule:
    """One way to grow a tree."""

    is_run_whole: ClassVar[bool] = False
    """True if a frontier must be run as a whole or not at all."""

    def frontier(self, tree: GrowingTree) -> list[int]:
        """Return the nodes to expand next, best path score first; empty if none is worth it."""
        raise NotImplementedError

    def grow(self, tree: GrowingTree, found: Found) -> NewNodes:
        """Make nodes of the results of a pass. Raises: ProtocolError if they are malformed, see `DraftTree.grow`."""
        raise NotImplementedError

    def widen(self, tree: GrowingTree) -> NewNodes:
        """After the root has moved, make the missing nodes from the secondary tier."""
        raise NotImplementedError


class LayerRule(GrowthRule):
    """Each pass expands the best nodes and makes the best children over all of them: one layer of equal width.

    Source: CARD, arXiv:2508.04462.
    """

    is_run_whole = True

    def frontier(self, tree: GrowingTree) -> list[int]:
        """Return the ``beam_width`` best nodes."""
        best = tree.cache.frontier(tree.shape.beam_width)
        return [node for node in best if tree.cache.depth_of(node) < tree.num_layers]

    def grow(self, tree: GrowingTree, found: Found) -> NewNodes:
        """Make the ``beam_width`` best children."""
        return _grow(tree, found, width=tree.shape.beam_width)

    def widen(self, tree: GrowingTree) -> NewNodes:
        """Fill a beam that is not full."""
        missing = tree.shape.beam_width - len(tree.cache.frontier(tree.shape.beam_width))
        return tree.cache.refill(missing, tree.shape.min_path_logprob) if missing > 0 else NewNodes.none()


class BestFirstRule(GrowthRule):
    """Each pass expands the best nodes and makes all their children: likely branches grow deeper than unlikely ones.

    The tree does not grow while it is full.

    Source: SwiftSpec, arXiv:2506.11309.
    """

    def frontier(self, tree: GrowingTree) -> list[int]:
        """Return the ``beam_width`` best nodes that may be expanded."""
        is_full = tree.cache.num_nodes >= tree.cache.max_nodes
        return [] if is_full else tree.cache.frontier(tree.shape.beam_width, num_layers=tree.num_layers)

    def grow(self, tree: GrowingTree, found: Found) -> NewNodes:
        """Make all children."""
        return _grow(tree, found, width=tree.cache.max_nodes)

    def widen(self, tree: GrowingTree) -> NewNodes:
        """Make the children that were too unlikely below the old root, or found no room."""
        return tree.cache.refill(tree.cache.max_nodes, tree.shape.min_path_logprob)


class _PathRule(GrowthRule):
    """A rule that follows the likeliest tokens and says how many children each node on these paths should have.

    `_demands` continues while its demands are met, so that a path goes on over a node made just now.
    """

    def frontier(self, tree: GrowingTree) -> list[int]:
        """Return the ends of all paths."""
        cache = tree.cache
        ends = [node for node, count in self._demands(tree) if count > 0 and not cache.is_expanded(node)]
        return sorted(ends, key=lambda node: (-cache.path_logprob(node), node))

    def grow(self, tree: GrowingTree, found: Found) -> NewNodes:
        """Put all children into the secondary tier, then make the ones that are due now."""
        _grow(tree, found, width=0)
        return self.widen(tree)

    def widen(self, tree: GrowingTree) -> NewNodes:
        """Make all children that are due and known."""
        cache, floor = tree.cache, tree.shape.min_path_logprob
        made = [
            cache.refill_below(node, count - len(cache.children(node)), floor)
            for node, count in self._demands(tree)
            if cache.is_expanded(node)
        ]
        return NewNodes.joined(made)

    def _demands(self, tree: GrowingTree) -> Demands:
        """Yield each node that should have children, from the root down."""
        raise NotImplementedError


class BranchRule(_PathRule):
    """A trunk of likeliest tokens up to the first uncertain one; there several branches, each of likeliest tokens.

    A token less likely than ``branch_below`` is uncertain. The less likely it is, the more branches there are, up to
    ``beam_width`` and to the ``branch`` known children. Each branch gets ``num_speculative_tokens`` tokens beyond its
    first.

    Source: SpecBranch, arXiv:2506.01979.
    """

    def _demands(self, tree: GrowingTree) -> Demands:
        cache, shape = tree.cache, tree.shape
        node: int | None = cache.root_id
        while node is not None and cache.depth_of(node) < tree.num_layers:
            prob = math.exp(cache.likeliest(node))
            is_sure = shape.branch_below < 1.0 and prob >= shape.branch_below
            count = 1 if is_sure else num_branches(prob, shape.beam_width)
            yield node, count
            if not cache.is_expanded(node):
                return
            heads = cache.children(node)[:count]
            if not is_sure:
                for head in heads:
                    yield from _path(tree, head)
                return
            node = heads[0] if heads else None


class FanOutRule(_PathRule):
    """First a chain of ``num_speculative_tokens`` likeliest tokens, then branches of equal length at each position.

    So each outcome of a verification (how many tokens are accepted, and which one follows) has a branch. Position i has
    ``fan_out[i]`` branches beside the chain, as far as ``branch`` children are known. The branch that was hit becomes
    the next chain.

    Source: SSD (Saguaro), arXiv:2603.03251; reusing the hit branch instead of drafting it anew is our change.
    """

    def _demands(self, tree: GrowingTree) -> Demands:
        cache, fan_out, length = tree.cache, tree.shape.fan_out, tree.shape.num_speculative_tokens
        yield from _path(tree, cache.root_id)
        chain = [cache.root_id, *cache.best_path(cache.root_id, length)]
        is_open = len(chain) <= length and cache.depth_of(chain[-1]) < tree.num_layers
        if is_open and not cache.is_expanded(chain[-1]):
            return
        for idx, node in enumerate(chain):
            if cache.depth_of(node) >= tree.num_layers:
                return
            continuation = chain[idx + 1 : idx + 2]
            yield node, len(continuation) + fan_out[min(idx, len(fan_out) - 1)]
            for head in cache.children(node):
                if head not in continuation:
                    yield from _path(tree, head)


def num_branches(prob: float, most: int) -> int:
    """Return how many alternatives to an uncertain token of this probability to draft, itself counted: 1 to ``most``.

    Source: SpecBranch, arXiv:2506.01979. An uncertain token always gets an alternative, except at probability 1: this
    is our change, since a branch point with one branch would end the trunk for nothing.
    """
    least = 2 if prob < 1.0 else 1
    return min(most, max(least, math.floor(most * (1.0 - prob))))


def _grow(tree: GrowingTree, found: Found, *, width: int) -> NewNodes:
    floor = tree.shape.min_path_logprob
    return tree.cache.grow(found.parents, found.tokens, found.logprobs, width=width, min_path_logprob=floor)


def _path(tree: GrowingTree, head: int) -> Demands:
    """Demand a child at the end of the path of likeliest tokens below ``head``, unless it is long enough already."""
    cache, length = tree.cache, tree.shape.num_speculative_tokens
    path = [head, *cache.best_path(head, length)]
    if len(path) <= length and cache.depth_of(path[-1]) < tree.num_layers:
        yield path[-1], 1


RULES: Mapping[str, GrowthRule] = {
    "layer": LayerRule(),
    "best-first": BestFirstRule(),
    "branch": BranchRule(),
    "fan-out": FanOutRule(),
    "phrases": LayerRule(),  # `phrase_drafting` makes several such layers in a pass
}
