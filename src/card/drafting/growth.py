"""The rules by which a candidate tree grows: what a drafter pass expands, and which children become nodes.

A rule has no state of its own. What it wants next follows from the tree, whose secondary tier remembers every child
that the draft model has named, so that a rule takes up its work again behind any correction.
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
    """A tree, the shape that it is to get, and how deep it may become now."""

    cache: DraftTree
    shape: TreeShape
    num_layers: int  # nodes so deep below the root, or deeper, are not to be expanded


@dataclass(frozen=True, slots=True)
class Found:
    """Findings of a pass over F nodes, b children of each; as `DraftTree.grow` takes them."""

    parents: Sequence[int]  # [F]
    tokens: Sequence[Sequence[int]]  # [F][b]
    logprobs: Sequence[Sequence[float]]  # [F][b]


class GrowthRule:
    """One way to grow a tree."""

    is_run_whole: ClassVar[bool] = False
    """A frontier that finds no room is not run in part."""

    def frontier(self, tree: GrowingTree) -> list[int]:
        """Return the nodes to expand next, best path score first; empty if there is nothing worth doing."""
        raise NotImplementedError

    def grow(self, tree: GrowingTree, found: Found) -> NewNodes:
        """Make nodes of what a pass found. Raises: ProtocolError if that is malformed, see `DraftTree.grow`."""
        raise NotImplementedError

    def widen(self, tree: GrowingTree) -> NewNodes:
        """Make the nodes that a tree with a new root lacks, from the secondary tier."""
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
        """Make up for nodes that a full beam lacks."""
        missing = tree.shape.beam_width - len(tree.cache.frontier(tree.shape.beam_width))
        return tree.cache.refill(missing, tree.shape.min_path_logprob) if missing > 0 else NewNodes.none()


class BestFirstRule(GrowthRule):
    """Each pass expands the best nodes and makes all their children: likely branches grow deeper than unlikely ones.

    Nothing grows as long as the tree is full.

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
        """Make the children that were too unlikely from the old root, or found no room."""
        return tree.cache.refill(tree.cache.max_nodes, tree.shape.min_path_logprob)


class _PathRule(GrowthRule):
    """A rule that draws paths of likeliest tokens and says how many children each node on them should have.

    `_demands` walks along while the demands are met, so that a path goes on over a node made just now.
    """

    def frontier(self, tree: GrowingTree) -> list[int]:
        """Return the ends of all paths."""
        cache = tree.cache
        ends = [node for node, count in self._demands(tree) if count > 0 and not cache.is_expanded(node)]
        return sorted(ends, key=lambda node: (-cache.path_logprob(node), node))

    def grow(self, tree: GrowingTree, found: Found) -> NewNodes:
        """Put all children into the secondary tier, then make those that are wanted now."""
        _grow(tree, found, width=0)
        return self.widen(tree)

    def widen(self, tree: GrowingTree) -> NewNodes:
        """Make all children that are wanted and known."""
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
    """A trunk of likeliest tokens up to the first unsure one; there several branches, each of likeliest tokens.

    Unsure is a token less likely than ``branch_below``. The less likely it is the more branches there are, up to
    ``beam_width`` and to the ``branch`` children that are known. Each gets ``num_speculative_tokens`` tokens beyond its
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
    """First a chain of ``num_speculative_tokens`` likeliest tokens, then branches of equal length off all of it.

    So each outcome of a verification has a branch: so many tokens accepted, then this one. At the i-th
    position there are ``fan_out[i]`` branches beside the chain, as far as ``branch`` children are known. What was hit
    becomes the next chain.

    Source: SSD (Saguaro), arXiv:2603.03251; that the branch hit is kept and not drafted anew is our change.
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
            own = chain[idx + 1 : idx + 2]
            yield node, len(own) + fan_out[min(idx, len(fan_out) - 1)]
            for head in cache.children(node):
                if head not in own:
                    yield from _path(tree, head)


def num_branches(prob: float, most: int) -> int:
    """Return how many alternatives to an unsure token of this probability are prepared, itself counted: 1 to ``most``.

    Source: SpecBranch, arXiv:2506.01979; that an unsure token has another one beside it, unless it is certain, is our
    change: a branch point of one branch ends the trunk for nothing.
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
