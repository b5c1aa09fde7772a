"""What one request offers for verification: the drafter's candidates merged with those of the local writers.

Candidates with equal tokens below equal parents are one candidate, whoever proposed them; it is labelled with all their
names, since a token that two writers agree on is accepted more often than one of either alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from card.nodes import Candidates
from card.verify import ROOT
from card.writers.local.protocol import Observation, Proposal, WriterSequence

DRAFTER = "beam"  # the name of the draft model among the writers
_NO_ID = -1  # candidates of local writers are in no tree of a drafter


class Offers:
    """The local writers of one request, in the order in which they are asked."""

    def __init__(self, writers: Mapping[str, WriterSequence]) -> None:
        self._writers = dict(writers)

    def merge(self, drafted: Candidates, budget: int, max_depth: int) -> Candidates:
        """Return the drafter's candidates and those of all writers as one tree: probes first, then by path score.

        Args:
            budget: most candidates of each writer.
            max_depth: deepest layer below the last committed token that is offered.
        """
        if not self._writers or budget < 1:
            return drafted
        tree = _Tree()
        tree.add(DRAFTER, Proposal(drafted.tokens, drafted.parents, drafted.path_logprobs), drafted.ids)
        for name, writer in self._writers.items():
            tree.add(name, writer.propose(tree.best_path(), budget))
        return tree.candidates(max_depth)

    def observe(self, seen: Observation) -> None:
        """Tell every writer what a pass told."""
        for writer in self._writers.values():
            writer.observe(seen)

    def close(self) -> None:
        """The request is over."""
        for writer in self._writers.values():
            writer.close()


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

    def add(self, name: str, proposal: Proposal, ids: Sequence[int] = ()) -> None:
        idx_of: list[int] = []  # of each of the proposal's candidates in the tree
        rows = zip(proposal.tokens, proposal.parents, proposal.path_logprobs, strict=True)
        for i, (token, parent, path_logprob) in enumerate(rows):
            above = ROOT if parent == ROOT else idx_of[parent]
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
                self._writers[idx] += f"+{name}"
            if i < proposal.num_probes:
                self._probes.add(idx)
            idx_of.append(idx)

    def best_path(self) -> list[int]:
        """Return the tokens from below the root down, following the best child."""
        best: dict[int, int] = {}  # by parent
        for idx, parent in enumerate(self._parents):
            other = best.get(parent)
            if other is None or self._path_logprobs[idx] > self._path_logprobs[other]:
                best[parent] = idx
        tokens = []
        node = best.get(ROOT)
        while node is not None:
            tokens.append(self._tokens[node])
            node = best.get(node)
        return tokens

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
        num_probes = sum(idx in self._probes for idx in order)
        return replace(select(everything, order), num_probes=num_probes)


def select(offer: Candidates, indices: Sequence[int]) -> Candidates:
    """Return these candidates in this order; each one's parent is the root or stands before it. None is a probe."""
    place = {ROOT: ROOT} | {idx: i for i, idx in enumerate(indices)}
    return Candidates(
        tuple([offer.ids[i] for i in indices]),
        tuple([offer.tokens[i] for i in indices]),
        tuple([place[offer.parents[i]] for i in indices]),
        tuple([offer.path_logprobs[i] for i in indices]),
        tuple([offer.depths[i] for i in indices]),
        tuple([offer.writers[i] for i in indices]) if offer.writers else (),
    )


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
