"""Candidates of one request for verification: the drafter's, merged with those of the local writers.

Candidates with equal tokens below equal parents are merged, whichever writers proposed them. The merged candidate is
marked with all its writers: a token that two writers agree on is accepted more often than a token of one of them.

Candidates are optional. A writer that fails or proposes nonsense is not asked again in that request, and the request
goes on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

from card.drafting.local.protocol import Observation, WriterSequence, check_proposal
from card.errors import in_words
from card.tree.nodes import NO_NODES, PATH_END, ROOT, MergedNodes, Nodes

logger = logging.getLogger(__name__)

DRAFTER = "beam"  # the name of the draft model among the writers
GRAMMAR = "grammar"  # the name of a request's grammar among the writers, the last of them
DRAFTER_BIT = 1  # among the bits of `Nodes.writers`
# A candidate whose path is likelier fills the budget: candidates of later writers rank behind it. Chosen,
# not measured.
LIKELY_PATH_LOGPROB = math.log(0.5)


class Offers:
    """The local writers of one request, in the order in which they are asked."""

    def __init__(self, openers: Mapping[str, Callable[[], WriterSequence]], *, vocab_size: int) -> None:
        """Begin the request with each writer.

        Args:
            vocab_size: of the target, which can run no other tokens.
        """
        self._vocab_size = vocab_size
        self._begun: dict[str, WriterSequence] = {}
        self._heard: dict[str, WriterSequence] = {}  # the writers that have not failed
        self.names = (DRAFTER, *openers)  # of the writers, in the order of their bits
        self._asked: tuple[Nodes, int, int, int] | None = None  # arguments of the last merge, cleared by a pass
        self._merged = NO_NODES  # result of that merge
        # The grammar is asked first, as what it forces is certain; its bit is the last, as few requests have one.
        self._order = sorted(enumerate(self.names), key=lambda one: one[1] != GRAMMAR)
        for name, begin in openers.items():
            try:
                self._begun[name] = self._heard[name] = begin()
            except Exception as error:
                self._silence(name, error)

    @property
    def is_guided(self) -> bool:
        """True if the request's grammar is among the writers."""
        return GRAMMAR in self._heard

    @property
    def grammar_bit(self) -> int:
        """The bit of the request's grammar in `Nodes.writers`; 0 if it is no writer."""
        return 1 << self.names.index(GRAMMAR) if GRAMMAR in self.names else 0

    def has_failed(self, name: str) -> bool:
        """Return whether a local writer failed, so that it is not asked again in this request."""
        return name not in self._heard

    def merge(self, drafted: Nodes, budget: int, max_depth: int, *, num_forced: int = 0) -> Nodes:
        """Return the drafter's candidates and those of all writers as one tree: probes first, then by path score.

        Asked again with the same arguments before the next pass, it returns the same object.

        Args:
            budget: most candidates of each writer, less the likely ones of earlier writers.
            max_depth: deepest layer below the last committed token that is offered.
            num_forced: most candidates of the request's grammar.
        """
        if not self._heard or max(budget, num_forced if self.is_guided else 0) < 1:
            return drafted
        asked = (drafted, budget, max_depth, num_forced)
        if asked != self._asked:
            self._asked, self._merged = asked, self._merge(drafted, budget, max_depth, num_forced)
        return self._merged

    def _merge(self, drafted: Nodes, budget: int, max_depth: int, num_forced: int) -> Nodes:
        tree = _Tree()
        tree.add_all(drafted, DRAFTER_BIT)
        for bit, name in self._order:
            writer = self._heard.get(name)
            if writer is None:
                continue
            room = num_forced if name == GRAMMAR else budget - tree.num_likely()
            if room < 1:
                continue
            path = tree.best_path()
            try:
                proposal = writer.propose([tree.tokens[idx] for idx in path], room)
                check_proposal(proposal, self._vocab_size)
                tree.add_all(proposal, 1 << bit, path_end=path[-1] if path else ROOT)
            except Exception as error:
                self._silence(name, error)
        return tree.offer(max_depth)

    def observe(self, seen: Observation) -> None:
        """Tell every writer what a pass observed."""
        self._asked = None
        self._tell(lambda writer: writer.observe(seen))

    def _tell(self, tell: Callable[[WriterSequence], None]) -> None:
        for name, writer in list(self._heard.items()):
            try:
                tell(writer)
            except Exception as error:
                self._silence(name, error)

    def close(self) -> None:
        """End the request for all writers, failed ones included."""
        for name, writer in self._begun.items():
            try:
                writer.close()
            except Exception as error:
                self._silence(name, error)

    def _silence(self, name: str, error: Exception) -> None:
        """Stop asking a writer that raised until the request ends. The text does not depend on it."""
        self._heard.pop(name, None)
        what = in_words(error)
        logger.warning("the writer %s failed and is left out of this request: %s", name, what, exc_info=error)


def writer_label(writers: int, names: Sequence[str]) -> str:
    """Return the writers of a candidate, several joined by "+"; ``names`` as in `Offers`."""
    return "+".join([name for bit, name in enumerate(names) if writers >> bit & 1])


class _Tree(MergedNodes):
    """Candidates of several writers below one root, each with its best score."""

    def __init__(self) -> None:
        super().__init__()
        self._probes: set[int] = set()

    def add_all(self, proposal: Nodes, writer: int, *, path_end: int = ROOT) -> None:
        """Add a writer's proposal, which may extend the path to ``path_end``."""
        end_logprob = 0.0 if path_end == ROOT else self.path_logprobs[path_end]
        idx_of: list[int] = []  # tree index of each candidate of the proposal
        top_logprobs: list[float] = []  # score of the node above its chain: the best path's end or the root
        rows = zip(proposal.tokens, proposal.parents, proposal.path_logprobs, strict=True)
        for token, parent, logprob in rows:
            if parent >= 0:
                above, top_logprob = idx_of[parent], top_logprobs[parent]
            else:
                above, top_logprob = (path_end, end_logprob) if parent == PATH_END else (ROOT, 0.0)
            top_logprobs.append(top_logprob)
            idx_of.append(self.add(above, token, top_logprob + logprob, writer))
        self._probes.update(idx_of[: proposal.num_probes])

    def best_path(self) -> list[int]:
        """Return the candidates of the best path, from below the root down."""
        best: dict[int, int] = {}  # by parent
        for idx, parent in enumerate(self.parents):
            other = best.get(parent)
            if other is None or self.path_logprobs[idx] > self.path_logprobs[other]:
                best[parent] = idx
        path = []
        node = best.get(ROOT)
        while node is not None:
            path.append(node)
            node = best.get(node)
        return path

    def num_likely(self) -> int:
        """Return how many candidates are so likely that further writers' candidates will rank behind them."""
        return sum(path_logprob > LIKELY_PATH_LOGPROB for path_logprob in self.path_logprobs)

    def offer(self, max_depth: int) -> Nodes:
        """Return the candidates down to this depth: probes first, then by path score."""
        order = [idx for idx, depth in enumerate(self.depths) if depth <= max_depth]
        order.sort(key=lambda idx: (idx not in self._probes, -self.path_logprobs[idx], idx))
        return self.nodes().take(order, num_probes=sum(idx in self._probes for idx in order))
