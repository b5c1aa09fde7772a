"""Facts about nodes of a candidate tree: those that the drafter made, and those that the target is offered."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain

import msgspec
from msgspec.structs import astuple

from card.errors import ProtocolError

ROOT = -1  # parent index of a node below the root, the last committed token
PATH_END = -2  # parent index of a node below the best path's end, which is the root if there is no path
SELF_BIT = (
    2  # among the bits of `Nodes.writers`: a target that drafts for itself, the first writer after the draft model
)
_MAX_LOGPROB = 1e-6  # a log-probability may exceed 0 by rounding only


class NewNodes(msgspec.Struct, frozen=True):
    """Nodes added in one step, ids increasing: what the drafter sends to a replica. All four have the same length."""

    ids: tuple[int, ...]
    parents: tuple[int, ...]  # node ids, each below the node's own
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the token given its parent's text, natural log

    @classmethod
    def none(cls) -> NewNodes:
        """Return no nodes."""
        return cls((), (), (), ())

    @classmethod
    def joined(cls, parts: Iterable[NewNodes]) -> NewNodes:
        """Return the nodes of all parts, in the order in which they were made."""
        filled = [part for part in parts if part.ids]
        if len(filled) < 2:
            return filled[0] if filled else cls.none()
        return cls(*(tuple(chain.from_iterable(columns)) for columns in zip(*map(astuple, filled), strict=True)))

    def __len__(self) -> int:
        return len(self.ids)


class Nodes(msgspec.Struct, frozen=True):
    """Candidates of one or several writers, parents before children. The arrays are equally long.

    What a query or a merge offers hangs below the last committed token, the root. What a writer proposes hangs there or
    below the end of the best path that it was shown; it leaves out depths and writers, which the merge finds.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()  # index of each one's parent among them; ROOT or, in a proposal, PATH_END at the top
    path_logprobs: tuple[float, ...] = ()  # of the path from the top down to it: at most 0 and the parent's
    depths: tuple[int, ...] = ()  # below the root, whose children have depth 1
    writers: tuple[int, ...] = ()  # bit i: writer i proposed it, 0 being the draft model; (): the draft model alone did
    num_probes: int = 0  # the first so many, below the root, are run to learn from, however unlikely they are

    @classmethod
    def chain(cls, tokens: Sequence[int], path_logprobs: Sequence[float]) -> Nodes:
        """Return a chain, first token first."""
        num = len(tokens)
        return cls(tuple(tokens), tuple(range(ROOT, num - 1)), tuple(path_logprobs), tuple(range(1, num + 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, indices: Sequence[int], *, num_probes: int = 0) -> Nodes:
        """Return these nodes in this order; each one's parent is at the top or stands before it.

        Args:
            num_probes: how many of the first ones are probes.

        Raises:
            KeyError: A parent is missing or comes later: the target's pass would continue another text.
        """
        place, parents = {ROOT: ROOT}, []
        for i, idx in enumerate(indices):
            parents.append(place[self.parents[idx]])
            place[idx] = i
        return Nodes(
            tuple([self.tokens[i] for i in indices]),
            tuple(parents),
            tuple([self.path_logprobs[i] for i in indices]),
            tuple([self.depths[i] for i in indices]),
            tuple([self.writers[i] for i in indices]) if self.writers else (),
            num_probes,
        )

    def leading(self, count: int) -> Nodes:
        """Return the first ``count`` nodes: parents come before children, so any number of them is a tree."""
        if count >= len(self.tokens):
            return self
        return Nodes(
            self.tokens[:count],
            self.parents[:count],
            self.path_logprobs[:count],
            self.depths[:count],
            self.writers[:count],
            min(self.num_probes, count),
        )

    def best_chain(self) -> Nodes:
        """Return the path from the top down that follows the likeliest child; it has no probes."""
        best: dict[int, int] = {}  # by parent
        for idx, parent in enumerate(self.parents):
            if parent not in best or self.path_logprobs[idx] > self.path_logprobs[best[parent]]:
                best[parent] = idx
        path, end = [], best.get(ROOT)
        while end is not None:
            path.append(end)
            end = best.get(end)
        return self.take(path)

    def kept(self, flags: Sequence[bool]) -> Nodes:
        """Return the nodes that are flagged, probes included; a flagged node's parent must be flagged too."""
        if all(flags):
            return self
        indices = [idx for idx, flag in enumerate(flags) if flag]
        return self.take(indices, num_probes=sum(flags[: self.num_probes]))


NO_NODES = Nodes()


class MergedNodes:
    """A builder of `Nodes`. Equal tokens below one parent are one node, with the best score given."""

    def __init__(self) -> None:
        self._child_of: dict[tuple[int, int], int] = {}  # by (parent, token)
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.path_logprobs: list[float] = []
        self.depths: list[int] = []
        self.writers: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, path_logprob: float, writers: int = 0) -> int:
        """Return the index of a node, which is made if it is missing; the score is at most 0 and the parent's."""
        idx = self._child_of.setdefault((parent, token), len(self.tokens))
        if idx == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.path_logprobs.append(path_logprob)
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 1)
            self.writers.append(writers)
        else:
            self.writers[idx] |= writers
            self.path_logprobs[idx] = max(self.path_logprobs[idx], path_logprob)
        return idx

    def child(self, parent: int, token: int) -> int | None:
        """Return the index of a node; None if it is not there."""
        return self._child_of.get((parent, token))

    def nodes(self, num_probes: int = 0) -> Nodes:
        """Return the nodes in the order in which they were made."""
        return Nodes(
            tuple(self.tokens),
            tuple(self.parents),
            tuple(self.path_logprobs),
            tuple(self.depths),
            tuple(self.writers),
            num_probes,
        )


def check_nodes(nodes: NewNodes) -> None:
    """Raise ProtocolError unless a drafter can have sent these nodes."""
    lengths = [len(nodes.ids), len(nodes.parents), len(nodes.tokens), len(nodes.logprobs)]
    if len(set(lengths)) > 1:
        raise ProtocolError(f"ids, parents, tokens and logprobs of new nodes must be equally many, got {lengths}")
    last_id = -1
    for node_id, parent_id, token, logprob in zip(nodes.ids, nodes.parents, nodes.tokens, nodes.logprobs, strict=True):
        if not (node_id > last_id and 0 <= parent_id < node_id and token >= 0 and -math.inf < logprob <= _MAX_LOGPROB):
            raise ProtocolError(
                f"new node {node_id} (after {last_id}) has parent {parent_id}, token {token}, logprob {logprob}; ids "
                "must increase, parents be from 0 to below the own id, tokens 0 or more, logprobs finite and at most 0"
            )
        last_id = node_id


def check_rows(parent_ids: Sequence[int], tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> None:
    """Raise ProtocolError unless there is one row per parent, and one log-probability of at most 0 per token."""
    if not len(parent_ids) == len(tokens) == len(logprobs):
        raise ProtocolError(
            f"tokens and logprobs need {len(parent_ids)} rows, one per parent, got {len(tokens)} and {len(logprobs)}"
        )
    for row_tokens, row_logprobs in zip(tokens, logprobs, strict=True):
        if len(row_tokens) != len(row_logprobs):
            raise ProtocolError(
                f"a row has {len(row_tokens)} tokens but {len(row_logprobs)} logprobs; they must be equal"
            )
        if math.isnan(sum(row_logprobs)) or max(row_logprobs, default=0.0) > _MAX_LOGPROB:  # a NaN makes the sum NaN
            raise ProtocolError(
                f"drafted logprobs must be numbers of at most 0, got {list(row_logprobs)}; check the draft model"
            )
