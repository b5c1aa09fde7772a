"""The candidate cache: the tree of drafted continuations that drafter and target both hold.

The drafter owns the truth and makes the node ids; the target holds a replica that may lag. Both apply the same
operations, so that a replica which got every message is equal to the truth, bit for bit. Plain Python objects: at a few
hundred nodes an array library spends longer on its calls than these loops take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from operator import itemgetter

from card.config import VerifyShape
from card.tree.nodes import NO_NODES, ROOT, NewNodes, Nodes, check_nodes, check_rows


class _Node:
    """One node. It knows its parent by id only: without reference cycles a pruned branch is freed at once."""

    __slots__ = ("best", "depth", "id", "is_expanded", "kids", "logprob", "parent_id", "score", "spare", "token")

    def __init__(self, node_id: int, parent_id: int, token: int, logprob: float, score: float, depth: int) -> None:
        self.id = node_id
        self.parent_id = parent_id
        self.token = token
        self.logprob = logprob
        self.score = score  # path score from the current root
        self.depth = depth  # from the epoch's root: re-rooting leaves it alone
        self.is_expanded = False
        self.best: _Node | None = None  # the child with the best logprob, the older one if two are equal
        self.kids: dict[int, _Node] = {}  # by token
        self.spare: list[tuple[float, int]] = []  # secondary tier: (logprob, token), best last


class CandidateCache:
    """A bounded tree of candidate tokens below the last committed one.

    Path scores are sums of log-probabilities from the current root and are summed anew when the root moves, so they
    depend on the tree alone and never on its history. Equal scores rank by node id, the older node first.

    While committed tokens are *pending* (the tree does not hold them yet) everything else below the root is out of
    reach and is dropped; the nodes that settle them are taken when they come.

    Source: CARD, arXiv:2508.04462 (two tiers, re-rooting); ranking refills by the whole path is our change.
    """

    epoch: int
    """Number of the present tree; each miss starts a new one."""
    pending: tuple[int, ...]
    """Committed tokens below the root that the tree does not hold yet."""
    num_late_hits: int
    """How many pending tokens were settled by nodes that came later, over the cache's whole life."""

    def __init__(self, *, max_nodes: int, lead: int) -> None:
        """Make an empty cache of epoch 0.

        Args:
            max_nodes: most nodes held, the root not counted; 1 or more.
            lead: most layers below the root that the drafter makes; 1 or more.
        """
        self.max_nodes = max_nodes
        self.lead = lead
        self.num_late_hits = 0
        self.restart(0)

    # ---- both sides -------------------------------------------------------------------------------------------------

    @property
    def root_id(self) -> int:
        """Id of the root: the node of the last committed token that the tree holds."""
        return self._root.id

    @property
    def num_nodes(self) -> int:
        """Number of alive nodes, the root not counted."""
        return len(self._nodes) - 1

    @property
    def depth(self) -> int:
        """Depth of the deepest alive node below the root; 0 if there is none."""
        return self._deepest - self._root.depth

    def restart(self, epoch: int, root_id: int = 0, pending: Sequence[int] = ()) -> None:
        """Drop everything and begin ``epoch`` with a fresh root that is not expanded.

        Args:
            epoch: number of the new tree.
            root_id: id of the root; new ids follow it.
            pending: tokens committed below that root already.
        """
        self.epoch = epoch
        self.pending = tuple(pending)
        self._root = _Node(root_id, root_id, -1, 0.0, 0.0, 0)
        self._nodes = {root_id: self._root}
        self._deepest = 0
        self._next_id = root_id + 1

    def advance(self, tokens: Sequence[int]) -> int:
        """Move the root along committed tokens as far as nodes exist and drop all that is not below it.

        The rest of ``tokens`` becomes `pending`; if tokens are pending already, all of them wait behind those.

        Returns: how many tokens matched now.
        """
        path = self._match(tokens)  # empty while tokens are pending: the root has no children then
        root = path[-1] if path else self._root
        self.pending += tuple(tokens[len(path) :])
        if self.pending:
            self._strip(root)
        elif path:
            self._reroot(root)
        return len(path)

    def walk(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the ids of the nodes that `advance` would move the root along; nothing changes."""
        return tuple(node.id for node in self._match(tokens))

    def num_rolled_back(self, tokens: Sequence[int]) -> int:
        """Return how many nodes of the most probable path these committed tokens rule out; nothing changes.

        They are what was drafted in vain on the one path that seemed right. Nodes beside it, kept for the case that it
        is wrong, do not count.
        """
        best = self.best_path(self.root_id, self.depth)
        pairs = enumerate(zip(best, tokens, strict=False))
        num_right = next((i for i, (node, token) in pairs if self.token(node) != token), len(best))
        return len(best) - num_right

    def query(self, budget: int, shape: VerifyShape, max_depth: int | None = None) -> Nodes:
        """Return the best candidates below the root, none while tokens are pending. Never waits.

        Args:
            budget: most nodes returned.
            shape: ``chain`` follows the most probable child; ``trunk`` does so as long as it is the only one; ``tree``
                takes the nodes with the best path scores, which is closed under parents as a child's score is never
                above its parent's.
            max_depth: deepest layer below the root that is offered; None sets no limit.
        """
        num_layers = self.depth if max_depth is None else min(max_depth, self.depth)
        if num_layers <= 0:
            return NO_NODES
        if shape != "tree":
            return self._best_chain(min(budget, num_layers), stops_at_branch=shape == "trunk")
        return self._best_tree(budget, num_layers)

    def is_alive(self, node_id: int) -> bool:
        """Return whether the tree holds the node; the root counts as alive."""
        return node_id in self._nodes

    def alive_ids(self) -> list[int]:
        """Return the ids of all alive nodes, the root not among them, ascending: parents come first."""
        return sorted(self._nodes.keys() - {self._root.id})

    def token(self, node_id: int) -> int:
        """Return an alive node's token; -1 for the root of a fresh epoch. Raises: KeyError if the node is not alive."""
        return self._nodes[node_id].token

    def parent(self, node_id: int) -> int:
        """Return the id of an alive node's parent, the root's own id for the root. Raises: KeyError if not alive."""
        return node_id if node_id == self._root.id else self._nodes[node_id].parent_id

    def children(self, node_id: int) -> list[int]:
        """Return the ids of an alive node's children, most probable first. Raises: KeyError if not alive."""
        kids = self._nodes[node_id].kids.values()
        return [kid.id for kid in sorted(kids, key=lambda kid: (-kid.logprob, kid.id))]

    def depth_of(self, node_id: int) -> int:
        """Return an alive node's depth below the root. Raises: KeyError if the node is not alive."""
        return self._nodes[node_id].depth - self._root.depth

    def path_logprob(self, node_id: int) -> float:
        """Return an alive node's path score. Raises: KeyError if the node is not alive."""
        return self._nodes[node_id].score

    def path_tokens(self, node_id: int) -> list[int]:
        """Return the tokens from below the root down to an alive node. Raises: KeyError if the node is not alive."""
        tokens = []
        node = self._nodes[node_id]
        while node is not self._root:
            tokens.append(node.token)
            node = self._nodes[node.parent_id]
        return tokens[::-1]

    def is_expanded(self, node_id: int) -> bool:
        """Return whether an alive node was run through the draft model. Raises: KeyError if the node is not alive."""
        return self._nodes[node_id].is_expanded

    def likeliest(self, node_id: int) -> float:
        """Return the log-probability of an alive node's likeliest continuation in either tier; -inf if there is none.

        Raises: KeyError if the node is not alive.
        """
        node = self._nodes[node_id]
        best = node.best.logprob if node.best is not None else -math.inf
        return max(best, node.spare[-1][0]) if node.spare else best

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

    # ---- replica ----------------------------------------------------------------------------------------------------

    def extend(self, epoch: int, nodes: NewNodes) -> int:
        """Add nodes that the drafter made.

        Dropped are all nodes of another epoch, nodes whose parent is not alive, a second node with the same id or with
        the same parent and token, and what exceeds `max_nodes`. Pending tokens are settled as their nodes come.

        Returns: how many nodes were kept, those included that settled a pending token.
        Raises: ProtocolError if the message is malformed; nothing has changed then.
        """
        check_nodes(nodes)
        if epoch != self.epoch:
            return 0
        num_kept = 0
        for node_id, parent_id, token, logprob in zip(
            nodes.ids, nodes.parents, nodes.tokens, nodes.logprobs, strict=True
        ):
            if len(self._nodes) > self.max_nodes:
                break
            num_kept += self._attach(node_id, parent_id, token, logprob if logprob < 0.0 else 0.0)
        if nodes.ids:
            self._next_id = max(self._next_id, nodes.ids[-1] + 1)
        return num_kept

    # ---- drafter ----------------------------------------------------------------------------------------------------

    def frontier(self, width: int, *, min_path_logprob: float = -math.inf, num_layers: int | None = None) -> list[int]:
        """Return the ids of the best nodes to expand next, best path score first, hence parents before children.

        Args:
            width: most ids returned.
            min_path_logprob: nodes with a lower path score are left out. `grow` and `refill` never make such nodes, so
                it only matters if the floor has risen since.
            num_layers: nodes so deep below the root, or deeper, are left out; None: only those as deep as the lead.
        """
        end = self._root.depth + (self.lead if num_layers is None else min(self.lead, num_layers))
        ranked = [
            (-node.score, node.id)
            for node in self._nodes.values()
            if not node.is_expanded and node.depth < end and node.score >= min_path_logprob
        ]
        ranked.sort()
        return [node_id for _, node_id in ranked[: max(width, 0)]]

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

        Parents that died meanwhile or are expanded already are skipped; the others are expanded from now on. Children
        of probability 0 and tokens that the parent has as a child already are dropped.

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
        scored: list[tuple[float, _Node, float, int]] = []
        for parent_id, row_tokens, row_logprobs in zip(parent_ids, tokens, logprobs, strict=True):
            node = self._nodes.get(parent_id)
            if node is None or node.is_expanded:
                continue
            node.is_expanded = True
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
            count: most nodes made; less are made at `max_nodes`, and none deeper than `lead`.
            min_path_logprob: entries with a lower path score stay where they are.
        Returns: the new nodes, best path score first.
        """
        end = self._root.depth + self.lead
        heap = [
            (-(node.score + node.spare[-1][0]), node.id)
            for node in self._nodes.values()
            if node.spare and node.depth < end
        ]
        heapify(heap)
        most = min(count, 1) if self.pending else count  # the node that settles a pending token has no entries yet
        made: list[_Node] = []
        while heap and len(made) < most and len(self._nodes) <= self.max_nodes:
            cost, parent_id = heap[0]
            if -cost < min_path_logprob:
                break
            node = self._nodes[parent_id]
            logprob, token = node.spare.pop()
            if node.spare:
                heapreplace(heap, (-(node.score + node.spare[-1][0]), parent_id))
            else:
                heappop(heap)
            self._make(made, node, token, logprob)
        return _new_nodes(made)

    def refill_below(self, parent_id: int, count: int, min_path_logprob: float) -> NewNodes:
        """Make nodes of the best secondary-tier entries of one alive node; bounds as of `refill`.

        Returns: the new nodes, most probable first.
        Raises: KeyError if the node is not alive.
        """
        node = self._nodes[parent_id]
        made: list[_Node] = []
        is_deepest = node.depth >= self._root.depth + self.lead
        while node.spare and not is_deepest and len(made) < count and len(self._nodes) <= self.max_nodes:
            if node.score + node.spare[-1][0] < min_path_logprob:
                break
            logprob, token = node.spare.pop()
            self._make(made, node, token, logprob)
        return _new_nodes(made)

    def snapshot(self) -> NewNodes:
        """Return all alive nodes below the root. With `epoch` and `root_id` it rebuilds a replica:

        ``restart(epoch, root_id, tokens committed since)``, then ``extend(epoch, snapshot)``.
        """
        return _new_nodes([self._nodes[node_id] for node_id in self.alive_ids()])

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _match(self, tokens: Sequence[int]) -> list[_Node]:
        path: list[_Node] = []
        node: _Node | None = self._root
        for token in tokens:
            node = node.kids.get(token) if node else None
            if node is None:
                break
            path.append(node)
        return path

    def _reroot(self, root: _Node) -> None:
        """Make ``root`` the root; keep what is below it, layer by layer, and sum its scores anew."""
        root.score = 0.0
        alive = {root.id: root}
        deepest = root.depth
        layer = [root]
        while True:
            below: list[_Node] = []
            for node in layer:
                if node.kids:
                    score = node.score
                    for kid in node.kids.values():
                        kid.score = score + kid.logprob
                        alive[kid.id] = kid
                        below.append(kid)
            if not below:
                break
            deepest += 1
            layer = below
        self._root, self._nodes, self._deepest = root, alive, deepest

    def _strip(self, root: _Node) -> None:
        """Make ``root`` the root and drop all below it: none of it leads to the first pending token."""
        root.score = 0.0
        root.kids = {}
        root.best = None
        self._root, self._nodes, self._deepest = root, {root.id: root}, root.depth

    def _attach(self, node_id: int, parent_id: int, token: int, logprob: float) -> bool:
        """Add one node unless its parent is dead, it exists, or a pending token rules it out; say if it was added."""
        nodes = self._nodes
        parent = nodes.get(parent_id)
        if parent is None or node_id in nodes or token in parent.kids:
            return False
        if self.pending and token != self.pending[0]:  # the root is the only node then
            return False
        node = _Node(node_id, parent_id, token, logprob, parent.score + logprob, parent.depth + 1)
        nodes[node_id] = node
        parent.kids[token] = node
        best = parent.best
        if best is None or logprob > best.logprob or (logprob == best.logprob and node_id < best.id):
            parent.best = node
        self._deepest = max(self._deepest, node.depth)
        if self.pending:
            self.pending = self.pending[1:]
            self.num_late_hits += 1
            self._reroot(node)
        return True

    def _make(self, made: list[_Node], parent: _Node, token: int, logprob: float) -> None:
        """Add a node of our own under the next id and note it in ``made``."""
        if self._attach(self._next_id, parent.id, token, logprob):
            made.append(self._nodes[self._next_id])
            self._next_id += 1

    def _admit(self, scored: list[tuple[float, _Node, float, int]], width: int, min_path_logprob: float) -> NewNodes:
        """Make nodes of the first entries that the bounds allow and put the others into the secondary tier."""
        end = self._root.depth + self.lead
        made: list[_Node] = []
        rest = []
        for entry in scored:
            score, parent, logprob, token = entry
            has_room = len(made) < width and len(self._nodes) <= self.max_nodes
            if has_room and score >= min_path_logprob and parent.depth < end:
                self._make(made, parent, token, logprob)
            else:
                rest.append(entry)
        for _, parent, logprob, token in reversed(rest):  # best last: `refill` pops from the end
            parent.spare.append((logprob, token))
        return _new_nodes(made)

    def _best_chain(self, length: int, *, stops_at_branch: bool) -> Nodes:
        tokens: list[int] = []
        scores: list[float] = []
        above, node = self._root, self._root.best
        while node is not None and len(tokens) < length and not (stops_at_branch and len(above.kids) > 1):
            tokens.append(node.token)
            scores.append(node.score)
            above, node = node, node.best
        return Nodes.chain(tokens, scores)

    def _best_tree(self, budget: int, num_layers: int) -> Nodes:
        """Walk best first from the root: the same nodes in the same order as sorting all, at the price of a few."""
        heap = [(-kid.score, kid.id, ROOT, 1, kid) for kid in self._root.kids.values()]
        heapify(heap)
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        depths: list[int] = []
        while heap and len(tokens) < budget:
            cost, _, parent_idx, depth, node = heappop(heap)
            if depth < num_layers:
                own_idx, below = len(tokens), depth + 1
                for kid in node.kids.values():
                    heappush(heap, (-kid.score, kid.id, own_idx, below, kid))
            tokens.append(node.token)
            parents.append(parent_idx)
            scores.append(-cost)
            depths.append(depth)
        return Nodes(tuple(tokens), tuple(parents), tuple(scores), tuple(depths))


def _new_nodes(nodes: Sequence[_Node]) -> NewNodes:
    return NewNodes(
        tuple([node.id for node in nodes]),
        tuple([node.parent_id for node in nodes]),
        tuple([node.token for node in nodes]),
        tuple([node.logprob for node in nodes]),
    )
