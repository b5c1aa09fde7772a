"""The candidate cache: the tree of drafted continuations that drafter and target both hold.

The drafter owns the truth and makes the node ids: its tree is a `card.drafting.draft_tree.DraftTree`. The target holds
a replica that may lag. Both apply the same operations, so that a replica which got every message is equal to the truth,
bit for bit. Plain Python objects: at a few hundred nodes an array library spends longer on its calls than these loops
take.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from card.config import VerifyShape
from card.tree.nodes import NO_NODES, ROOT, NewNodes, Nodes, check_nodes


class Node:
    """Node of a tree. It knows its parent by id only: without reference cycles a pruned branch is freed at once."""

    __slots__ = ("best", "depth", "id", "kids", "logprob", "parent_id", "score", "token")

    def __init__(self, node_id: int, parent_id: int, token: int, logprob: float, score: float, depth: int) -> None:
        self.id = node_id
        self.parent_id = parent_id
        self.token = token
        self.logprob = logprob
        self.score = score  # path score from the current root
        self.depth = depth  # from the epoch's root: re-rooting leaves it alone
        self.best: Node | None = None  # the child with the best logprob, the older one if two are equal
        self.kids: dict[int, Node] = {}  # by token


class CandidateCache:
    """A bounded tree of candidate tokens below the last committed one.

    Path scores are sums of log-probabilities from the current root and are summed anew when the root moves, so they
    depend on the tree alone and never on its history. Equal scores rank by node id, the older node first.

    While committed tokens are *pending* (the tree does not hold them yet) everything else below the root is out of
    reach and is dropped; the nodes that settle them are taken when they come.

    Source: CARD, arXiv:2508.04462 (re-rooting).
    """

    epoch: int
    """Number of the present tree; each miss starts a new one."""
    pending: tuple[int, ...]
    """Committed tokens below the root that the tree does not hold yet."""

    def __init__(self, *, max_nodes: int) -> None:
        """Make an empty cache of epoch 0 for at most ``max_nodes`` nodes, 1 or more, the root not counted."""
        self.max_nodes = max_nodes
        self.restart(0)

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
        self._root = Node(root_id, root_id, -1, 0.0, 0.0, 0)
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

    def snapshot(self) -> NewNodes:
        """Return all alive nodes below the root. With `epoch` and `root_id` it rebuilds a replica:

        ``restart(epoch, root_id, tokens committed since)``, then ``extend(epoch, snapshot)``.
        """
        return new_nodes([self._nodes[node_id] for node_id in self.alive_ids()])

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _match(self, tokens: Sequence[int]) -> list[Node]:
        path: list[Node] = []
        node: Node | None = self._root
        for token in tokens:
            node = node.kids.get(token) if node else None
            if node is None:
                break
            path.append(node)
        return path

    def _reroot(self, root: Node) -> None:
        """Make ``root`` the root; keep what is below it, layer by layer, and sum its scores anew."""
        root.score = 0.0
        alive = {root.id: root}
        deepest = root.depth
        layer = [root]
        while True:
            below: list[Node] = []
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
        self._keep(root, alive, deepest)

    def _strip(self, root: Node) -> None:
        """Make ``root`` the root and drop all below it: none of it leads to the first pending token."""
        root.score = 0.0
        root.kids = {}
        root.best = None
        self._keep(root, {root.id: root}, root.depth)

    def _keep(self, root: Node, alive: dict[int, Node], deepest: int) -> None:
        """Forget all nodes but these."""
        self._root, self._nodes, self._deepest = root, alive, deepest

    def _attach(self, node_id: int, parent_id: int, token: int, logprob: float) -> bool:
        """Add one node unless its parent is dead, it exists, or a pending token rules it out; say if it was added."""
        nodes = self._nodes
        parent = nodes.get(parent_id)
        if parent is None or node_id in nodes or token in parent.kids:
            return False
        if self.pending and token != self.pending[0]:  # the root is the only node then
            return False
        node = Node(node_id, parent_id, token, logprob, parent.score + logprob, parent.depth + 1)
        nodes[node_id] = node
        parent.kids[token] = node
        best = parent.best
        if best is None or logprob > best.logprob or (logprob == best.logprob and node_id < best.id):
            parent.best = node
        self._deepest = max(self._deepest, node.depth)
        if self.pending:
            self.pending = self.pending[1:]
            self._reroot(node)
        return True

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


def new_nodes(nodes: Sequence[Node]) -> NewNodes:
    """Return nodes as a drafter sends them."""
    return NewNodes(
        tuple([node.id for node in nodes]),
        tuple([node.parent_id for node in nodes]),
        tuple([node.token for node in nodes]),
        tuple([node.logprob for node in nodes]),
    )
