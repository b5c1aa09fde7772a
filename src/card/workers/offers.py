"""What one request offers for verification: the drafter's candidates merged with those of the local writers.

Candidates with equal tokens below equal parents are one candidate, whoever proposed them; it is labelled with all their
names, since a token that two writers agree on is accepted more often than one of either alone.

Candidates are a help and no more: a writer that fails or proposes nonsense is heard no longer in that request, and
nothing else happens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

from card.tree.nodes import Candidates
from card.tree.verify import ROOT
from card.writers.local.protocol import PATH_END, Observation, Proposal, WriterSequence, check_proposal

logger = logging.getLogger(__name__)

DRAFTER = "beam"  # the name of the draft model among the writers
AND_OTHERS = f"{DRAFTER}+"  # how candidates begin to be labelled that others propose besides: it is asked first
_LIKELY = math.log(0.5)
_NO_ID = -1  # candidates of local writers are in no tree of a drafter


class Offers:
    """The local writers of one request, in the order in which they are asked."""

    def __init__(self, openers: Mapping[str, Callable[[], WriterSequence]], *, vocab_size: int) -> None:
        """Begin the request with each writer.

        Args:
            vocab_size: of the target, which can run no other tokens.
        """
        self._vocab_size = vocab_size
        self._begun: dict[str, WriterSequence] = {}
        self._heard: dict[str, WriterSequence] = {}  # those that have not failed
        self._asked: tuple[Candidates, int, int] | None = None  # the arguments of the last merge since a pass
        self._merged = Candidates.none()  # and its result
        for name, begin in openers.items():
            try:
                self._begun[name] = self._heard[name] = begin()
            except Exception as error:
                self._silence(name, error)

    def merge(self, drafted: Candidates, budget: int, max_depth: int) -> Candidates:
        """Return the drafter's candidates and those of all writers as one tree: probes first, then by path score.

        Asked for the same once more before the next pass it returns the same object.

        Args:
            budget: most candidates of each writer, less those likely ones that the writers before it propose.
            max_depth: deepest layer below the last committed token that is offered.
        """
        if not self._heard or budget < 1:
            return drafted
        asked = (drafted, budget, max_depth)
        if asked != self._asked:
            self._asked, self._merged = asked, self._merge(drafted, budget, max_depth)
        return self._merged

    def _merge(self, drafted: Candidates, budget: int, max_depth: int) -> Candidates:
        tree = _Tree()
        if drafted:
            tree.add(DRAFTER, Proposal(drafted.tokens, drafted.parents, drafted.path_logprobs), ids=drafted.ids)
        for name, writer in list(self._heard.items()):
            room = budget - tree.num_likely()
            if room < 1:
                break
            path = tree.best_path()
            try:
                proposal = writer.propose(tree.tokens(path), room)
                check_proposal(proposal, self._vocab_size)
                tree.add(name, proposal, path_end=path[-1] if path else ROOT)
            except Exception as error:
                self._silence(name, error)
        return tree.candidates(max_depth)

    def observe(self, seen: Observation) -> None:
        """Tell every writer what a pass told."""
        self._asked = None
        for name, writer in list(self._heard.items()):
            try:
                writer.observe(seen)
            except Exception as error:
                self._silence(name, error)

    def close(self) -> None:
        """The request is over, for those that failed too."""
        for name, writer in self._begun.items():
            try:
                writer.close()
            except Exception as error:
                self._silence(name, error)

    def _silence(self, name: str, error: Exception) -> None:
        """Hear a writer no longer that raised: whatever the reason is, the text does not depend on it."""
        self._heard.pop(name, None)
        what = f"{type(error).__name__}: {error}"
        logger.warning("the writer %s failed and is left out of this request: %s", name, what, exc_info=error)


class _Tree:
    """Candidates of several writers below one root, each with the best score that any of them gave it."""

    def __init__(self) -> None:
        self._child_of: dict[tuple[int, int], int] = {}  # (parent, token)
        self._ids: list[int] = []
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._path_logprobs: list[float] = []
        self._depths: list[int] = []
        self._writers: list[str] = []
        self._probes: set[int] = set()

    def add(self, name: str, proposal: Proposal, *, path_end: int = ROOT, ids: Sequence[int] = ()) -> None:
        """Add a proposal, which may lengthen the path to ``path_end``; ``ids`` are those of a drafter's nodes."""
        end_logprob = 0.0 if path_end == ROOT else self._path_logprobs[path_end]
        idx_of: list[int] = []  # of each of the proposal's candidates in the tree
        top_logprobs: list[float] = []  # of what each of them hangs below: that of the best path's end, or of the root
        rows = zip(proposal.tokens, proposal.parents, proposal.path_logprobs, strict=True)
        for i, (token, parent, logprob) in enumerate(rows):
            if parent >= 0:
                above, top_logprob = idx_of[parent], top_logprobs[parent]
            else:
                above, top_logprob = (path_end, end_logprob) if parent == PATH_END else (ROOT, 0.0)
            path_logprob = top_logprob + logprob
            top_logprobs.append(top_logprob)
            idx = self._child_of.setdefault((above, token), len(self._tokens))
            if idx == len(self._tokens):
                self._ids.append(ids[i] if ids else _NO_ID)
                self._tokens.append(token)
                self._parents.append(above)
                self._path_logprobs.append(path_logprob)
                self._depths.append(1 if above == ROOT else self._depths[above] + 1)
                self._writers.append(name)
            else:
                self._path_logprobs[idx] = max(self._path_logprobs[idx], path_logprob)
                if idx not in idx_of:  # the same path may be proposed below the root and below the best path's end
                    self._writers[idx] += f"+{name}"
            if i < proposal.num_probes:
                self._probes.add(idx)
            idx_of.append(idx)

    def best_path(self) -> list[int]:
        """Return the candidates from below the root down, following the best child."""
        best: dict[int, int] = {}  # by parent
        for idx, parent in enumerate(self._parents):
            other = best.get(parent)
            if other is None or self._path_logprobs[idx] > self._path_logprobs[other]:
                best[parent] = idx
        path = []
        node = best.get(ROOT)
        while node is not None:
            path.append(node)
            node = best.get(node)
        return path

    def num_likely(self) -> int:
        """Return how many candidates are so likely that hardly any of further writers will be verified before them."""
        return sum(path_logprob > _LIKELY for path_logprob in self._path_logprobs)

    def tokens(self, indices: Sequence[int]) -> list[int]:
        return [self._tokens[idx] for idx in indices]

    def candidates(self, max_depth: int) -> Candidates:
        order = [idx for idx, depth in enumerate(self._depths) if depth <= max_depth]
        order.sort(key=lambda idx: (idx not in self._probes, -self._path_logprobs[idx], idx))
        everything = Candidates(
            tuple(self._ids),
            tuple(self._tokens),
            tuple(self._parents),
            tuple(self._path_logprobs),
            tuple(self._depths),
            tuple(self._writers),
        )
        return select(everything, order, num_probes=sum(idx in self._probes for idx in order))


