"""Token recycling: tokens that the target ranked high after a token are proposed when that token comes again."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise

from card.drafting.local.protocol import LocalWriter, Observation, WriterSequence
from card.family.copying.guesses import RankRates
from card.tree.nodes import PATH_END, ROOT, Nodes

_NUM_SUCCESSORS = 8  # kept for each token
_PRIOR = (0.45, 0.12, 0.07, 0.05, 0.04, 0.03, 0.02, 0.02)  # of each rank, before any counts
_PATH_PRIOR = 0.4  # chance that the whole best path of other writers is right
_PRIOR_WEIGHT = 8.0

_Waiting = tuple[float, int, int, float, Sequence[int]]
"""The best pending candidate below one node: its cost, that node, its rank, the node's cost and successors."""


class RecyclingSequence(WriterSequence):
    """The likeliest successors of each token of one request, from the last pass with that token."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._last = prompt_ids[-1]
        self.successors: dict[int, Sequence[int]] = {}  # best first, and distinct
        self._rates = RankRates(_PRIOR, _PRIOR_WEIGHT)
        self._path: tuple[int, ...] = ()  # the best path of other writers for the next pass
        self._path_rate = RankRates((_PATH_PRIOR,), _PRIOR_WEIGHT)  # how often it was accepted whole
        for token, successor in pairwise(prompt_ids):
            self._put_first(token, successor)

    def propose(self, best_path: Sequence[int], budget: int) -> Nodes:
        """Return the likeliest paths of successors below the last token and below the best path's end, best first.

        The chance of a path is the product of the success rates of its ranks so far. So for any budget the tree has the
        shape that accepts most. Candidates below the best path are weighted by how often that was right.
        """
        self._path = tuple(best_path)
        ranks = sorted((cost, rank) for rank, cost in enumerate(self._rates.costs()))
        tokens: list[int] = []
        parents: list[int] = []
        path_logprobs: list[float] = []
        waiting: list[_Waiting] = []
        _wait(waiting, ranks, 0, ROOT, 0.0, self.successors.get(self._last, ()))
        if best_path:
            _wait(waiting, ranks, 0, PATH_END, self._path_rate.costs()[0], self.successors.get(best_path[-1], ()))
        while waiting and len(tokens) < budget:
            path_cost, parent, place, cost_above, row = heappop(waiting)
            rank_cost, rank = ranks[place]
            token = row[rank]
            _wait(waiting, ranks, place + 1, parent, cost_above, row)
            _wait(waiting, ranks, 0, len(tokens), path_cost, self.successors.get(token, ()))
            tokens.append(token)
            parents.append(parent)
            path_logprobs.append((path_logprobs[parent] if parent >= 0 else 0.0) - rank_cost)
        return Nodes(tuple(tokens), tuple(parents), tuple(path_logprobs))

    def observe(self, seen: Observation) -> None:
        """Count which ranks were right, then learn the successors from the pass."""
        inputs = (self._last, *seen.tokens)
        for token, successor in pairwise((self._last, *seen.new_ids)):
            row = self.successors.get(token)
            if row:
                self._rates.learn(row, successor)
        if self._path:
            self._path_rate.learn((True,), seen.new_ids[: len(self._path)] == self._path)
            self._path = ()
        on_text = (ROOT, *seen.accepted)  # last, so that of a token that was run twice its place in the text counts
        for idx in (*range(len(seen.tokens)), *on_text):
            if seen.top_ids:
                self.successors[inputs[idx + 1]] = seen.top_ids[idx + 1][:_NUM_SUCCESSORS]
            else:
                self._put_first(inputs[idx + 1], seen.choices[idx + 1])
        self._last = seen.new_ids[-1]

    def _put_first(self, token: int, successor: int) -> None:
        others = [other for other in self.successors.get(token, ()) if other != successor]
        self.successors[token] = (successor, *others[: _NUM_SUCCESSORS - 1])


def _wait(
    waiting: list[_Waiting],
    ranks: Sequence[tuple[float, int]],
    place: int,
    node: int,
    node_cost: float,
    row: Sequence[int],
) -> None:
    """Queue one child of ``node``: of the rank at ``place``, or of the next rank in ``row``.

    Only one child of each node is queued at a time, so that most of the tree is never visited.
    """
    for at in range(place, len(ranks) if row else 0):
        cost, rank = ranks[at]
        if rank < len(row):
            heappush(waiting, (node_cost + cost, node, at, node_cost, row))
            return


class RecyclingWriter(LocalWriter):
    """Proposes a tree from the tokens that the target ranked high before.

    Unlike the published method it has no fixed template. The tree grows best first, by the acceptance of each rank as
    measured in this request, so that it suits 8 candidates as well as 80. It also grows below the best path of other
    writers. The first successors come from the prompt.

    Source: Token Recycling, arXiv:2408.08696.
    """

    top_k = _NUM_SUCCESSORS
    sequence = RecyclingSequence
