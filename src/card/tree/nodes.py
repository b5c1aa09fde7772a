"""What is said about nodes of a candidate tree: those that the drafter made, and those that a query offers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from card.errors import ProtocolError

_MAX_LOGPROB = 1e-6  # a log-probability may exceed 0 by rounding only


@dataclass(frozen=True, slots=True)
class NewNodes:
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
        if len(filled) == 1:
            return filled[0]
        return cls(
            tuple([node_id for part in filled for node_id in part.ids]),
            tuple([parent for part in filled for parent in part.parents]),
            tuple([token for part in filled for token in part.tokens]),
            tuple([logprob for part in filled for logprob in part.logprobs]),
        )

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Answer of a query, best path score first for a tree, from the root down for a chain."""

    ids: tuple[int, ...]
    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # index into this answer, below the own index; -1 for the root
    path_logprobs: tuple[float, ...]  # sum of log-probabilities from the root
    depths: tuple[int, ...]  # below the root, whose children have depth 1
    writers: tuple[str, ...] = ()  # who proposed each, several joined by "+"; (): the drafter alone
    num_probes: int = 0  # the first so many are verified whatever they promise

    @classmethod
    def none(cls) -> Candidates:
        """Return no candidates."""
        return cls((), (), (), (), ())

    def __len__(self) -> int:
        return len(self.ids)


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
                f"logprobs must be numbers of at most 0, got {list(row_logprobs)}; check the draft model"
            )