def select(offer: Candidates, indices: Sequence[int], *, num_probes: int = 0) -> Candidates:
    """Return these candidates in this order; each one's parent is the root or stands before it.

    Args:
        num_probes: how many of the first ones are probes.
    """
    place = {ROOT: ROOT} | {idx: i for i, idx in enumerate(indices)}
    return Candidates(
        tuple([offer.ids[i] for i in indices]),
        tuple([offer.tokens[i] for i in indices]),
        tuple([place[offer.parents[i]] for i in indices]),
        tuple([offer.path_logprobs[i] for i in indices]),
        tuple([offer.depths[i] for i in indices]),
        tuple([offer.writers[i] for i in indices]) if offer.writers else (),
        num_probes,
    )


def kept(offer: Candidates, flags: Sequence[bool]) -> Candidates:
    """Return the candidates that are flagged, probes included; whose parent is not flagged must not be either."""
    if all(flags):
        return offer
    indices = [idx for idx, flag in enumerate(flags) if flag]
    return select(offer, indices, num_probes=sum(flags[: offer.num_probes]))


def leading(offer: Candidates, count: int) -> Candidates:
    """Return the first ``count`` candidates: parents come before children, so any number of them is a tree."""
    if count >= len(offer):
        return offer
    return Candidates(
        offer.ids[:count],
        offer.tokens[:count],
        offer.parents[:count],
        offer.path_logprobs[:count],
        offer.depths[:count],
        offer.writers[:count],
        min(offer.num_probes, count),
    )
