"""The drafter's own tree: the candidate cache, which nodes were run, and the secondary tier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from operator import itemgetter

from card.tree.candidates import CandidateCache, Node, new_nodes
from card.tree.nodes import NewNodes, check_rows


class DraftTree(CandidateCache):
    """A candidate cache that grows.

    A node is expanded if it was run through the draft model. The secondary tier of a node holds the children that did
    not become nodes; `refill` makes nodes of them later.

    Source: CARD, arXiv:2508.04462 (two tiers); ranking refills by the whole path is our change.
    """

    def __init__(self, *, max_nodes: int, lead: int) -> None:
        """Make an empty tree of epoch 0.

        Args:
            max_nodes: most nodes held, the root not counted; 1 or more.
            lead: most layers made below the root; 1 or more.
        """
        self.lead = lead
        super().__init__(max_nodes=max_nodes)

    def restart(self, epoch: int, root_id: int = 0, pending: Sequence[int] = ()) -> None:
        super().restart(epoch, root_id, pending)
        self._expanded: set[int] = set()  # ids of alive nodes
        self._spare: dict[
            int, list[tuple[float, int]]
        ] = {}  # secondary tier of alive nodes: (logprob, token), best last

    # ---- queries ----------------------------------------------------------------------------------------------------

    def walk(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the ids of the nodes that `advance` would move the root along; nothing changes."""
        return tuple(node.id for node in self._match(tokens))

    def num_rolled_back(self, tokens: Sequence[int]) -> int:
        """Return how many nodes of the most probable path these committed tokens rule out; nothing changes.

        Nodes beside that path do not count: they are kept for the case that the path is wrong.
        """
        best = self.best_path(self.root_id, self.depth)
        pairs = enumerate(zip(best, tokens, strict=False))
        num_right = next((i for i, (node, token) in pairs if self.token(node) != token), len(best))
        return len(best) - num_right

    def is_expanded(self, node_id: int) -> bool:
        """Return whether an alive node was run through the draft model. Raises: KeyError if the node is not alive."""
        return self._nodes[node_id].id in self._expanded

    def likeliest(self, node_id: int) -> float:
        """Return the log-probability of the likeliest continuation of an alive node in either tier; -inf without one.

        Raises: KeyError if the node is not alive.
        """
        node, spare = self._nodes[node_id], self._spare.get(node_id)
        best = node.best.logprob if node.best is not None else -math.inf
        return max(best, spare[-1][0]) if spare else best

    def best_path(self, node_id: int, length: int) -> list[int]:
        """Return the ids of at most ``length`` nodes below an alive one, following the most probable child.

        Raises: KeyError if the node is not alive.
        """
        path: list[int] = []
        node = self._nodes[node_id].best
        while node is not None and len(path) < length:
            path.append(node.id)
            node = node.best
        return path

    def frontier(self, width: int, *, num_layers: int | None = None) -> list[int]:
        """Return the ids of the best nodes to expand next, best path score first, hence parents before children.

        Args:
            width: most ids returned.
            num_layers: nodes at this depth below the root or deeper are left out; None: nodes as deep as the lead.
        """
        end = self._root.depth + (self.lead if num_layers is None else min(self.lead, num_layers))
        expanded = self._expanded
        ranked = [
            (-node.score, node.id) for node in self._nodes.values() if node.id not in expanded and node.depth < end
        ]
        ranked.sort()
        return [node_id for _, node_id in ranked[: max(width, 0)]]

    # ---- changes ----------------------------------------------------------------------------------------------------

    def grow(
        self,
        parent_ids: Sequence[int],
        tokens: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
        *,
        width: int,
        min_path_logprob: float,
    ) -> NewNodes:
        """Do one beam step: the best children over all parents become nodes, the rest secondary-tier entries.

        Parents that were dropped or are expanded already are skipped; the others count as expanded from now on.
        Children of probability 0 are dropped, and tokens that the parent already has as a child.

        Args:
            parent_ids: [F] the nodes that were run through the draft model.
            tokens: [F][b] the top tokens of each, in any order.
            logprobs: [F][b] their log-probabilities; equal path scores rank in the order given.
            width: most nodes made.
            min_path_logprob: a child with a lower path score stays in the secondary tier.
        Returns: the new nodes, best path score first.
        Raises: ProtocolError if lengths differ or a log-probability is NaN or above 0; nothing has changed then.
        """
        check_rows(parent_ids, tokens, logprobs)
        scored: list[tuple[float, Node, float, int]] = []
        for parent_id, row_tokens, row_logprobs in zip(parent_ids, tokens, logprobs, strict=True):
            node = self._nodes.get(parent_id)
            if node is None or parent_id in self._expanded:
                continue
            self._expanded.add(parent_id)
            score = node.score
            for token, logprob in zip(row_tokens, row_logprobs, strict=True):
                if logprob > -math.inf:
                    value = logprob if logprob < 0.0 else 0.0
                    scored.append((score + value, node, value, token))
        scored.sort(key=itemgetter(0), reverse=True)
        return self._admit(scored, width, min_path_logprob)

    def refill(self, count: int, min_path_logprob: float) -> NewNodes:
        """Make nodes of the best secondary-tier entries, ranked by parent's path score + own log-probability.

        Args:
            count: most nodes made; fewer are made at `max_nodes`, and none deeper than `lead`.
            min_path_logprob: entries with a lower path score stay where they are.
        Returns: the new nodes, best path score first.
        """
        end, nodes = self._root.depth + self.lead, self._nodes
        heap = [
            (-(nodes[node_id].score + spare[-1][0]), node_id)
            for node_id, spare in self._spare.items()
            if nodes[node_id].depth < end
        ]
        heapify(heap)
        most = min(count, 1) if self.pending else count  # the node of a pending token has no entries yet
        made: list[Node] = []
        while heap and len(made) < most and len(self._nodes) <= self.max_nodes:
            cost, parent_id = heap[0]
            if -cost < min_path_logprob:
                break
            node = self._nodes[parent_id]
            logprob, token = self._pop_spare(parent_id)
            if spare := self._spare.get(parent_id):
                heapreplace(heap, (-(node.score + spare[-1][0]), parent_id))
            else:
                heappop(heap)
            self._make(made, node, token, logprob)
        return new_nodes(made)

    def refill_below(self, parent_id: int, count: int, min_path_logprob: float) -> NewNodes:
        """Make nodes of the best secondary-tier entries of one alive node; bounds as in `refill`.

        Returns: the new nodes, most probable first.
        Raises: KeyError if the node is not alive.
        """
        node = self._nodes[parent_id]
        made: list[Node] = []
        is_deepest = node.depth >= self._root.depth + self.lead
        while not is_deepest and len(made) < count and len(self._nodes) <= self.max_nodes:
            spare = self._spare.get(parent_id)
            if not spare or node.score + spare[-1][0] < min_path_logprob:
                break
            logprob, token = self._pop_spare(parent_id)
            self._make(made, node, token, logprob)
        return new_nodes(made)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _keep(self, root: Node, alive: dict[int, Node], deepest: int) -> None:
        super()._keep(root, alive, deepest)
        self._expanded &= alive.keys()
        self._spare = {node_id: spare for node_id, spare in self._spare.items() if node_id in alive}

    def _pop_spare(self, parent_id: int) -> tuple[float, int]:
        """Remove and return the best entry of a node that has some."""
        entry = self._spare[parent_id].pop()
        if not self._spare[parent_id]:
            del self._spare[parent_id]
        return entry

    def _make(self, made: list[Node], parent: Node, token: int, logprob: float) -> None:
        """Add a node under the next id and append it to ``made``."""
        if self._attach(self._next_id, parent.id, token, logprob):
            made.append(self._nodes[self._next_id])
            self._next_id += 1

    def _admit(self, scored: list[tuple[float, Node, float, int]], width: int, min_path_logprob: float) -> NewNodes:
        """Make nodes of the first entries that the bounds allow and put the others into the secondary tier."""
        end = self._root.depth + self.lead
        made: list[Node] = []
        rest = []
        for entry in scored:
            score, parent, logprob, token = entry
            has_room = len(made) < width and len(self._nodes) <= self.max_nodes
            if has_room and score >= min_path_logprob and parent.depth < end:
                self._make(made, parent, token, logprob)
            else:
                rest.append(entry)
        for _, parent, logprob, token in reversed(rest):  # best last: `refill` pops from the end
            if parent.id in self._nodes:  # a child that matches a pending token drops its parent
                self._spare.setdefault(parent.id, []).append((logprob, token))
        return new_nodes(made)
