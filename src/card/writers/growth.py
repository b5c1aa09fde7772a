"""The rules by which a candidate tree grows: what a drafter pass expands, and which children become nodes.

A rule has no state of its own. What it wants next follows from the tree, whose secondary tier remembers every child
that the draft model has named, so that a rule takes up its work again behind any correction.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import ClassVar, Protocol

from card.candidates import CandidateCache
from card.messages import DraftSpec
from card.nodes import NewNodes

Demands = Generator[tuple[int, int], None, None]  # (node, children that it should have)


class GrowthRule(Protocol):
    """One way to grow a tree. Nodes at depth ``num_layers`` below the root or deeper are not to be expanded."""

    is_run_whole: ClassVar[bool]
    """A frontier that finds no room is not run in part."""

    def frontier(self, tree: CandidateCache, spec: DraftSpec, num_layers: int) -> list[int]:
        """Return the nodes to expand next, best path score first; empty if there is nothing worth doing."""

    def grow(
        self,
        tree: CandidateCache,
        spec: DraftSpec,
        num_layers: int,
        parents: Sequence[int],
        tokens: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
    ) -> NewNodes:
        """Make nodes of what a pass found; arguments as of `CandidateCache.grow`, which says what it raises."""

    def widen(self, tree: CandidateCache, spec: DraftSpec, num_layers: int) -> NewNodes:
        """Make the nodes that a tree with a new root lacks, from the secondary tier."""


class LayerRule:
    """Each pass expands the best nodes and makes the best children over all of them: one layer of equal width.

    Source: CARD, arXiv:2508.04462.
    """

    is_run_whole: ClassVar[bool] = True

    def frontier(self, tree: CandidateCache, spec: DraftSpec, num_layers: int) -> list[int]:
        """Return the ``beam_width`` best nodes."""
        return [node for node in tree.frontier(spec.beam_width) if tree.depth_of(node) < num_layers]

    def grow(
        self,
        tree: CandidateCache,
        spec: DraftSpec,
        num_layers: int,
        parents: Sequence[int],
        tokens: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
    ) -> NewNodes:
        """Make the ``beam_width`` best children."""
        floor = spec.min_path_logprob
        return tree.grow(parents, tokens, logprobs, width=spec.beam_width, min_path_logprob=floor)

    def widen(self, tree: CandidateCache, spec: DraftSpec, num_layers: int) -> NewNodes:
        """Make up for nodes that a full beam lacks."""
        missing = spec.beam_width - len(tree.frontier(spec.beam_width))
        return tree.refill(missing, spec.min_path_logprob) if missing > 0 else NewNodes.none()


class BestFirstRule:
    """Each pass expands the best nodes and makes all their children: unlikely branches stay shallow, likely ones not.

    Nothing grows as long as the tree is full.

    Source: SwiftSpec, arXiv:2506.11309.
    """

    is_run_whole: ClassVar[bool] = False

    def frontier(self, tree: CandidateCache, spec: DraftSpec, num_layers: int) -> list[int]:
        """Return the ``beam_width`` best nodes that may be expanded."""
        is_full = tree.num_nodes >= tree.max_nodes
        return [] if is_full else tree.frontier(spec.beam_width, num_layers=num_layers)

    def grow(
        self,
        tree: CandidateCache,
        spec: DraftSpec,
        num_layers: int,
        parents: Sequence[int],
        tokens: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
    ) -> NewNodes:
        """Make all children."""
        floor = spec.min_path_logprob
        return tree.grow(parents, tokens, logprobs, width=tree.max_nodes, min_path_logprob=floor)

    def widen(self, tree: CandidateCache, spec: DraftSpec, num_layers: int) -> NewNodes:
        """Make the children that were too unlikely from the old root, or found no room."""
        return tree.refill(tree.max_nodes, spec.min_path_logprob)


class _PathRule:
    """A rule that draws paths of likeliest tokens and says how many children each node on them should have.

    `_demands` walks along while the demands are met, so that a path goes on over a node made just now.
    """

    is_run_whole: ClassVar[bool] = False

    def frontier(self, tree: CandidateCache, spec: DraftSpec, num_layers: int) -> list[int]:
        """Return the ends of all paths."""
        demands = self._demands(tree, spec, num_layers)
        ends = [node for node, count in demands if count > 0 and not tree.is_expanded(node)]
        return sorted(ends, key=lambda node: (-tree.path_logprob(node), node))

    def grow(
        self,
        tree: CandidateCache,
        spec: DraftSpec,
        num_layers: int,
        parents: Sequence[int],
        tokens: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
    ) -> NewNodes:
        """Put all children into the secondary tier, then make those that are wanted now."""
        tree.grow(parents, tokens, logprobs, width=0, min_path_logprob=spec.min_path_logprob)
        return self.widen(tree, spec, num_layers)

    def widen(self, tree: CandidateCache, spec: DraftSpec, num_layers: int) -> NewNodes:
        """Make all children that are wanted and known."""
        made = [
            tree.refill_below(node, count - len(tree.children(node)), spec.min_path_logprob)
            for node, count in self._demands(tree, spec, num_layers)
            if tree.is_expanded(node)
        ]
        return NewNodes.joined(made)

    def _demands(self, tree: CandidateCache, spec: DraftSpec, num_layers: int) -> Demands:
        """Yield each node that should have children, from the root down."""
        raise NotImplementedError


class BranchRule(_PathRule):
    """A trunk of likeliest tokens up to the first unsure one; there several branches, each of likeliest tokens.

    Unsure is a token less likely than ``branch_below``. The less likely it is the more branches there are, up to
    ``beam_width`` and to the ``branch`` children that are known. Each gets ``num_speculative_tokens`` tokens beyond its
    first.

    Source: SpecBranch, arXiv:2506.01979.
    """

    def _demands(self, tree: CandidateCache, spec: DraftSpec, num_layers: int) -> Demands:
        node: int | None = tree.root_id
        while node is not None and tree.depth_of(node) < num_layers:
            prob = math.exp(tree.likeliest(node))
            is_sure = spec.branch_below < 1.0 and prob >= spec.branch_below
            count = 1 if is_sure else num_branches(prob, spec.beam_width)
            yield node, count
            if not tree.is_expanded(node):
                return
            heads = tree.children(node)[:count]
            if not is_sure:
                for head in heads:
                    yield from _path(tree, head, spec.num_speculative_tokens, num_layers)
                return
            node = heads[0] if heads else None


class FanOutRule(_PathRule):
    """First a chain of ``num_speculative_tokens`` likeliest tokens, then branches of equal length off all of it.

    So there is an answer to each outcome of a verification: so many tokens accepted, then this one. At the i-th
    position there are ``fan_out[i]`` branches beside the chain, as far as ``branch`` children are known. What was hit
    becomes the next chain.

    Source: SSD (Saguaro), arXiv:2603.03251; that the branch hit is kept and not drafted anew is our change.
    """

    def _demands(self, tree: CandidateCache, spec: DraftSpec, num_layers: int) -> Demands:
        length, root = spec.num_speculative_tokens, tree.root_id
        yield from _path(tree, root, length, num_layers)
        chain = [root, *tree.best_path(root, length)]
        is_open = len(chain) <= length and tree.depth_of(chain[-1]) < num_layers
        if is_open and not tree.is_expanded(chain[-1]):
            return
        for idx, node in enumerate(chain):
            if tree.depth_of(node) >= num_layers:
                return
            own = chain[idx + 1 : idx + 2]
            yield node, len(own) + spec.fan_out[min(idx, len(spec.fan_out) - 1)]
            for head in tree.children(node):
                if head not in own:
                    yield from _path(tree, head, length, num_layers)


def num_branches(prob: float, most: int) -> int:
    """Return how many alternatives to a token of this probability are prepared, itself counted: 1 to ``most``.

    Source: SpecBranch, arXiv:2506.01979.
    """
    return max(1, math.floor(most * (1.0 - prob)))


def _path(tree: CandidateCache, head: int, length: int, num_layers: int) -> Demands:
    """Demand a child at the end of the path of likeliest tokens below ``head``, unless it has ``length`` already."""
    path = [head, *tree.best_path(head, length)]
    if len(path) <= length and tree.depth_of(path[-1]) < num_layers:
        yield path[-1], 1


RULES: Mapping[str, GrowthRule] = {
    "layer": LayerRule(),
    "best-first": BestFirstRule(),
    "branch": BranchRule(),
    "fan-out": FanOutRule(),
}
